//! The prefix index: which engine holds which prefix, in which tier, from the KV events of all engines.
//!
//! - A block has a name of the index's own, over its tokens and all before it, so that engines with different hash seeds
//!   meet. Each rank's names for its blocks are mapped to those, per KV cache group, for parents and removals.
//! - Only groups that hold the whole prefix count. A rank with several has what all of them have.
//! - A block of which the parent is unknown is never taken for the start of a sequence. It may be announced before its
//!   parent within a batch, as offload events are; else it is left out.
//! - Stores are a set, not a count: one removal from a tier ends any number of stores there. Engines announce again what a
//!   request reuses.
//! - Whatever is doubtful is left out: the index may hold less than the engines do, and then costs a chance, but what it
//!   holds was announced and not taken back.
//!
//! Memory is 16 bytes of name, 24 of block and a byte of each for the map, in tables that are between 7/16 and 7/8 full: 48
//! to 96 bytes for a block with one holder, and less per holder for those with several ([`Index::bytes`] counts it). At the
//! limit the blocks go that were of no use for longest, by stores and matches, an eighth of the limit at a time.

mod apply;
mod assume;
mod hash;
mod limit;
mod roster;
mod source;
mod table;
mod walk;

pub use roster::SourceName;
pub use source::Applied;

use crate::events::Malformed;
use crate::tiers::{CPU, GPU, SPECULATIVE};
use hash::Namer;
use roster::Rosters;
use source::GroupBlocks;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use table::Table;
use walk::{MAX_TIERS, NAMED_TIERS, Prompt, Walk};

/// How much of one prompt one source has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Whose blocks.
    pub source: SourceName,
    /// Tokens by tier, without tiers that have none: in the GPU the prefix that is there; for another tier the prefix up to
    /// which each block is in the GPU's prefix, in that tier or in the CPU tier.
    pub tokens: Vec<(Arc<str>, u64)>,
}

/// What one batch of events did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// When the engine made it, in seconds of its clock.
    pub time: f64,
    /// The rank that it names, if any.
    pub rank: Option<u32>,
    /// What became of its events.
    pub applied: Applied,
    /// What was wrong with the first malformed event.
    pub problem: Option<Malformed>,
}

/// One source's size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSize {
    /// Which.
    pub source: SourceName,
    /// Its blocks, in any tier.
    pub blocks: usize,
    /// Tokens in its blocks.
    pub block_sizes: Vec<usize>,
}

/// A source that was forgotten, and its blocks for [`Index::purge`].
#[derive(Debug, Default)]
pub struct Forgotten {
    groups: Vec<GroupBlocks>,
}

impl Forgotten {
    /// Its blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.groups.iter().map(GroupBlocks::len).sum()
    }
}

/// The index. All methods may be called from any thread.
#[derive(Debug)]
pub struct Index {
    namer: Namer,
    table: Table,
    rosters: Rosters,
    tiers: RwLock<Vec<Arc<str>>>,
    max_blocks: usize,
    /// Stores so far; the index has no other clock, and in `now` it has this one in steps.
    stores: AtomicU64,
    stores_per_step: u64,
    now: AtomicU32,
    trimming: Mutex<()>,
    /// Blocks of sources that were forgotten, still in the table.
    doomed: AtomicUsize,
    /// Blocks that are assumed, of all sources.
    assumed: AtomicUsize,
}

impl Index {
    /// An empty index of at most `max_blocks` pairs of a block and a holder. `seed` salts its names: a random one keeps
    /// clients from making prompts that collide.
    #[must_use]
    pub fn new(max_blocks: usize, seed: u64) -> Self {
        Self {
            namer: Namer::new(seed),
            table: Table::new(),
            rosters: Rosters::default(),
            tiers: RwLock::new(vec![GPU.into(), CPU.into()]),
            max_blocks,
            stores: AtomicU64::new(0),
            stores_per_step: (max_blocks as u64 / 1024).clamp(1, 256),
            now: AtomicU32::new(0),
            trimming: Mutex::default(),
            doomed: AtomicUsize::new(0),
            assumed: AtomicUsize::new(0),
        }
    }

    /// Lists a source, so that matches tell it has nothing rather than not to know it.
    pub fn add(&self, source: &SourceName) {
        self.rosters.source(source);
    }

