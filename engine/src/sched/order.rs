//! Who comes first: the smaller priority, of equals who was submitted before. The line and the running sequences are kept in
//! this order, so the last one is the one to preempt.

use super::SchedState;
use crate::sequence::Sequence;

/// A sequence's place among all.
pub(super) fn rank(sequence: &Sequence) -> (i32, u64) {
    (sequence.request.priority, sequence.id.0)
}

impl SchedState {
    /// Puts a sequence into the line.
    pub(super) fn enter_line(&mut self, sequence: Sequence) {
        let place = self.waiting.partition_point(|other| rank(other) < rank(&sequence));
        self.waiting.insert(place, sequence);
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
