//! Which holders have a block, and in which tiers: one table for all of them, in shards with a lock each.
//!
//! A holder is one KV cache group of one engine rank. That all share a table makes a match one look-up per block, however
//! many engines there are. Short locks on a thousand shards were chosen over a lock-free map: those keep each entry in an
//! allocation of its own, and the table's first limit is memory. A writer holds one shard for one insertion, so a reader
//! that meets it waits for tens of nanoseconds, or for as long as a shard takes to grow (0.1 ms at ten thousand blocks).

use super::hash::HashByName;
use super::walk::{GPU_BIT, SPECULATIVE_BIT};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use thin_vec::ThinVec;

const SHARDS: usize = 1024;

/// Room for this many blocks is given back only when none is left.
const SHRINK_ABOVE: usize = 32;

/// One KV cache group of one engine rank.
pub type Holder = u16;

/// A set of tiers, a bit for each.
pub type Tiers = u8;

/// What one holder has of a block, in one word, so that lists of it are compared and searched as numbers: the holder in
/// the upper half, its tiers in the lowest byte.
pub type Holding = u32;

const fn holding(holder: Holder, tiers: Tiers) -> Holding {
    ((holder as u32) << 16) | tiers as u32
}

/// Takes a holding apart.
#[allow(clippy::cast_possible_truncation)]
pub const fn parts(holding: Holding) -> (Holder, Tiers) {
    ((holding >> 16) as Holder, holding as Tiers)
}

/// A block: who holds it, and when it was last of use. Most blocks have one holder, so that one is held without an
/// allocation, and the two shapes share the room of 16 bytes.
#[derive(Debug)]
enum Block {
    One {
        used: AtomicU32,
        holding: Holding,
    },
    /// In the order of holders, so that blocks with the same ones have the same list.
    Many {
        used: AtomicU32,
        holdings: ThinVec<Holding>,
    },
}

/// What a list allocates besides its elements.
const LIST_HEADER: usize = 2 * size_of::<usize>();

const BLOCK: usize = size_of::<(u64, Block)>();
const _: () = assert!(BLOCK == 24, "the documented memory per block rests on this");

type Shard = HashMap<u64, Block, HashByName>;

#[derive(Debug)]
pub struct Table {
    shards: Box<[RwLock<Shard>]>,
    /// Pairs of a block and a holder.
    pairs: AtomicUsize,
    /// Bytes of the lists of blocks with several holders.
    lists: AtomicUsize,
}

impl Block {
    fn holdings(&self) -> &[Holding] {
        match self {
            Self::One { holding, .. } => std::slice::from_ref(holding),
            Self::Many { holdings, .. } => holdings,
        }
    }

    fn used(&self) -> &AtomicU32 {
        match self {
            Self::One { used, .. } | Self::Many { used, .. } => used,
        }
    }

    fn used_mut(&mut self) -> &mut u32 {
        match self {
            Self::One { used, .. } | Self::Many { used, .. } => used.get_mut(),
        }
    }

    fn list_bytes(&self) -> usize {
        match self {
            Self::One { .. } => 0,
            Self::Many { holdings, .. } => LIST_HEADER + holdings.capacity() * size_of::<Holding>(),
        }
    }

    /// Where a holder is in the list, or would be.
    fn find(&self, holder: Holder) -> Result<usize, usize> {
        self.holdings()
            .binary_search_by_key(&holder, |one| parts(*one).0)
    }

    /// Adds tiers, which ends an assumption; what the holder had of it before, assumed or not.
    fn add(&mut self, holder: Holder, tiers: Tiers) -> Option<Tiers> {
        let at = self.find(holder);
        let old = match (self, at) {
            (Self::One { holding, .. }, Ok(_)) => holding,
            (Self::Many { holdings, .. }, Ok(at)) => &mut holdings[at],
            (Self::Many { holdings, .. }, Err(at)) => {
                holdings.insert(at, holding(holder, tiers));
                return None;
            }
            (one @ Self::One { .. }, Err(at)) => {
                let mut holdings = ThinVec::with_capacity(2);
                holdings.extend_from_slice(one.holdings());
                holdings.insert(at, holding(holder, tiers));
                let used = AtomicU32::new(*one.used_mut());
                *one = Self::Many { used, holdings };
                return None;
            }
        };
        let (_, before) = parts(*old);
        *old = holding(holder, (before & !SPECULATIVE_BIT) | tiers);
        Some(before)
    }

    /// Whether the holder had it and has it in no tier any more.
    fn remove(&mut self, holder: Holder, tiers: Tiers) -> bool {
        let Ok(at) = self.find(holder) else {
            return false;
        };
        let left = match self {
            Self::One { holding, .. } => {
                *holding &= !u32::from(tiers);
                parts(*holding).1
            }
            Self::Many { holdings, .. } => {
                holdings[at] &= !u32::from(tiers);
                parts(holdings[at]).1
            }
        };
        if left != 0 {
            return false;
        }
        if let Self::Many { holdings, .. } = self {
            holdings.remove(at);
            if let [holding] = **holdings {
                let used = AtomicU32::new(*self.used_mut());
                *self = Self::One { used, holding };
            } else if holdings.len() * 4 < holdings.capacity() {
                holdings.shrink_to_fit();
            }
        }
        true
    }

