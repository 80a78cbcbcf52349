//! Who is in the index: a small list that matches take a snapshot of, so that they never wait for an engine's events.

use super::source::State;
use super::table::Holder;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// How many holders given back wait before one is taken again.
const WAIT: usize = 32;

/// One rank of one endpoint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceName {
    /// The endpoint's name, as the gateway calls it.
    pub endpoint: Arc<str>,
    /// Its data-parallel rank.
    pub rank: u32,
}

/// A source's state, behind its own lock: ranks do not wait for each other.
#[derive(Debug, Default)]
pub struct Source {
    state: Mutex<State>,
    partial: AtomicBool,
}

impl Source {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it told of blocks that were not taken, or were let go.
    pub fn is_partial(&self) -> bool {
        self.partial.load(Ordering::Relaxed)
    }

    pub fn note_partial(&self) {
        self.partial.store(true, Ordering::Relaxed);
    }
}

/// The source that events are for.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    pub name: &'a SourceName,
    pub source: &'a Arc<Source>,
}

/// What a match must know of one group.
#[derive(Debug, Clone)]
pub struct ListedGroup {
    pub holder: Holder,
    pub sizes: Vec<usize>,
}

#[derive(Debug, Clone, Default)]
pub struct Listed {
    pub source: Arc<Source>,
    /// Those that hold the whole prefix.
    pub groups: Vec<ListedGroup>,
}

pub type Roster = BTreeMap<SourceName, Listed>;

#[derive(Debug, Default)]
pub struct Rosters {
    current: RwLock<Arc<Roster>>,
    holders: Mutex<Holders>,
}

/// Numbers for holders, each in use once. Those given back wait for others behind them, so that a match with an old
/// snapshot does not take a new holder for the one before.
#[derive(Debug, Default)]
struct Holders {
    next: Holder,
    free: VecDeque<Holder>,
}

impl Rosters {
    pub fn snapshot(&self) -> Arc<Roster> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn change<T>(&self, change: impl FnOnce(&mut Roster) -> T) -> T {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut current))
    }

    /// Lists a source's group, or its new block sizes.
    pub fn list(&self, of: &Target<'_>, group: ListedGroup) {
        self.change_groups(of, |groups| {
            groups.retain(|one| one.holder != group.holder);
            groups.push(group);
        });
    }

    /// Takes a group off the list: its blocks do not count.
    pub fn unlist(&self, of: &Target<'_>, holder: Holder) {
        self.change_groups(of, |groups| groups.retain(|one| one.holder != holder));
    }

    fn change_groups(&self, of: &Target<'_>, change: impl FnOnce(&mut Vec<ListedGroup>)) {
        self.change(|roster| {
            // Another one of this name may be listed by now: then this one was forgotten.
            let listed = roster
                .get_mut(of.name)
                .filter(|listed| Arc::ptr_eq(&listed.source, of.source));
            if let Some(listed) = listed {
                change(&mut listed.groups);
            }
        });
    }

    /// The source of this name, a new one if there is none.
    pub fn source(&self, name: &SourceName) -> Arc<Source> {
        if let Some(listed) = self.snapshot().get(name) {
            return Arc::clone(&listed.source);
        }
        self.change(|roster| Arc::clone(&roster.entry(name.clone()).or_default().source))
    }

    /// A number for a new holder; `None` when all are taken.
    pub fn take_holder(&self) -> Option<Holder> {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        if holders.free.len() > WAIT || holders.next == Holder::MAX {
            return holders.free.pop_front();
        }
        holders.next += 1;
        Some(holders.next - 1)
    }

    pub fn give_back(&self, holder: Holder) {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.free.push_back(holder);
    }

    /// One more than the highest holder ever given.
    pub fn holders(&self) -> usize {
        let holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.next.into()
    }
}
