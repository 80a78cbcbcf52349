//! Events become blocks: what a batch changes, in order, and with patience for parents that come after their children.

use super::roster::{ListedGroup, SourceName, Target};
use super::source::{Applied, GroupBlocks, Scratch, State};
use super::table::Tiers;
use super::walk::{CPU_BIT, GPU_BIT, NAMED_TIERS};
use super::{Index, Report};
use crate::events::{Batch, Event, Group, Malformed, Removed, Stored, decode};
use crate::tiers::{CPU, GPU};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

impl Index {
    /// Applies a batch of a source's events, which is listed if it was not. The index may be over its limit then, see
    /// [`Index::keep_to_the_limit`].
    ///
    /// # Errors
    /// When the payload is no batch.
    pub fn apply(&self, name: &SourceName, payload: &[u8]) -> Result<Report, Malformed> {
        let batch = decode(payload)?;
        loop {
            let source = self.rosters.source(name);
            let mut state = source.lock();
            // Otherwise it was forgotten since: its events are those of a new one.
            if !state.forgotten {
                let target = Target {
                    name,
                    source: &source,
                };
                let applied = self.apply_to(&target, &mut state, &batch);
                drop(state);
                return Ok(Report {
                    time: batch.time,
                    rank: batch.rank,
                    applied,
                    problem: batch.problem,
                });
            }
        }
    }

    fn apply_to(&self, target: &Target<'_>, state: &mut State, batch: &Batch<'_>) -> Applied {
        let mut applied = Applied {
            events: batch.events.len(),
            ignored: batch.unknown,
            malformed: batch.malformed,
            ..Applied::default()
        };
        let mut scratch = Scratch::default();
        // Stores with a block whose parent did not come yet.
        let mut parked: Vec<&Stored<'_>> = Vec::new();
        for event in &batch.events {
            match event {
                Event::Stored(event) => {
                    if self.store(target, state, event, &mut scratch, &mut applied) > 0 {
                        parked.push(event);
                    }
                }
                Event::Removed(event) => {
                    if !parked.is_empty() {
                        self.place(state, &mut parked, &mut scratch, &mut applied);
                        parked.retain(|stored| !is_about(event, stored));
                    }
                    self.remove(target, state, event, &mut applied);
                }
                Event::Cleared => {
                    parked.clear();
                    self.drop_assumed(state, |_| true);
                    let cleared = state
                        .groups
                        .iter_mut()
                        .map(|group| group.clear(&self.table));
                    applied.removed += cleared.sum::<usize>();
                }
            }
        }
        self.place(state, &mut parked, &mut scratch, &mut applied);
        for event in parked {
            applied.orphaned += self.store_in(state, event, &mut scratch, &mut applied);
        }
        for group in &mut state.groups {
            group.settle(&self.table);
        }
        if applied.orphaned + applied.malformed > 0 {
            target.source.note_partial();
        }
        applied
    }

    /// Stores what an event announces; how many of its blocks have no place yet.
    fn store(
        &self,
        target: &Target<'_>,
        state: &mut State,
        event: &Stored<'_>,
        scratch: &mut Scratch,
        applied: &mut Applied,
    ) -> usize {
        let Some(group) = self.group(target, state, event.group) else {
            applied.ignored += 1;
            return 0;
        };
        if event.block_size > 0 {
            match group.takes_size(event.block_size) {
                Some(true) => {}
                Some(false) => {
                    let (holder, sizes) = (group.holder, group.sizes.clone());
                    self.rosters.list(target, ListedGroup { holder, sizes });
                }
                None => {
                    applied.ignored += 1;
                    target.source.note_partial();
                    return 0;
                }
            }
        }
        if self.tier_bit(&event.tier).is_none() {
            target.source.note_partial();
        }
        self.store_in(state, event, scratch, applied)
    }

    fn store_in(
        &self,
        state: &mut State,
        event: &Stored<'_>,
        scratch: &mut Scratch,
        applied: &mut Applied,
    ) -> usize {
        let (Some(tiers), Some(group)) =
            (self.tier_bit(&event.tier), state.group(event.group.number))
        else {
            return 0;
        };
        let blocks = event.hashes.len() as u64;
        let stores = self.stores.fetch_add(blocks, Ordering::Relaxed) + blocks;
        #[allow(clippy::cast_possible_truncation)] // ages are differences, and wrap
        let now = (stores / self.stores_per_step) as u32;
        self.now.store(now, Ordering::Relaxed);
        group.store(
            event,
            tiers,
            now,
            (&self.namer, &self.table),
            scratch,
            applied,
        )
    }

    /// Tries parked stores until no more of them find their place; from the end, since what is out of order is mostly
    /// reversed.
    fn place(
        &self,
        state: &mut State,
        parked: &mut Vec<&Stored<'_>>,
        scratch: &mut Scratch,
        applied: &mut Applied,
    ) {
        let mut before = usize::MAX;
        while !parked.is_empty() && parked.len() < before {
            before = parked.len();
            parked.reverse();
            parked.retain(|event| self.store_in(state, event, scratch, applied) > 0);
        }
    }

    fn remove(
        &self,
        target: &Target<'_>,
        state: &mut State,
        event: &Removed<'_>,
        applied: &mut Applied,
    ) {
        let Some(group) = self.group(target, state, event.group) else {
            applied.ignored += 1;
            return;
        };
        if let Some(tiers) = self.tier_bit(&event.tier) {
            group.remove(&event.hashes, tiers, &self.table, applied);
        }
    }

    /// The group of an event, if it is one that holds the whole prefix.
    fn group<'a>(
        &self,
        target: &Target<'_>,
        state: &'a mut State,
        group: Group,
    ) -> Option<&'a mut GroupBlocks> {
        if state.group(group.number).is_none() {
            if state.is_full() {
                return None;
            }
            let holder = self.rosters.take_holder()?;
            state.groups.push(GroupBlocks::new(group, holder));
        }
        let known = state.group(group.number)?;
        if known.learn(group, &self.table) {
            self.rosters.unlist(target, known.holder);
        }
        known.whole_prefix.then_some(known)
    }

    /// The bit of a tier, which is new if the name is; `None` for those of too many names, which are left out.
    fn tier_bit(&self, name: &str) -> Option<Tiers> {
        match name {
            GPU => return Some(GPU_BIT),
            CPU => return Some(CPU_BIT),
            _ => {}
        }
        let find = |names: &[Arc<str>]| names.iter().position(|known| **known == *name);
        let found = find(&self.tiers.read().unwrap_or_else(PoisonError::into_inner));
        let at = found.or_else(|| {
            let mut names = self.tiers.write().unwrap_or_else(PoisonError::into_inner);
            find(&names).or_else(|| {
                let is_room = names.len() < NAMED_TIERS;
                is_room.then(|| {
                    names.push(name.into());
                    names.len() - 1
                })
            })
        })?;
        Some(1 << at)
    }
}

/// Whether a removal names a block of a store.
fn is_about(removed: &Removed<'_>, stored: &Stored<'_>) -> bool {
    removed.group.number == stored.group.number
        && stored
            .hashes
            .iter()
            .any(|hash| removed.hashes.contains(hash))
}