    /// Whether nobody has it: of a single holder it is kept to the end.
    fn is_unheld(&self) -> bool {
        matches!(self, Self::One { holding, .. } if parts(*holding).1 == 0)
    }
}

impl Table {
    pub fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            pairs: AtomicUsize::new(0),
            lists: AtomicUsize::new(0),
        }
    }

    pub fn pairs(&self) -> usize {
        self.pairs.load(Ordering::Relaxed)
    }

    /// Notes that a holder will have a block, unless it has it in its GPU; whether that is new.
    pub fn assume(&self, name: u64, holder: Holder, now: u32) -> bool {
        let fresh = self.tiers(name, holder) & (GPU_BIT | SPECULATIVE_BIT) == 0;
        if fresh {
            self.put(name, holder, SPECULATIVE_BIT, now);
        }
        fresh
    }

    /// Notes that a holder has a block in these tiers; whether it had it in none.
    pub fn add(&self, name: u64, holder: Holder, tiers: Tiers, now: u32) -> bool {
        let before = self.put(name, holder, tiers, now).unwrap_or(0);
        before & !SPECULATIVE_BIT == 0
    }

    fn put(&self, name: u64, holder: Holder, tiers: Tiers, now: u32) -> Option<Tiers> {
        let mut shard = self.write(name);
        let Some(block) = shard.get_mut(&name) else {
            let (used, holding) = (AtomicU32::new(now), holding(holder, tiers));
            shard.insert(name, Block::One { used, holding });
            self.pairs.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        *block.used_mut() = now;
        let bytes = block.list_bytes();
        let before = block.add(holder, tiers);
        self.lists
            .fetch_add(block.list_bytes().wrapping_sub(bytes), Ordering::Relaxed);
        self.pairs
            .fetch_add(before.is_none().into(), Ordering::Relaxed);
        before
    }

    /// Notes that a holder has a block no more in these tiers; whether it has it in none now, and had it before.
    pub fn remove(&self, name: u64, holder: Holder, tiers: Tiers) -> bool {
        let mut shard = self.write(name);
        let Some(block) = shard.get_mut(&name) else {
            return false;
        };
        let before = block.list_bytes();
        let gone = block.remove(holder, tiers);
        self.lists
            .fetch_add(block.list_bytes().wrapping_sub(before), Ordering::Relaxed);
        self.pairs.fetch_sub(gone.into(), Ordering::Relaxed);
        if block.is_unheld() {
            shard.remove(&name);
            if shard.len() * 4 < shard.capacity()
                && (shard.capacity() > SHRINK_ABOVE || shard.is_empty())
            {
                let room = shard.len() * 2;
                shard.shrink_to(room);
            }
        }
        gone
    }

    /// In which tiers a holder has a block.
    pub fn tiers(&self, name: u64, holder: Holder) -> Tiers {
        let shard = self.read(name);
        let held = shard.get(&name).and_then(|block| {
            let at = block.find(holder).ok()?;
            Some(parts(block.holdings()[at]).1)
        });
        held.unwrap_or(0)
    }

    /// Gives what all holders have of a block to `look`; it was of use `now`.
    pub fn look<T>(&self, name: u64, now: u32, look: impl FnOnce(&[Holding]) -> T) -> Option<T> {
        let shard = self.read(name);
        let block = shard.get(&name)?;
        // Only what changes is written: readers of a hot block would take its cache line from each other.
        if block.used().load(Ordering::Relaxed) != now {
            block.used().store(now, Ordering::Relaxed);
        }
        Some(look(block.holdings()))
    }

    /// When a block was last of use; `None` if nobody has it.
    pub fn used(&self, name: u64) -> Option<u32> {
        self.read(name)
            .get(&name)
            .map(|block| block.used().load(Ordering::Relaxed))
    }

    /// When every `step`th block was last of use.
    pub fn sample_used(&self, step: usize) -> Vec<u32> {
        let mut sample = Vec::new();
        let mut skip = 0;
        for shard in &self.shards {
            let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
            for block in shard.values() {
                if skip == 0 {
                    sample.push(block.used().load(Ordering::Relaxed));
                    skip = step;
                }
                skip -= 1;
            }
        }
        sample
    }

    /// Bytes that the table has allocated, to within what an allocator adds.
    pub fn bytes(&self) -> usize {
        let shards = self.shards.iter().map(|shard| {
            let shard = shard.read().unwrap_or_else(PoisonError::into_inner);
            map_bytes(shard.capacity(), BLOCK)
        });
        shards.sum::<usize>()
            + self.lists.load(Ordering::Relaxed)
            + SHARDS * size_of::<RwLock<Shard>>()
    }

    fn shard(&self, name: u64) -> &RwLock<Shard> {
        // Neither the low bits, which place a block within its shard, nor the high ones, by which the map tells
        // neighbours apart.
        #[allow(clippy::cast_possible_truncation)]
        &self.shards[(name >> 40) as usize % SHARDS]
    }

    fn read(&self, name: u64) -> RwLockReadGuard<'_, Shard> {
        self.shard(name)
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, name: u64) -> RwLockWriteGuard<'_, Shard> {
        self.shard(name)
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a `HashMap` of this capacity: a power of two of slots, of which 7 in 8 may be taken, and a byte for each.
pub fn map_bytes(capacity: usize, slot: usize) -> usize {
    if capacity == 0 {
        return 0;
    }
    (capacity + capacity / 7).next_power_of_two() * (slot + 1)
}
