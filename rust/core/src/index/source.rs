//! One engine rank as the index knows it: its own names for blocks, per KV cache group, and how its events change them.

use super::assume::Assumed;
use super::hash::{HashByFold, Namer};
use super::table::{Holder, Table, Tiers, map_bytes};
use super::walk::SPECULATIVE_BIT;
use crate::events::{EngineHash, Group, Stored};
use crate::tiers::GPU;
use std::collections::{HashMap, VecDeque};

/// More groups than any engine has.
const MAX_GROUPS: usize = 32;

/// Block sizes that one group may have: engines have one, hybrid models register parts of blocks as well.
const MAX_SIZES: usize = 4;

/// What a batch did, counted in blocks unless it says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Applied {
    /// Events that were read.
    pub events: usize,
    /// Blocks that this rank did not have before.
    pub added: usize,
    /// Blocks that it does not have any more in any tier.
    pub removed: usize,
    /// Blocks of which the one before is not known, nor the block itself, so that they have no place.
    pub orphaned: usize,
    /// Events of groups that do not hold the whole prefix, or of types that are not known.
    pub ignored: usize,
    /// Events that make no sense.
    pub malformed: usize,
}

/// The blocks of one group.
#[derive(Debug)]
pub struct GroupBlocks {
    pub number: u32,
    /// Whether it holds the whole prefix, so that its blocks say what can be reused. No blocks are kept of others.
    pub whole_prefix: bool,
    pub holder: Holder,
    pub sizes: Vec<usize>,
    names: HashMap<EngineHash, u64, HashByFold>,
    /// Blocks that lost their last tier in this batch; a later event of it may give them another.
    bare: Vec<EngineHash>,
}

/// Memory that is used again and again.
#[derive(Debug, Default)]
pub struct Scratch {
    text: Vec<u8>,
    tokens: Vec<u8>,
}

impl GroupBlocks {
    /// A group as its first event tells it. Where that says nothing, only group 0 counts.
    pub fn new(group: Group, holder: Holder) -> Self {
        Self {
            number: group.number,
            whole_prefix: group.whole_prefix.unwrap_or(group.number == 0),
            holder,
            sizes: Vec::new(),
            names: HashMap::default(),
            bare: Vec::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn bytes(&self) -> usize {
        map_bytes(self.names.capacity(), size_of::<(EngineHash, u64)>())
    }

    /// Learns from a later event what the group is; whether its blocks count no more.
    pub fn learn(&mut self, group: Group, table: &Table) -> bool {
        let counted = self.whole_prefix;
        self.whole_prefix = group.whole_prefix.unwrap_or(counted);
        let ended = counted && !self.whole_prefix;
        if ended {
            self.clear(table);
            self.sizes.clear();
        }
        ended
    }

    /// Whether a block size is known; `None` if there are too many to take it.
    pub fn takes_size(&mut self, size: usize) -> Option<bool> {
        if self.sizes.contains(&size) {
            return Some(true);
        }
        if self.sizes.len() == MAX_SIZES {
            return None;
        }
        self.sizes.push(size);
        Some(false)
    }

    /// Notes blocks in a tier, from the first that is not known on; how many could not be placed.
    ///
    /// A name that is known keeps its place, whatever the event says of its parent and tokens: placeholders say nothing,
    /// and offload events may leave out the extra keys. For the latter a block that starts a sequence is not taken: whether
    /// it is salted cannot be known.
    pub fn store(
        &mut self,
        event: &Stored<'_>,
        tiers: Tiers,
        now: u32,
        (namer, table): (&Namer, &Table),
        scratch: &mut Scratch,
        applied: &mut Applied,
    ) -> usize {
        let mut before = match event.parent {
            None if event.tokens.is_empty() || (event.extra.is_none() && event.tier != GPU) => None,
            None => Some(namer.root()),
            Some(parent) => self.names.get(&parent).copied(),
        };
        let adapter = crate::events::extra_of_prompt(event.lora.as_deref(), None, 0);
        let mut orphaned = 0;
        for (index, &hash) in event.hashes.iter().enumerate() {
            let known = self.names.get(&hash).copied();
            let name = match (known, before) {
                (Some(name), _) => name,
                (None, Some(before)) if event.block_size > 0 => {
                    let at = index * event.block_size;
                    scratch.tokens.clear();
                    let tokens = &event.tokens[at..at + event.block_size];
                    scratch
                        .tokens
                        .extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
                    let extra = event.extra.as_ref().map_or(&adapter, |extra| &extra[index]);
                    let name = namer.name(before, &scratch.tokens, extra, &mut scratch.text);
                    self.names.insert(hash, name);
                    name
                }
                (None, _) => {
                    orphaned += 1;
                    before = None;
                    continue;
                }
            };
            before = Some(name);
            applied.added += usize::from(table.add(name, self.holder, tiers, now));
        }
        orphaned
    }

    /// Notes that blocks are gone from a tier.
    pub fn remove(
        &mut self,
        hashes: &[EngineHash],
        tiers: Tiers,
        table: &Table,
        applied: &mut Applied,
    ) {
        for &hash in hashes {
            if let Some(&name) = self.names.get(&hash) {
                applied.removed +=
                    usize::from(table.remove(name, self.holder, tiers | SPECULATIVE_BIT));
                // By another name of the same block it may have gone before.
                if table.tiers(name, self.holder) == 0 {
                    self.bare.push(hash);
                }
            }
        }
    }

    /// Forgets the names of blocks that are in no tier at the end of a batch.
    pub fn settle(&mut self, table: &Table) {
        for hash in std::mem::take(&mut self.bare) {
            if self
                .names
                .get(&hash)
                .is_some_and(|name| table.tiers(*name, self.holder) == 0)
            {
                self.names.remove(&hash);
            }
        }
        self.shrink();
    }

    /// Forgets the blocks that were of no use for long: those for which `is_old` says so, by when they were last used.
    /// Whether there were any.
    pub fn forget_old(&mut self, table: &Table, is_old: impl Fn(u32) -> bool) -> bool {
        let (holder, before) = (self.holder, self.names.len());
        self.names.retain(|_, name| match table.used(*name) {
            Some(used) if !is_old(used) => true,
            Some(_) => {
                table.remove(*name, holder, Tiers::MAX);
                false
            }
            None => false,
        });
        let forgot = self.names.len() < before;
        self.shrink();
        forgot
    }

    /// Forgets all blocks; how many there were.
    pub fn clear(&mut self, table: &Table) -> usize {
        self.bare.clear();
        let names = std::mem::take(&mut self.names);
        let holder = self.holder;
        names
            .into_values()
            .filter(|name| table.remove(*name, holder, Tiers::MAX))
            .count()
    }

    fn shrink(&mut self) {
        if self.names.capacity() > 1024 && self.names.len() * 4 < self.names.capacity() {
            self.names.shrink_to(self.names.len() * 2);
        }
    }
}

/// What a source's lock guards.
#[derive(Debug, Default)]
pub struct State {
    pub groups: Vec<GroupBlocks>,
    /// What requests on their way will bring, the oldest in front.
    pub assumed: VecDeque<Assumed>,
    /// The source was forgotten: what still has it must find the new one.
    pub forgotten: bool,
}

impl State {
    pub fn group(&mut self, number: u32) -> Option<&mut GroupBlocks> {
        self.groups.iter_mut().find(|group| group.number == number)
    }

    pub fn is_full(&self) -> bool {
        self.groups.len() >= MAX_GROUPS
    }
}
