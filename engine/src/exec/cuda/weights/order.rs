//! In which order the rows of stored weights lie in the buffer that holds them together: as bytes of a file, as words of four bits, as
//! numbers.

use std::{ops::Range, thread};

use stoker_kernels::{
    bf16,
    upload::{RowPlaces, Stored},
};

use crate::model::{StoredMatrix, WeightFormat as StoredFormat};

/// How the rows of a slot's weights lie in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// One weight behind the other.
    Behind,
    /// So many of each in turn.
    InTurn(usize),
}

/// The rows of a slot that [`runs`] gives each of its weights.
pub(super) fn row_places(order: Order, parts: &[StoredMatrix]) -> Vec<RowPlaces> {
    let mut first = 0;
    let mut place = |part: &StoredMatrix| {
        let n_outputs = part.n_outputs();
        let turn = match order {
            Order::Behind => n_outputs,
            Order::InTurn(turn) => turn,
        };
        assert!(n_outputs.is_multiple_of(turn), "no product takes what gate and up give but in eights");
        let rows = RowPlaces { first, turn, period: turn * parts.len() };
        first += turn;
        rows
    };
    parts.iter().map(&mut place).collect()
}

/// The rows of a slot's weights in the order in which it holds them: of which weight, from where to where.
pub(super) fn runs(order: Order, parts: &[StoredMatrix]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let n_parts = parts.len();
    let lengths: Vec<usize> = parts.iter().map(StoredMatrix::n_outputs).collect();
    let n = match order {
        Order::Behind => lengths.iter().copied().max().unwrap_or_default(),
        Order::InTurn(n) => n,
    };
    let n_turns = lengths.iter().copied().max().unwrap_or_default().div_ceil(n.max(1));
    let turns = (0..n_turns).flat_map(move |turn| (0..n_parts).map(move |part| (turn, part)));
    turns.map(move |(turn, part)| (part, turn * n..((turn + 1) * n).min(lengths[part])))
}

/// The bytes of a slot's weights in the order in which it holds them.
pub(super) fn in_order(order: Order, parts: &[StoredMatrix]) -> Vec<Stored<'_>> {
    runs(order, parts).flat_map(|(part, rows)| stored(&parts[part], rows)).collect()
}

/// Codes of a byte are moved two by two.
fn stored(matrix: &StoredMatrix, rows: Range<usize>) -> Vec<Stored<'_>> {
    let (format, runs) = match matrix {
        StoredMatrix::Plain(weight) => (weight.format(), weight.runs(rows)),
        StoredMatrix::Quantised(weight) => (StoredFormat::Bf16, weight.runs_of_bytes(rows)),
    };
    runs.into_iter().map(|bytes| Stored { format, bytes }).collect()
}

/// The numbers of a slot's weights in its order, by as many threads as there are processors.
pub(super) fn dequantised(order: Order, parts: &[StoredMatrix]) -> Vec<bf16> {
    /// Rows that a thread takes at a time: their f32 fit its cache.
    const ROWS: usize = 16;
    let runs = runs(order, parts).flat_map(|(part, rows)| {
        rows.clone().step_by(ROWS).map(move |first| (part, first..(first + ROWS).min(rows.end)))
    });
    let runs: Vec<_> = runs.collect();
    let n_threads = thread::available_parallelism().map_or(1, usize::from);
    let numbers = |runs: &[(usize, Range<usize>)]| -> Vec<bf16> {
        runs.iter().flat_map(|(part, rows)| parts[*part].to_f32(rows.clone())).map(bf16::from_f32).collect()
    };
    thread::scope(|scope| {
        let shares = runs.chunks(runs.len().div_ceil(n_threads).max(1));
        let workers: Vec<_> = shares.map(|share| scope.spawn(|| numbers(share))).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("arithmetic does not panic")).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::StoredWeight;

    #[test]
    fn gate_and_up_lie_in_turn_and_others_behind_each_other() {
        let weight =
            |byte: u8| StoredMatrix::Plain(StoredWeight::in_memory(StoredFormat::Bf16, [6, 2], vec![byte; 24]));
        let parts = [weight(1), weight(2)];
        let lies = |order| in_order(order, &parts).into_iter().map(|part| (part.bytes[0], part.bytes.len())).collect();
        let (in_turn, behind): (Vec<_>, Vec<_>) = (lies(Order::InTurn(2)), lies(Order::Behind));
        assert_eq!(in_turn, [(1, 8), (2, 8), (1, 8), (2, 8), (1, 8), (2, 8)]);
        assert_eq!(behind, [(1, 24), (2, 24)]);
    }

    #[test]
    fn words_of_four_bits_go_to_the_rows_where_bytes_would_lie() {
        for (order, lengths) in [(Order::Behind, [24, 8, 9]), (Order::InTurn(8), [16; 3])] {
            let parts = lengths
                .map(|n| StoredMatrix::Plain(StoredWeight::in_memory(StoredFormat::Bf16, [n, 1], vec![0; 2 * n])));
            let expected = runs(order, &parts).flat_map(|(part, rows)| rows.map(move |row| Some((part, row))));
            let expected: Vec<_> = expected.collect();
            let mut found = vec![None; expected.len()];
            for (part, RowPlaces { first, turn, period }) in row_places(order, &parts).into_iter().enumerate() {
                (0..lengths[part]).for_each(|row| found[first + row / turn * period + row % turn] = Some((part, row)));
            }
            assert_eq!(found, expected, "{order:?}");
        }
    }

    #[test]
    fn weights_of_different_heights_lie_behind_each_other_whole() {
        let weight = |rows: usize| {
            StoredMatrix::Plain(StoredWeight::in_memory(StoredFormat::Bf16, [rows, 1], vec![rows as u8; 2 * rows]))
        };
        let parts = [weight(6), weight(2)];
        let found: Vec<_> = runs(Order::Behind, &parts).collect();
        assert_eq!(found, [(0, 0..6), (1, 0..2)]);
        assert_eq!(dequantised(Order::Behind, &parts).len(), 8);
    }
}
