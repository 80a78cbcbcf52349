//! The index's own names for blocks, and how its tables spread names.
//!
//! A name is XXH3-64 over the name of the block before, the tokens and what else the KV depends on. It is half as wide as
//! a link of [`crate::chain`], since it is kept once per block in memory, never leaves the process, and only predicts: an
//! engine checks its own hashes before it reuses anything.

use std::hash::{BuildHasherDefault, Hasher};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Names blocks under one secret.
#[derive(Debug)]
pub struct Namer {
    seed: u64,
}

impl Namer {
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// What the first block of every sequence has before it.
    pub const fn root(&self) -> u64 {
        self.seed
    }

    /// The name of a block. `tokens` are little-endian `u32`s, `text` is memory to work in.
    pub fn name(&self, before: u64, tokens: &[u8], extra: &[u8], text: &mut Vec<u8>) -> u64 {
        text.clear();
        text.extend(before.to_le_bytes());
        text.extend((tokens.len() as u64).to_le_bytes());
        text.extend_from_slice(tokens);
        text.extend_from_slice(extra);
        xxh3_64_with_seed(text, self.seed)
    }
}

/// For keys that are names already: they are spread as they are.
#[derive(Debug, Default)]
pub struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64");
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// For keys that engines made, which may be small numbers: one multiplication spreads them over all bits.
#[derive(Debug, Default)]
pub struct Folded(u64);

impl Hasher for Folded {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64");
    }

    #[allow(clippy::cast_possible_truncation)] // takes the halves apart
    fn write_u64(&mut self, key: u64) {
        let product = u128::from(key ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f_e703_7ed1;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

pub type HashByName = BuildHasherDefault<AsItIs>;
pub type HashByFold = BuildHasherDefault<Folded>;
