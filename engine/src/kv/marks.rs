//! Names that others have for beginnings of prompts, each tied to the block in which its beginning ends: who knows the names and
//! not the tokens learns what the cache holds. Only names of blocks that can be found are kept, and a few of each; what changes is
//! written down until it is taken.

use std::collections::HashMap;

use super::BlockId;

/// Names that one block may have: several beginnings end in a block of long tokens, and what is one prompt to a model may be
/// written in many ways. The oldest goes.
const NAMES_OF_BLOCK_MAX: usize = 16;

/// What became of a beginning of prompts.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum PrefixChange {
    /// All of it can be found from now on.
    Stored(u64),
    /// Not any more.
    Removed(u64),
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Marks {
    block_of: HashMap<u64, BlockId>,
    of_block: HashMap<BlockId, Vec<u64>>,
    changes: Vec<PrefixChange>,
}

impl Marks {
    /// The beginning of this name ends in `block`. It is tied to the block that it was found in last.
    pub(super) fn tie(&mut self, name: u64, block: BlockId) {
        match self.block_of.insert(name, block) {
            Some(before) if before == block => return,
            Some(before) => self.untie(name, before),
            None => self.changes.push(PrefixChange::Stored(name)),
        }
        let names = self.of_block.entry(block).or_default();
        names.push(name);
        if names.len() > NAMES_OF_BLOCK_MAX {
            let oldest = names.remove(0);
            self.block_of.remove(&oldest);
            self.changes.push(PrefixChange::Removed(oldest));
        }
    }

    /// A block is found no more.
    pub(super) fn lost(&mut self, block: BlockId) {
        for name in self.of_block.remove(&block).unwrap_or_default() {
            self.block_of.remove(&name);
            self.changes.push(PrefixChange::Removed(name));
        }
    }

    /// What changed since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<PrefixChange> {
        std::mem::take(&mut self.changes)
    }

    /// Every name.
    pub(super) fn names(&self) -> impl Iterator<Item = u64> {
        self.block_of.keys().copied()
    }

    /// Every block that has names.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.of_block.keys().copied()
    }

    fn untie(&mut self, name: u64, block: BlockId) {
        let names = self.of_block.get_mut(&block).expect("a name's block knows it");
        names.retain(|other| *other != name);
        if names.is_empty() {
            self.of_block.remove(&block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PrefixChange::*, *};

    #[test]
    fn a_name_is_told_when_it_comes_and_when_its_last_block_goes() {
        let mut marks = Marks::default();
        let [a, b] = [0, 1].map(BlockId);
        marks.tie(7, a);
        marks.tie(7, a);
        marks.tie(8, a);
        marks.tie(7, b);
        assert_eq!(marks.take_changes(), [Stored(7), Stored(8)]);
        marks.lost(a);
        assert_eq!(marks.take_changes(), [Removed(8)], "7 lies in b now");
        marks.lost(b);
        marks.lost(b);
        assert_eq!(marks.take_changes(), [Removed(7)]);
        assert_eq!(marks, Marks::default());
    }

    #[test]
    fn a_block_has_so_many_names_and_forgets_the_oldest() {
        let mut marks = Marks::default();
        let all = 0..NAMES_OF_BLOCK_MAX as u64 + 5;
        all.clone().for_each(|name| marks.tie(name, BlockId(3)));
        let mut names: Vec<u64> = marks.names().collect();
        names.sort_unstable();
        assert_eq!(names, all.skip(5).collect::<Vec<_>>());
        let removed = marks.take_changes().into_iter().filter(|change| matches!(change, Removed(_)));
        assert_eq!(removed.collect::<Vec<_>>(), [0, 1, 2, 3, 4].map(Removed));
    }
}
