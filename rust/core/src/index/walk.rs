//! A prompt's walk through the table, block by block, with all holders at once.

use super::hash::Namer;
use super::table::{Holder, Holding, Table, Tiers, parts};
use crate::events::extra_of_prompt;

/// The bit of the GPU.
pub const GPU_BIT: Tiers = 1;

/// The bit of the CPU tier, through which all that lies behind it passes.
pub const CPU_BIT: Tiers = 2;

/// The bit of blocks that are only assumed.
pub const SPECULATIVE_BIT: Tiers = 1 << NAMED_TIERS;

/// Tiers that can be told apart.
pub const MAX_TIERS: usize = Tiers::BITS as usize;

/// Those that engines name.
pub const NAMED_TIERS: usize = MAX_TIERS - 1;

const TOKEN: usize = size_of::<u32>();

/// A prompt: its tokens, and what its blocks depend on besides.
#[derive(Debug, Clone)]
pub struct Prompt<'a> {
    /// Little-endian `u32`s.
    pub tokens: &'a [u8],
    /// The extra bytes of its first block.
    pub first: Vec<u8>,
    /// Those of all others.
    pub others: Vec<u8>,
}

impl<'a> Prompt<'a> {
    /// A prompt by its tokens, its adapter and its salt.
    pub fn new(tokens: &'a [u8], lora: Option<&str>, salt: Option<&str>) -> Self {
        Self {
            tokens,
            first: extra_of_prompt(lora, salt, 0),
            others: extra_of_prompt(lora, None, 1),
        }
    }

    /// The prompt without its last token, which engines compute in any case.
    pub fn without_last(&self) -> Self {
        let cached = self.tokens.len().saturating_sub(TOKEN);
        Self {
            tokens: &self.tokens[..cached],
            ..self.clone()
        }
    }

    /// The names of its full blocks of `size` tokens.
    pub fn names(&self, size: usize, namer: &Namer) -> impl Iterator<Item = u64> {
        let blocks = self.tokens.chunks_exact(size.saturating_mul(TOKEN));
        let extra = std::iter::once(&self.first).chain(std::iter::repeat(&self.others));
        let (mut before, mut text) = (namer.root(), Vec::new());
        blocks.zip(extra).map(move |(tokens, extra)| {
            before = namer.name(before, tokens, extra, &mut text);
            before
        })
    }
}

/// How far one holder follows a prompt, in one word: a walk goes through all of them at each step.
///
/// In the GPU that is the unbroken run of blocks there. A tier reaches as far as each block is in it, or in the GPU's run, or
/// in the CPU tier: that is how far a load from it can bring a request.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// The step that it takes next.
    next: u32,
    /// Tiers that reach up to there.
    alive: Tiers,
    /// Tiers that have any of the blocks.
    has: Tiers,
}

impl Run {
    /// Takes no part: there is no such step.
    const OUT: Self = Self {
        next: u32::MAX,
        alive: 0,
        has: 0,
    };
    const START: Self = Self {
        next: 0,
        alive: Tiers::MAX,
        has: 0,
    };

    /// After a block in these tiers.
    const fn after(self, tiers: Tiers) -> Self {
        let is_everywhere = (self.alive & tiers & GPU_BIT) | (tiers & CPU_BIT) != 0;
        let everywhere = if is_everywhere { !GPU_BIT } else { 0 };
        let alive = self.alive & (tiers | everywhere);
        Self {
            next: if alive == 0 { u32::MAX } else { self.next + 1 },
            alive,
            has: self.has | (tiers & alive),
        }
    }
}

/// A walk of all holders.
///
/// Where neighbouring blocks have the same holders in the same tiers, which is the rule, only the first two are looked at
/// holder by holder: a step is a block that differs from the one before, and the others only lengthen it.
#[derive(Debug)]
pub struct Walk {
    runs: Vec<Run>,
    /// In blocks, for tiers that are not alive.
    ends: Vec<[u32; MAX_TIERS]>,
    /// The block at which each step began.
    steps: Vec<u32>,
    /// Blocks that were passed.
    blocks: u32,
}

impl Walk {
    /// A walk for holders below this number, with all of them out.
    pub fn new(holders: usize) -> Self {
        Self {
            runs: vec![Run::OUT; holders],
            ends: vec![[0; MAX_TIERS]; holders],
            steps: Vec::new(),
            blocks: 0,
        }
    }

