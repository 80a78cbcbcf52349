//! Blocks that an engine is about to have: a request was just routed there, and no event has told of them yet.
//!
//! They are a tier of their own, which routing may count so that requests of one prefix that come together stay together,
//! and which is evidence of nothing. An event about a block ends the assumption, and so does its time.

use super::Index;
use super::roster::SourceName;
use super::source::State;
use super::table::Holder;
use super::walk::{Prompt, SPECULATIVE_BIT};
use std::sync::atomic::Ordering;

/// Blocks that one source may have assumed; the oldest go first.
const MAX_ASSUMED: usize = 1 << 16;

/// The part of the index that is for assumptions, of all sources: prompts come from clients, who could drive out with them
/// what engines told.
const SHARE: usize = 8;

/// The blocks of one request.
#[derive(Debug)]
pub struct Assumed {
    until: f64,
    blocks: Vec<(Holder, u64)>,
}

impl Index {
    /// Assumes that a source will have the full blocks of a prompt, until a time in seconds of any clock that never goes
    /// back; how many it does not have in its GPU yet. None of a source that never told of a block.
    pub fn assume(
        &self,
        name: &SourceName,
        tokens: &[u8],
        lora: Option<&str>,
        salt: Option<&str>,
        until: f64,
    ) -> usize {
        let prompt = Prompt::new(tokens, lora, salt);
        let roster = self.rosters.snapshot();
        let Some(listed) = roster.get(name) else {
            return 0;
        };
        let now = self.now.load(Ordering::Relaxed);
        let mut state = listed.source.lock();
        if state.forgotten {
            return 0;
        }
        let mut blocks = Vec::new();
        let others = self.assumed.load(Ordering::Relaxed);
        let room = (self.max_blocks / SHARE).saturating_sub(others);
        for group in &listed.groups {
            for &size in &group.sizes {
                let names = prompt.names(size, &self.namer).take(MAX_ASSUMED);
                let fresh = names.filter(|&name| self.table.assume(name, group.holder, now));
                let left = room.saturating_sub(blocks.len());
                blocks.extend(fresh.map(|name| (group.holder, name)).take(left));
            }
        }
        let assumed = blocks.len();
        if assumed > 0 {
            self.assumed.fetch_add(assumed, Ordering::Relaxed);
            state.assumed.push_back(Assumed { until, blocks });
            let mut room = MAX_ASSUMED;
            let recent = state.assumed.iter().rev();
            let kept = recent
                .take_while(|one| {
                    let fits = one.blocks.len() <= room;
                    room = room.saturating_sub(one.blocks.len());
                    fits
                })
                .count();
            let mut surplus = state.assumed.len() - kept;
            self.drop_assumed(&mut state, |_| {
                let goes = surplus > 0;
                surplus = surplus.saturating_sub(1);
                goes
            });
        }
        assumed
    }

    /// Ends the assumptions whose time is over; how many blocks they were about.
    pub fn expire(&self, now: f64) -> usize {
        let roster = self.rosters.snapshot();
        let ended = roster
            .values()
            .map(|listed| self.drop_assumed(&mut listed.source.lock(), |until| until <= now));
        ended.sum()
    }

    /// Ends assumptions, from the oldest, as long as `goes` says so of their time.
    pub(super) fn drop_assumed(
        &self,
        state: &mut State,
        mut goes: impl FnMut(f64) -> bool,
    ) -> usize {
        let mut ended = 0;
        while state
            .assumed
            .front()
            .is_some_and(|oldest| goes(oldest.until))
        {
            for (holder, name) in state
                .assumed
                .pop_front()
                .into_iter()
                .flat_map(|oldest| oldest.blocks)
            {
                self.table.remove(name, holder, SPECULATIVE_BIT);
                ended += 1;
            }
        }
        self.assumed.fetch_sub(ended, Ordering::Relaxed);
        ended
    }
}
