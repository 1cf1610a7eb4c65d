//! What must hold between any two calls on [`SchedState`]. Checked in debug builds and by the property tests.

use std::collections::{BTreeMap, BTreeSet};

use super::{MAX_STEPS_IN_FLIGHT, SchedLimits, SchedState, order::rank};
use crate::kv::BLOCK_TOKENS;

impl SchedState {
    /// Panics when an invariant is broken; release builds skip it.
    pub(super) fn debug_check(&self, limits: &SchedLimits) {
        if cfg!(debug_assertions) {
            self.check(limits);
        }
    }

    /// Panics when an invariant is broken.
    pub fn check(&self, limits: &SchedLimits) {
        self.check_queues(limits);
        self.check_blocks();
        self.check_progress(limits);
    }

    fn check_queues(&self, limits: &SchedLimits) {
        let ids: BTreeSet<_> = self.running.iter().chain(&self.waiting).map(|s| s.id).collect();
        assert_eq!(ids.len(), self.running.len() + self.waiting.len(), "no sequence is in two queues");
        assert!(self.running.len() <= limits.max_num_seqs, "no more sequences run than allowed");
        let slots: BTreeSet<_> = self.running.iter().map(|s| s.slot.expect("who runs has a slot")).collect();
        assert_eq!(slots.len(), self.running.len(), "every slot has one owner");
        assert_eq!(self.slots.n_taken(), slots.len(), "free and taken slots are all there are");
        assert!(slots.last().is_none_or(|last| *last < limits.max_num_seqs), "no more slots than sequences may run");
        assert!(self.waiting.iter().all(|s| s.slot.is_none()), "who waits has none");
        assert!(self.waiting.iter().is_sorted_by_key(rank), "the line is in order");
    }

    fn check_blocks(&self) {
        let mut holders: BTreeMap<_, u32> = BTreeMap::new();
        for block in self.running.iter().flat_map(|s| s.table.blocks()) {
            *holders.entry(*block).or_default() += 1;
        }
        let n_unheld = self.pool.n_free() + self.pool.n_cached();
        self.pool.check_marks();
        assert_eq!(n_unheld + holders.len(), self.pool.n_total(), "free + cached + referenced = total");
        for (block, n) in holders {
            assert_eq!(self.pool.refs(block), n, "{block:?} is counted once for each holder");
        }
        for sequence in &self.running {
            let writable = &sequence.table.blocks()[sequence.computed / BLOCK_TOKENS..];
            assert!(writable.iter().all(|block| self.pool.refs(*block) == 1), "a writable block has one owner");
        }
        assert!(self.waiting.iter().all(|s| s.table.blocks().is_empty()), "a waiting sequence holds no block");
    }

    fn check_progress(&self, limits: &SchedLimits) {
        for sequence in self.running.iter().chain(&self.waiting) {
            let (id, len) = (sequence.id, sequence.len());
            assert!(sequence.computed < len, "{id:?}: the newest token is never computed yet");
            assert!(sequence.computed <= sequence.table.capacity_tokens(), "{id:?}: computed tokens lie in blocks");
            assert!(
                sequence.tokens.len() < limits.max_model_len,
                "{id:?}: an open sequence has room for one more token"
            );
            assert!(len <= limits.max_model_len, "{id:?}: no token in flight is beyond the context");
            assert!(
                sequence.n_untold <= sequence.tokens.len() - sequence.prompt_len(),
                "{id:?}: only generated tokens are untold"
            );
            assert!(sequence.in_flight <= MAX_STEPS_IN_FLIGHT, "{id:?}: one token a step in flight at most");
        }
    }
}
