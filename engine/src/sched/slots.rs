//! Slots: small numbers for running sequences, so that an executor can keep something of each in an array.

/// The numbers below the most sequences that ever ran at once; each is free or belongs to one of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slots {
    free: Vec<usize>,
    n_known: usize,
}

impl Slots {
    /// A slot that nobody has.
    pub(super) fn take(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.n_known += 1;
            self.n_known - 1
        })
    }

    /// Gives one back.
    pub(super) fn release(&mut self, slot: usize) {
        self.free.push(slot);
    }

    /// Slots that belong to somebody.
    pub(super) fn n_taken(&self) -> usize {
        self.n_known - self.free.len()
    }
}
