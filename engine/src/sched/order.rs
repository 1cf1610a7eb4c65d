//! Who comes first: the smaller priority, of equals the earlier deadline, then who was submitted before. The line and the running sequences are kept in
//! this order, so the last one is the one to preempt.

use std::time::Instant;

use super::SchedState;
use crate::{request::FinishReason, sequence::Sequence};

/// A sequence's place among all. Who has no deadline comes behind all of its priority that have one.
pub(super) fn rank(sequence: &Sequence) -> (i32, bool, Option<Instant>, u64) {
    let request = &sequence.request;
    (request.priority, request.deadline.is_none(), request.deadline, sequence.id.0)
}

impl SchedState {
    /// Puts a sequence into the line.
    pub(super) fn enter_line(&mut self, sequence: Sequence) {
        let place = self.waiting.partition_point(|other| rank(other) < rank(&sequence));
        self.waiting.insert(place, sequence);
    }

    /// Marks whoever has not begun by its deadline to leave at the next step. Who has, here or elsewhere, goes on however late it is:
    /// somebody reads its answer.
    pub fn expire(&mut self, now: Instant) {
        let is_late = |sequence: &&mut Sequence| {
            let has_begun = sequence.started || sequence.request.resume.is_some();
            !has_begun && sequence.request.deadline.is_some_and(|deadline| deadline <= now)
        };
        for sequence in self.waiting.iter_mut().filter(is_late) {
            sequence.leaving.get_or_insert(FinishReason::Expired);
        }
    }

    /// Newcomers are at the end until nobody knows their place there any more.
    pub(super) fn sort_running(&mut self) {
        if !self.running.is_sorted_by_key(rank) {
            self.running.sort_by_key(rank);
        }
    }

    /// Who gives way when `running[idx]` needs a block: the last one. But nobody gives way twice in a row while somebody of the
    /// same priority runs: then it is the one before, or, if that one has been planned already, nobody, and `running[idx]` waits.
    pub(super) fn victim(&self, idx: usize) -> Option<usize> {
        let last = self.running.len() - 1;
        let is_again = self.last_victim == Some(self.running[last].id);
        let is_equal = |other: &usize| self.running[*other].request.priority == self.running[last].request.priority;
        match last.checked_sub(1).filter(|other| is_again && is_equal(other)) {
            None => Some(last),
            Some(other) => (other >= idx).then_some(other),
        }
    }
}
