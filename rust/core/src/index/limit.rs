//! The limit of the index, and which blocks go when it is reached.

use super::Index;
use std::sync::TryLockError;
use std::sync::atomic::Ordering;

/// Ages to judge by.
const SAMPLE: usize = 1 << 16;

impl Index {
    /// Whether there are too many blocks.
    #[must_use]
    pub fn is_over_the_limit(&self) -> bool {
        self.len() > self.max_blocks
    }

    /// Lets the blocks go that were of no use for longest, when there are too many. It takes some 70 ns for each that is
    /// there.
    pub fn keep_to_the_limit(&self) {
        if !self.is_over_the_limit() {
            return;
        }
        let _one_at_a_time = match self.trimming.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The other one goes on until it is done, with what this one added as well.
            Err(TryLockError::WouldBlock) => return,
        };
        let mut before = usize::MAX;
        // Blocks of a source that is being forgotten are not found here, but are on their way out.
        while self.len() > self.max_blocks && self.len() < before {
            before = self.len();
            let now = self.now.load(Ordering::Relaxed);
            // What another thread stored since is not old, though its time is beyond this one's.
            let age = |used: u32| i32::from_ne_bytes(now.wrapping_sub(used).to_ne_bytes()).max(0);
            let sample = self.table.sample_used(self.len().div_ceil(SAMPLE));
            let mut ages: Vec<_> = sample.into_iter().map(age).collect();
            let keep = self.max_blocks - self.max_blocks / 8;
            let keep_of_sample = ages.len() * keep / self.len().max(1);
            let Some(limit) = (!ages.is_empty()).then(|| {
                let at = keep_of_sample.min(ages.len() - 1);
                *ages.select_nth_unstable(at).1
            }) else {
                return;
            };
            for listed in self.rosters.snapshot().values() {
                for group in &mut listed.source.lock().groups {
                    if group.forget_old(&self.table, |used| age(used) >= limit) {
                        listed.source.note_partial();
                    }
                }
            }
        }
    }
}