    /// Lets a holder take part.
    pub fn enter(&mut self, holder: Holder) {
        self.runs[usize::from(holder)] = Run::START;
    }

    /// Walks the blocks of these names until no holder goes on.
    pub fn walk(&mut self, names: impl Iterator<Item = u64>, now: u32, table: &Table) {
        let mut last: Vec<Holding> = Vec::new();
        for name in names {
            let pass = |holdings: &[Holding]| {
                if holdings == last {
                    return true;
                }
                let (goes_on, same) = self.step(holdings);
                last.clear();
                if same {
                    last.extend_from_slice(holdings);
                }
                goes_on
            };
            if table.look(name, now, pass) != Some(true) {
                break;
            }
            self.blocks += 1;
        }
    }

    /// Takes a block that differs from the one before; whether any holder goes on, and whether all do as they did.
    fn step(&mut self, holdings: &[Holding]) -> (bool, bool) {
        #[allow(clippy::cast_possible_truncation)] // prompts are shorter
        let step = self.steps.len() as u32;
        self.steps.push(self.blocks);
        let (mut alive, mut all_same) = (0, true);
        for &one in holdings {
            let (holder, tiers) = parts(one);
            let holder = usize::from(holder);
            let Some(run) = self.runs.get_mut(holder).filter(|run| run.next == step) else {
                continue;
            };
            let before = std::mem::replace(run, run.after(tiers));
            alive |= run.alive;
            all_same &= (before.alive, before.has) == (run.alive, run.has);
            let mut ended = before.alive & !run.alive;
            while ended != 0 {
                self.ends[holder][ended.trailing_zeros() as usize] = self.blocks;
                ended &= ended - 1;
            }
        }
        (alive != 0, all_same)
    }

    /// How many blocks a tier of a holder reaches; 0 if it has none of them itself.
    pub fn blocks(&self, holder: Holder, tier: usize) -> u32 {
        let holder = usize::from(holder);
        let run = self.runs[holder];
        let bit = 1 << tier;
        if run.has & bit == 0 {
            0
        } else if run.alive & bit == 0 {
            self.ends[holder][tier]
        } else {
            // It went on to the step at which it was missing, or to the end.
            let missing = self.steps.get(run.next as usize);
            missing.copied().unwrap_or(self.blocks)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORAGE: Tiers = 4;

    /// One holder's blocks by their tiers, with another one that has all of them.
    fn ends(blocks: &[Tiers]) -> [u32; 3] {
        let mut walk = Walk::new(2);
        walk.enter(0);
        for &tiers in blocks {
            if !walk.step(&[u32::from(tiers), (1 << 16) | 1]).0 {
                break;
            }
            walk.blocks += 1;
        }
        [0, 1, 2].map(|tier| walk.blocks(0, tier))
    }

    #[test]
    fn a_tier_reaches_as_far_as_a_load_from_it_would() {
        let (g, c, s) = (GPU_BIT, CPU_BIT, STORAGE);
        for (blocks, expected) in [
            (&[][..], [0, 0, 0]),
            (&[g, g], [2, 0, 0]),
            (&[g | c, g | c, c, c], [2, 4, 0]),
            // Evicted from the end: the outer tiers begin where the GPU's run ends.
            (&[g, g, c, s, s], [2, 3, 5]),
            (&[s, s, g], [0, 0, 2]),
            (&[c, s, c, s], [0, 1, 4]),
            (&[g, c, g, s], [1, 2, 0]),
            // What is only in the GPU behind its run cannot be loaded.
            (&[g, s, g, s], [1, 0, 2]),
            (&[c, g, c], [0, 1, 0]),
        ] {
            assert_eq!(ends(blocks), expected, "{blocks:?}");
        }
    }

    #[test]
    fn a_holder_that_misses_a_block_is_out() {
        let mut walk = Walk::new(2);
        walk.enter(0);
        walk.enter(1);
        for holders in [&[0, 1][..], &[1], &[0, 1]] {
            let holdings: Vec<Holding> = holders.iter().map(|holder| (holder << 16) | 1).collect();
            assert!(walk.step(&holdings).0);
            walk.blocks += 1;
        }
        assert_eq!((walk.blocks(0, 0), walk.blocks(1, 0)), (1, 3));
    }
}
