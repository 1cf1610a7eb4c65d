//! Which decoding sequences read the same KV blocks at the beginning of their contexts, so that decode
//! attention reads them once for several. Compares block ids and nothing else: equal ids are the same memory.

use super::decode::Context;
use crate::launch::BLOCK_SIZE;

/// Blocks that sequences must share at least: read together, contexts make fewer and longer pieces, which fill the chip less
/// evenly. With 256 shared tokens of 896, what is saved was measured to be 4 %.
const SHARED_BLOCKS_MIN: usize = 16;

/// Sequences that begin with the same blocks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Group {
    /// How many, next to each other in the order that comes with the groups.
    pub(super) n_rows: usize,
    /// Blocks that all of them begin with; 0 for a sequence by itself.
    pub(super) n_blocks: usize,
}

impl Group {
    const ALONE: Self = Self { n_rows: 1, n_blocks: 0 };
}

/// Rows of the batch, those of a group side by side, and the groups in that order. At most `n_rows_max` are a group. Where
/// nothing is shared, the order is that of the batch and it costs a sort of one block id a row to know.
pub(super) fn group<B: Copy + Ord>(contexts: &[Context<'_, B>], n_rows_max: usize) -> (Vec<usize>, Vec<Group>) {
    let mut order: Vec<usize> = (0..contexts.len()).collect();
    if n_rows_max < 2 || !any_may_share(contexts) {
        return (order, vec![Group::ALONE; contexts.len()]);
    }
    order.sort_by(|&a, &b| probes(&contexts[a]).cmp(probes(&contexts[b])));
    let shared = order.windows(2).map(|pair| common(sharable(&contexts[pair[0]]), sharable(&contexts[pair[1]])));
    let groups = best_groups(&shared.collect::<Vec<_>>(), n_rows_max);
    (order, groups)
}

/// Whether two sequences have the same block where sharing begins to be worth it.
fn any_may_share<B: Copy + Ord>(contexts: &[Context<'_, B>]) -> bool {
    let mut ids: Vec<B> = contexts.iter().filter_map(|context| probes(context).next().copied()).collect();
    ids.sort_unstable();
    ids.windows(2).any(|pair| pair[0] == pair[1])
}

/// The blocks at depths 16, 32, 64, ...: sequences that share much come side by side when they are sorted by these, and
/// nobody compares whole tables.
fn probes<'a, B>(context: &Context<'a, B>) -> impl Iterator<Item = &'a B> + use<'a, B> {
    let blocks = sharable(context);
    std::iter::successors(Some(SHARED_BLOCKS_MIN), |depth| Some(depth * 2)).map_while(|depth| blocks.get(depth - 1))
}

/// The full blocks before the one that the newest token is in.
fn sharable<'a, B>(context: &Context<'a, B>) -> &'a [B] {
    let n_full = context.n_tokens.saturating_sub(1) / BLOCK_SIZE;
    &context.blocks[..n_full.min(context.blocks.len())]
}

/// The groups of neighbours that save most, from the last row to the first; each row shares `shared` blocks with the next
/// one. Blocks that `n` sequences share are read once instead of `n` times.
fn best_groups(shared: &[usize], n_rows_max: usize) -> Vec<Group> {
    let n = shared.len() + 1;
    let mut best = vec![Best { saved: 0, group: Group::ALONE }; n + 1];
    for first in (0..n).rev() {
        best[first].saved = best[first + 1].saved;
        let mut n_blocks = usize::MAX;
        for n_rows in 2..=n_rows_max.min(n - first) {
            n_blocks = n_blocks.min(shared[first + n_rows - 2]);
            if n_blocks < SHARED_BLOCKS_MIN {
                break;
            }
            let saved = (n_rows - 1) * n_blocks + best[first + n_rows].saved;
            if saved >= best[first].saved {
                best[first] = Best { saved, group: Group { n_rows, n_blocks } };
            }
        }
    }
    let next = |at: &usize| Some(at + best[*at].group.n_rows).filter(|next| *next < n);
    std::iter::successors(Some(0), next).map(|at| best[at].group).collect()
}

/// The group that a row opens, and the blocks that it and the groups behind it save.
#[derive(Clone, Copy)]
struct Best {
    saved: usize,
    group: Group,
}