    /// Forgets a source. Matches do not see it any more, but its blocks are in memory until they are purged, which takes
    /// some 0.2 µs for each.
    #[must_use = "its blocks take memory until they are purged"]
    pub fn forget(&self, name: &SourceName) -> Forgotten {
        let mut forgotten = Forgotten::default();
        let Some(listed) = self.rosters.change(|roster| roster.remove(name)) else {
            return forgotten;
        };
        let mut state = listed.source.lock();
        state.forgotten = true;
        self.drop_assumed(&mut state, |_| true);
        forgotten.groups = std::mem::take(&mut state.groups);
        self.doomed.fetch_add(forgotten.blocks(), Ordering::Relaxed);
        forgotten
    }

    /// Takes the blocks of a source that was forgotten out of memory.
    pub fn purge(&self, forgotten: Forgotten) {
        for mut group in forgotten.groups {
            self.doomed.fetch_sub(group.len(), Ordering::Relaxed);
            group.clear(&self.table);
            self.rosters.give_back(group.holder);
        }
    }

    /// How much of a prompt each source has, for all that are listed. `tokens` are little-endian `u32`s.
    ///
    /// The prompt's last token does not count: engines compute it in any case.
    #[must_use]
    pub fn matches(&self, tokens: &[u8], lora: Option<&str>, salt: Option<&str>) -> Vec<Match> {
        let prompt = Prompt::new(tokens, lora, salt).without_last();
        let roster = self.rosters.snapshot();
        let sizes: BTreeSet<usize> = roster
            .values()
            .flat_map(|listed| &listed.groups)
            .flat_map(|group| group.sizes.iter().copied())
            .collect();
        let holders = self.rosters.holders();
        let mut reached = vec![[0_u64; MAX_TIERS]; holders];
        let now = self.now.load(Ordering::Relaxed);
        for size in sizes {
            let of_size = || {
                let groups = roster.values().flat_map(|listed| &listed.groups);
                groups
                    .filter(|group| group.sizes.contains(&size))
                    .map(|group| group.holder)
            };
            let mut walk = Walk::new(holders);
            of_size().for_each(|holder| walk.enter(holder));
            walk.walk(prompt.names(size, &self.namer), now, &self.table);
            for holder in of_size() {
                for (tier, reached) in reached[usize::from(holder)].iter_mut().enumerate() {
                    *reached = (*reached).max(u64::from(walk.blocks(holder, tier)) * size as u64);
                }
            }
        }
        let speculative: Arc<str> = SPECULATIVE.into();
        let names = self.tiers.read().unwrap_or_else(PoisonError::into_inner);
        let matches = roster.iter().map(|(source, listed)| {
            let all = |tier: usize| {
                let groups = listed
                    .groups
                    .iter()
                    .map(|group| reached[usize::from(group.holder)][tier]);
                groups.min().unwrap_or(0)
            };
            let all_names = names.iter().enumerate();
            let tokens = all_names
                .chain([(NAMED_TIERS, &speculative)])
                .map(|(tier, name)| (Arc::clone(name), all(tier)));
            Match {
                source: source.clone(),
                tokens: tokens.filter(|(_, tokens)| *tokens > 0).collect(),
            }
        });
        matches.collect()
    }

    /// Whether a source may have more than the index knows: it told of blocks that made no sense, had no place or found no
    /// room, here or since. One that is not listed has.
    #[must_use]
    pub fn is_partial(&self, name: &SourceName) -> bool {
        let roster = self.rosters.snapshot();
        roster
            .get(name)
            .is_none_or(|listed| listed.source.is_partial())
    }

    /// Pairs of a block and a holder, without those that were forgotten.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table
            .pairs()
            .saturating_sub(self.doomed.load(Ordering::Relaxed))
    }

    /// Whether there is no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What each source holds.
    #[must_use]
    pub fn sizes(&self) -> Vec<SourceSize> {
        let roster = self.rosters.snapshot();
        let sizes = roster.iter().map(|(source, listed)| {
            let state = listed.source.lock();
            let mut block_sizes: Vec<_> = state
                .groups
                .iter()
                .flat_map(|group| group.sizes.iter().copied())
                .collect();
            block_sizes.sort_unstable();
            block_sizes.dedup();
            SourceSize {
                source: source.clone(),
                blocks: state.groups.iter().map(GroupBlocks::len).sum(),
                block_sizes,
            }
        });
        sizes.collect()
    }

    /// Bytes that are allocated for blocks, to within what an allocator adds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let roster = self.rosters.snapshot();
        let names = roster.values().map(|listed| {
            let state = listed.source.lock();
            state.groups.iter().map(GroupBlocks::bytes).sum::<usize>()
        });
        self.table.bytes() + names.sum::<usize>()
    }
}
