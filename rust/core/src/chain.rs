//! Chain hashes of token blocks: one digest for each block, over its tokens and everything before them.
//!
//! Two sequences share the digest of block i when their first i+1 blocks hold the same tokens and the same extra bytes
//! (`LoRA`, cache salt, media) and both were made with the same seed. Engines compare digests to find how much of a
//! remote sequence's KV is theirs, the index to find which endpoint holds which prefix.
//!
//! The scheme, version 1, is the same in every process, on every machine and in every release:
//!
//! ```text
//! key       = XXH3-64(seed)
//! link[-1]  = XXH3-128("kvroute.chain.v1" · seed)
//! link[i]   = XXH3-128, seeded with key, of
//!             link[i-1] (16 bytes) · token count (u64) · tokens (u32 each) · extra length (u64) · extra
//! digest[i] = the low 8 bytes of link[i]
//! ```
//!
//! All integers are little-endian, links and digests too. Each field has a fixed width or its length before it, so no
//! two inputs give the same text. Links are wider than digests: a collision of two digests stays at its block.
//!
//! XXH3 is not a cryptographic hash. Against accidents 64 bits are plenty (one in 2^64 for each pair that is compared).
//! A client that knows the seed can search for two prompts with one digest. Where tenants do not trust each other,
//! give a secret as the seed, so that there is nothing to search with, and put the tenant's salt in the extra bytes.

use xxhash_rust::xxh3::{xxh3_64, xxh3_128, xxh3_128_with_seed};

const SCHEME: &[u8] = b"kvroute.chain.v1";

/// Width in bytes of the digest of one block.
pub const DIGEST: usize = 8;

/// Width in bytes of one token id.
pub const TOKEN: usize = size_of::<u32>();

/// A chain of token blocks, at its end.
#[derive(Debug, Clone)]
pub struct Chain {
    key: u64,
    link: u128,
    /// The text of the next link, kept for its memory.
    text: Vec<u8>,
}

impl Chain {
    /// The start of all chains with this seed.
    #[must_use]
    pub fn new(seed: &[u8]) -> Self {
        Self {
            key: xxh3_64(seed),
            link: xxh3_128(&[SCHEME, seed].concat()),
            text: Vec::new(),
        }
    }

    /// Appends one block of tokens and gives its digest.
    pub fn push(&mut self, tokens: &[u32], extra: &[u8]) -> [u8; DIGEST] {
        self.begin(tokens.len());
        self.text
            .extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        self.end(extra)
    }

    /// Appends one block of tokens that are given as little-endian `u32`s, and gives its digest.
    ///
    /// # Panics
    /// When `tokens` is not a whole number of `u32`s.
    pub fn push_bytes(&mut self, tokens: &[u8], extra: &[u8]) -> [u8; DIGEST] {
        assert_eq!(tokens.len() % TOKEN, 0, "tokens are {TOKEN} bytes each");
        self.begin(tokens.len() / TOKEN);
        self.text.extend_from_slice(tokens);
        self.end(extra)
    }

    fn begin(&mut self, tokens: usize) {
        self.text.clear();
        self.text.extend(self.link.to_le_bytes());
        self.text.extend((tokens as u64).to_le_bytes());
    }

    fn end(&mut self, extra: &[u8]) -> [u8; DIGEST] {
        self.text.extend((extra.len() as u64).to_le_bytes());
        self.text.extend_from_slice(extra);
        self.link = xxh3_128_with_seed(&self.text, self.key);
        let [digest @ .., _, _, _, _, _, _, _, _] = self.link.to_le_bytes();
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digests(seed: &[u8], blocks: &[(&[u32], &[u8])]) -> Vec<u64> {
        let mut chain = Chain::new(seed);
        blocks
            .iter()
            .map(|(tokens, extra)| u64::from_le_bytes(chain.push(tokens, extra)))
            .collect()
    }

    #[test]
    fn digests_are_the_same_in_every_process_and_version() {
        let blocks: [(&[u32], &[u8]); 3] = [
            (&[1, 2, 3, 4], b""),
            (&[5, 6, 7, 8], b"lora"),
            (&[9, 0, 0, u32::MAX], b""),
        ];
        assert_eq!(
            digests(b"", &blocks),
            [
                0x7249_a216_50ee_7e73,
                0x4aa2_8f7f_32ef_a1f3,
                0x2d70_35dc_2370_a937
            ]
        );
        assert_eq!(
            digests(b"secret", &blocks),
            [
                0x671b_22fa_22ac_547e,
                0x4e56_77a9_b28e_9120,
                0x5973_0f62_1b62_32bd
            ]
        );
        let long: Vec<u32> = (0..256).collect();
        assert_eq!(digests(b"", &[(&long, b"")]), [0x0d66_ec07_aa41_e604]);
    }

    #[test]
    fn tokens_may_come_as_bytes() {
        let mut bytes = Chain::new(b"s");
        let digest = bytes.push_bytes(&[1, 0, 0, 0, 2, 1, 0, 0], b"x");
        assert_eq!(
            u64::from_le_bytes(digest),
            digests(b"s", &[(&[1, 0x102], b"x")])[0]
        );
    }

    #[test]
    fn a_change_shows_in_its_block_and_all_behind_it() {
        let blocks: [(&[u32], &[u8]); 3] = [(&[1, 2], b""), (&[3, 4], b"x"), (&[5, 6], b"")];
        let base = digests(b"", &blocks);
        for (at, changed) in [
            (0, (&[1, 3][..], &b""[..])),
            (1, (&[3, 4], b"y")),
            (1, (&[3, 4], b"")),
            (2, (&[5], b"")),
        ] {
            let mut other = blocks;
            other[at] = changed;
            let other = digests(b"", &other);
            assert_eq!(base[..at], other[..at]);
            assert!((at..3).all(|index| base[index] != other[index]), "{at}");
        }
        assert!(
            digests(b"other", &blocks)
                .iter()
                .zip(&base)
                .all(|(a, b)| a != b)
        );
    }

    #[test]
    fn the_border_between_tokens_and_extra_bytes_counts() {
        let tokens_only = digests(b"", &[(&[1, 2], b"")]);
        let last_as_extra = digests(b"", &[(&[1], &2_u32.to_le_bytes())]);
        let none = digests(b"", &[(&[], &[1, 0, 0, 0, 2, 0, 0, 0])]);
        assert!(tokens_only != last_as_extra && tokens_only != none && last_as_extra != none);
    }
}