/// Blocks that both begin with. Whole runs first: equal tables are the usual case, and comparing slices is fast.
fn common<B: Eq>(a: &[B], b: &[B]) -> usize {
    const RUN: usize = 16;
    let n_runs = a.chunks_exact(RUN).zip(b.chunks_exact(RUN)).take_while(|(a, b)| a == b).count();
    let begin = n_runs * RUN;
    begin + a[begin..].iter().zip(&b[begin..]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A context of full blocks and one token more: `shared` of block ids from `prefix`, the rest its own.
    fn table(prefix: u32, shared: usize, own: u32, n_own: usize) -> Vec<u32> {
        let own = (0..=n_own as u32).map(|at| 1_000_000 + own * 1000 + at);
        (0..shared as u32).map(|at| prefix * 1000 + at).chain(own).collect()
    }

    fn grouped(tables: &[Vec<u32>], n_rows_max: usize) -> Vec<(Vec<usize>, usize)> {
        let context = |blocks: &'_ Vec<u32>| (blocks.len() - 1) * BLOCK_SIZE + 1;
        let contexts: Vec<_> =
            tables.iter().map(|blocks| Context { n_tokens: context(blocks), n_settled: 0, blocks }).collect();
        let (order, groups) = group(&contexts, n_rows_max);
        let mut rows = order.into_iter();
        groups.iter().map(|group| (rows.by_ref().take(group.n_rows).collect(), group.n_blocks)).collect()
    }

    #[test]
    fn sequences_that_share_nothing_stay_by_themselves_in_order() {
        let tables: Vec<_> = (0..3).map(|row| table(row, 40, row, 3)).collect();
        assert_eq!(grouped(&tables, 4), [(vec![0], 0), (vec![1], 0), (vec![2], 0)]);
    }

    #[test]
    fn a_prefix_is_shared_by_as_many_as_a_group_takes() {
        let tables: Vec<_> = (0..6).map(|row| table(7, 40, row, 3)).collect();
        assert_eq!(grouped(&tables, 4), [(vec![0, 1, 2, 3], 40), (vec![4, 5], 40)]);
        assert!(grouped(&tables, 1).iter().all(|(rows, n_blocks)| rows.len() == 1 && *n_blocks == 0));
    }

    #[test]
    fn a_short_common_beginning_is_not_worth_it() {
        let tables: Vec<_> = (0..4).map(|row| table(7, SHARED_BLOCKS_MIN - 1, row, 30)).collect();
        assert!(grouped(&tables, 4).iter().all(|(_, n_blocks)| *n_blocks == 0));
    }

    #[test]
    fn the_block_of_the_newest_token_is_nobody_elses() {
        let same = table(7, 40, 0, 0);
        let contexts = [Context { n_tokens: 40 * BLOCK_SIZE, n_settled: 0, blocks: &same[..40] }; 2];
        assert_eq!(group(&contexts, 4).1, [Group { n_rows: 2, n_blocks: 39 }]);
    }

    #[test]
    fn those_with_more_in_common_share_it_although_all_begin_alike() {
        // A system prompt of 20 blocks, and two documents of 60 behind it, asked about in turn.
        let document = |which: u32, own| [table(7, 20, 0, 0)[..20].to_vec(), table(which, 60, own, 2)].concat();
        let tables: Vec<_> = (0..6).map(|row| document(10 + row % 2, row)).collect();
        assert_eq!(grouped(&tables, 4), [(vec![0, 2, 4], 80), (vec![1, 3, 5], 80)]);
    }

    #[test]
    fn one_that_shares_little_does_not_cost_its_neighbours_what_they_share() {
        let little = table(7, 20, 0, 70);
        let much = |own| table(7, 80, own, 2);
        assert_eq!(grouped(&[little, much(1), much(2), much(3)], 4), [(vec![1, 2, 3], 80), (vec![0], 0)]);
    }

    #[test]
    fn equal_blocks_behind_different_ones_are_not_shared() {
        let tables = [table(7, 40, 0, 1), [vec![9], table(7, 40, 1, 1)[1..].to_vec()].concat()];
        assert!(grouped(&tables, 4).iter().all(|(_, n_blocks)| *n_blocks == 0));
    }
}
