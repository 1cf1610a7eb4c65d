//! How the contexts of decoding sequences are cut into pieces. Sequences that begin with the same blocks are read together:
//! first what they share, then what each reads alone, each from a block on.
//!
//! ```text
//! contexts    0 [shared........][own....]      read together    [shared........][own of 0 ][own of 1   ][own of 2]
//!             1 [the same......][own......]    pieces           [   a     ][   b     ][   c     ][   d   ]
//!             2 [the same......][own..]
//! ```
//!
//! Every piece leaves a result for the rows of every reader; that of one who reads nothing in a piece has no weight.

use std::cmp::Reverse;

use stoker_fit::gpu::{DECODE_ITEM_BYTES, DECODE_READER_BYTES, PIECE_TOKENS_MIN};
pub use stoker_fit::gpu::{SplitPolicy, decode_items_max};

use super::{
    index,
    sharing::{self, Group},
};
use crate::launch::{BLOCK_SIZE, Heads};

/// Reading together must leave each slot of the chip as much as this to read. With less, slots wait for each other's pieces
/// and not for memory, and the merge for all readers takes longer than what is saved.
const SHARING_TOKENS_MIN: usize = 512;

/// What a decoding sequence reads.
#[derive(Debug)]
pub struct Context<'a, B> {
    /// Tokens, the new one included.
    pub n_tokens: usize,
    /// Those at the front whose keys and values no kernel of this step writes: they may be read ahead of the kernels in front.
    pub n_settled: usize,
    /// Where they lie: its row of the block table, or as much of it as may be shared.
    pub blocks: &'a [B],
}

impl<B> Clone for Context<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B> Copy for Context<'_, B> {}

/// One piece of what a sequence reads, or several together. The same fields as in `csrc/paged_decode.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DecodeItem {
    /// Row of the batch of the first reader, or -1: nothing to do.
    pub sequence: i32,
    /// First token, a multiple of the block size.
    pub begin: i32,
    /// One past the last token.
    pub end: i32,
    /// Tokens at the front of what is read that are all readers'. Of a single one, all.
    pub n_shared: i32,
    /// Index of its readers' first piece.
    pub first_item: i32,
    /// Pieces of its readers.
    pub n_items: i32,
    /// The first reader, an index into the plan's.
    pub first_reader: i16,
    /// Readers, one behind the other.
    pub n_readers: i16,
    /// Tokens at the front of what is read that no kernel of this step writes.
    pub n_settled: i32,
}

/// A sequence, and where the tokens that it reads alone lie in what is read together. The same fields as in
/// `csrc/paged_decode.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DecodeReader {
    /// Row of the batch.
    pub sequence: i32,
    /// First token, a multiple of the block size.
    pub begin: i32,
    /// One past the last token.
    pub end: i32,
}

// The memory plan counts by these.
const _: () = assert!(size_of::<DecodeItem>() == DECODE_ITEM_BYTES && size_of::<DecodeReader>() == DECODE_READER_BYTES);

// SAFETY: integers without padding, as the kernels read them.
unsafe impl cudarc::driver::DeviceRepr for DecodeItem {}
// SAFETY: as above: any bits are a value.
unsafe impl bytemuck::Zeroable for DecodeItem {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for DecodeItem {}
// SAFETY: as above.
unsafe impl cudarc::driver::DeviceRepr for DecodeReader {}
// SAFETY: as above: any bits are a value.
unsafe impl bytemuck::Zeroable for DecodeReader {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for DecodeReader {}

impl DecodeItem {
    /// What pads a plan.
    pub const NONE: Self = Self {
        sequence: -1,
        begin: 0,
        end: 0,
        n_shared: 0,
        first_item: 0,
        n_items: 1,
        first_reader: 0,
        n_readers: 1,
        n_settled: 0,
    };
}

impl DecodeReader {
    /// What pads a plan: no piece names it.
    pub const NONE: Self = Self { sequence: -1, begin: 0, end: 0 };
}

/// A step's pieces and who reads them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DecodePlan {
    /// The pieces.
    pub items: Vec<DecodeItem>,
    /// One for each sequence of the batch.
    pub readers: Vec<DecodeReader>,
}

impl DecodePlan {
    /// Fills up to `n_items` with pieces that do nothing, so that a captured graph keeps its grid.
    pub fn pad(&mut self, n_items: usize) {
        assert!(self.items.len() <= n_items, "{} pieces were planned for a capacity of {n_items}", self.items.len());
        self.items.resize(n_items, DecodeItem::NONE);
    }
}

/// Cuts the contexts, one for each row of the batch. Long pieces come first, so that the last ones to run are short; pieces
/// of the same readers are neighbours.
pub fn plan_decode<B: Copy + Ord>(contexts: &[Context<'_, B>], heads: Heads, policy: SplitPolicy) -> DecodePlan {
    let (readers, spans, share) = share_out(contexts, heads, policy);
    let mut order: Vec<&Span> = spans.iter().filter(|span| span.n_tokens > 0).collect();
    order.sort_by_key(|span| Reverse(piece_tokens(span.n_tokens, share)));
    let mut items = Vec::with_capacity(contexts.len());
    for span in order {
        cut(&mut items, span, readers[span.first_reader].sequence, piece_tokens(span.n_tokens, share));
    }
    DecodePlan { items, readers }
}

/// What one sequence reads, or several together.
#[derive(Clone, Copy, Debug)]
struct Span {
    n_tokens: usize,
    n_shared: usize,
    n_settled: usize,
    first_reader: usize,
    n_readers: usize,
}

/// Who reads what with whom: together where that leaves the chip full of work.
fn share_out<B: Copy + Ord>(
    contexts: &[Context<'_, B>],
    heads: Heads,
    policy: SplitPolicy,
) -> (Vec<DecodeReader>, Vec<Span>, Share) {
    let laid_out = |n_readers_max| {
        let (order, groups) = sharing::group(contexts, n_readers_max);
        let (readers, spans) = lay_out(contexts, &order, &groups);
        let share = share_tokens(&spans, heads, policy);
        (readers, spans, share)
    };
    match laid_out(policy.readers_max(heads)) {
        (_, spans, Share::Even(share)) if spans.len() < contexts.len() && share < SHARING_TOKENS_MIN => laid_out(1),
        plan => plan,
    }
}

/// Puts what each group reads in a row: what all share, then each one's own tokens from a block on.
fn lay_out<B>(contexts: &[Context<'_, B>], order: &[usize], groups: &[Group]) -> (Vec<DecodeReader>, Vec<Span>) {
    let mut readers: Vec<DecodeReader> = Vec::with_capacity(order.len());
    let mut spans = Vec::with_capacity(groups.len());
    for group in groups {
        let first_reader = readers.len();
        let n_shared = group.n_blocks * BLOCK_SIZE;
        let mut end = n_shared;
        for &row in &order[first_reader..first_reader + group.n_rows] {
            let begin = end.next_multiple_of(BLOCK_SIZE);
            end = begin + contexts[row].n_tokens - n_shared;
            readers.push(DecodeReader { sequence: index(row), begin: index(begin), end: index(end) });
        }
        let n_shared = if group.n_rows == 1 { end } else { n_shared };
        let settled = order[first_reader..].iter().take(group.n_rows).map(|row| contexts[*row].n_settled);
        let n_settled = settled.min().unwrap_or(0).min(n_shared);
        spans.push(Span { n_tokens: end, n_shared, n_settled, first_reader, n_readers: group.n_rows });
    }
    (readers, spans)
}

fn cut(items: &mut Vec<DecodeItem>, span: &Span, sequence: i32, piece_tokens: usize) {
    let first_item = index(items.len());
    let n_items = index(span.n_tokens.div_ceil(piece_tokens));
    items.extend((0..span.n_tokens).step_by(piece_tokens).map(|begin| DecodeItem {
        sequence,
        begin: index(begin),
        end: index((begin + piece_tokens).min(span.n_tokens)),
        n_shared: index(span.n_shared),
        first_item,
        n_items,
        first_reader: short_index(span.first_reader),
        n_readers: short_index(span.n_readers),
        n_settled: index(span.n_settled),
    }));
}

fn short_index(value: usize) -> i16 {
    i16::try_from(value).expect("a step has fewer than 32768 sequences")
}

/// Tokens that each slot gets if all that is read is spread evenly over the slots.
fn share_tokens(spans: &[Span], heads: Heads, policy: SplitPolicy) -> Share {
    match policy {
        SplitPolicy::Fixed { piece_tokens, .. } => Share::Fixed(piece_tokens),
        SplitPolicy::Balanced { n_slots } => {
            let total: usize = spans.iter().map(|span| span.n_tokens).sum();
            Share::Even((total * heads.n_kv).div_ceil(n_slots).max(PIECE_TOKENS_MIN))
        }
    }
}

#[derive(Clone, Copy)]
enum Share {
    Even(usize),
    Fixed(usize),
}

/// Tokens of each piece. Even pieces, as near to the share as their number allows: 1.03 shares in two
/// pieces would cost a merge for nothing.
fn piece_tokens(len: usize, share: Share) -> usize {
    match share {
        Share::Fixed(tokens) => tokens,
        Share::Even(share) => {
            let n_pieces = ((len + share / 2) / share).max(1);
            len.div_ceil(n_pieces).next_multiple_of(PIECE_TOKENS_MIN)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const HEADS: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };
    const H200: SplitPolicy = SplitPolicy::Balanced { n_slots: 264 };

    /// A plan of sequences of which nobody shares anything.
    fn apart(lens: &[usize], policy: SplitPolicy) -> DecodePlan {
        plan_decode(
            &lens
                .iter()
                .map(|&n_tokens| Context { n_tokens, n_settled: n_tokens.saturating_sub(1), blocks: &[0u32; 0] })
                .collect::<Vec<_>>(),
            HEADS,
            policy,
        )
    }

    /// A plan of sequences that all begin with the same `n_shared` tokens, and its contexts.
    fn together(lens: &[usize], n_shared: usize, heads: Heads, policy: SplitPolicy) -> DecodePlan {
        let block =
            |row: usize, at: usize| if (at + 1) * BLOCK_SIZE <= n_shared { at } else { (row + 1) * 10_000 + at };
        let table = |(row, len): (usize, &usize)| (0..len.div_ceil(BLOCK_SIZE)).map(|at| block(row, at)).collect();
        let tables: Vec<Vec<usize>> = lens.iter().enumerate().map(table).collect();
        let contexts = lens.iter().zip(&tables).map(|(&n_tokens, blocks)| Context {
            n_tokens,
            n_settled: n_tokens.saturating_sub(1),
            blocks,
        });
        plan_decode(&contexts.collect::<Vec<_>>(), heads, policy)
    }

    /// What a sequence reads, in the order of its pieces: tokens of its own context.
    fn read_by(plan: &DecodePlan, row: usize) -> Vec<(i32, i32)> {
        let at = plan.readers.iter().position(|reader| reader.sequence == index(row)).unwrap();
        let own = plan.readers[at];
        let reads =
            |item: &&DecodeItem| (item.first_reader..item.first_reader + item.n_readers).contains(&short_index(at));
        let part = |item: &DecodeItem| {
            let shared = (item.begin, item.end.min(item.n_shared));
            let (begin, end) = (item.begin.max(own.begin), item.end.min(own.end));
            let moved = item.n_shared - own.begin;
            [shared, if item.n_readers > 1 { (begin + moved, end + moved) } else { (0, 0) }]
        };
        plan.items.iter().filter(reads).flat_map(part).filter(|(begin, end)| begin < end).collect()
    }

    /// Every context is read exactly once from front to end, by pieces that begin on blocks and know each other.
    fn check(plan: &DecodePlan, lens: &[usize], heads: Heads, policy: SplitPolicy) {
        for (row, &len) in lens.iter().enumerate() {
            let parts = read_by(plan, row);
            let ends: Vec<i32> = std::iter::once(0).chain(parts.iter().map(|part| part.1)).collect();
            assert_eq!(*ends.last().unwrap(), index(len), "row {row}");
            assert!(parts.iter().zip(&ends).all(|(part, &end)| part.0 == end && end % 16 == 0), "row {row}: {parts:?}");
        }
        for (item, at) in plan.items.iter().zip(0..) {
            let own = item.first_item..item.first_item + item.n_items;
            assert!(own.contains(&at) && own.clone().all(|at| plan.items[at as usize].sequence == item.sequence));
            assert_eq!(plan.readers[item.first_reader as usize].sequence, item.sequence);
        }
        let n_items_max = decode_items_max(lens.len(), lens.iter().copied().max().unwrap_or(1), heads, policy);
        assert!(plan.items.len() <= n_items_max, "{} pieces of {n_items_max}", plan.items.len());
    }

    #[test]
    fn pieces_cover_every_context_exactly_and_begin_on_blocks() {
        let lens = [1, 15, 16, 17, 333, 0, 1024, 40_001];
        for policy in [H200, SplitPolicy::fixed(512 * 32, 264)] {
            check(&apart(&lens, policy), &lens, HEADS, policy);
        }
    }

    #[test]
    fn plans_of_any_sharing_cover_all_contexts_and_fit_their_graph() {
        for heads in [HEADS, Heads { n_q: 14, n_kv: 2, dim: 64 }, Heads { n_q: 4, n_kv: 4, dim: 64 }] {
            for n_shared in [0, 100, 256, 1000, 2048, 30_000] {
                for n in [1, 2, 3, 17, 64, 256] {
                    let lens: Vec<usize> = (0..n).map(|row| n_shared + 1 + row * 37 % 300).collect();
                    check(&together(&lens, n_shared, heads, H200), &lens, heads, H200);
                    let uneven: Vec<usize> = (0..n).map(|row| 1 + row * 911 % 5000).collect();
                    check(&together(&uneven, n_shared, heads, H200), &uneven, heads, H200);
                }
            }
        }
    }

    #[test]
    fn a_shared_prefix_is_read_once_for_as_many_as_fill_a_tile() {
        let read = |plan: &DecodePlan| plan.items.iter().map(|item| item.end - item.begin).sum::<i32>();
        let lens = [2048 + 128; 64];
        assert_eq!(read(&together(&lens, 2048, HEADS, H200)), 16 * 2048 + 64 * 128);
        assert_eq!(read(&together(&lens, 2048, Heads { n_q: 14, n_kv: 2, dim: 64 }, H200)), 32 * 2048 + 64 * 128);
        assert_eq!(read(&together(&lens, 2048, Heads { n_q: 16, n_kv: 1, dim: 64 }, H200)), 64 * 2176);
    }

    #[test]
    fn a_small_batch_reads_apart_because_the_chip_would_wait_for_merges() {
        let (few, many) = ([2048 + 128; 8], [2048 + 128; 32]);
        assert_eq!(together(&few, 2048, HEADS, H200), apart(&few, H200));
        assert_eq!(together(&many, 2048, HEADS, H200).items.iter().map(|item| item.n_readers).max(), Some(4));
    }

    #[test]
    fn what_may_be_read_early_is_what_all_readers_have_and_nobody_writes() {
        let settled = |plan: DecodePlan| plan.items.iter().map(|item| item.n_settled).collect::<BTreeSet<_>>();
        assert_eq!(settled(apart(&[333, 1], H200)), [332, 0].into());
        assert_eq!(settled(together(&[2176; 32], 2048, HEADS, H200)), [2048].into());
        let blocks: Vec<u32> = (0..136).collect();
        let context =
            |row: usize| Context { n_tokens: 2176, n_settled: if row == 5 { 0 } else { 2175 }, blocks: &blocks[..128] };
        let one_is_new = plan_decode(&(0..32).map(context).collect::<Vec<_>>(), HEADS, H200);
        assert_eq!(settled(one_is_new), [0, 2048].into(), "who begins now may read what another one writes");
    }

    #[test]
    fn fixed_pieces_are_not_shared() {
        let policy = SplitPolicy::fixed(4096, 264);
        assert_eq!(together(&[2176; 8], 2048, HEADS, policy), apart(&[2176; 8], policy));
    }

    #[test]
    fn a_single_sequence_is_spread_over_the_chip() {
        let n_pieces = apart(&[4096], H200).items.len();
        assert!((24..=33).contains(&n_pieces), "{n_pieces} pieces");
    }

    #[test]
    fn a_full_batch_of_equal_contexts_is_not_split() {
        assert_eq!(apart(&[1024; 256], H200).items.len(), 256);
        assert_eq!(apart(&[1024; 32], H200).items.len(), 32);
    }

    #[test]
    fn fixed_pieces_do_not_depend_on_the_rest_of_the_batch() {
        let policy = SplitPolicy::fixed(4096, 264);
        let alone = read_by(&apart(&[3000], policy), 0);
        let mut lens = vec![777; 255];
        lens.insert(0, 3000);
        assert_eq!(read_by(&apart(&lens, policy), 0), alone);
    }

    #[test]
    fn padding_does_nothing_and_keeps_the_grid() {
        let mut plan = apart(&[10], H200);
        plan.pad(4);
        assert_eq!(plan.items.iter().map(|item| item.sequence).collect::<Vec<_>>(), [0, -1, -1, -1]);
    }

    #[test]
    fn fixed_pieces_are_at_most_32_a_context() {
        let most = |len| decode_items_max(1, len, HEADS, SplitPolicy::fixed(len, 264));
        assert_eq!([100, 256, 2048, 8192, 40_000, 131_072].map(most), [1, 1, 8, 32, 20, 32]);
    }
}
