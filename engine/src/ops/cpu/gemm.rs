//! `y = x * w^T` by the `gemm` crate, arranged so that a row of `y` never depends on how many rows there are.
//!
//! The crate picks its inner loop by shape, and two of its choices sum in another order than the rest: products with
//! one row or column (a plain dot product), and small products of two row-major matrices (lanes folded at the end).
//! Also, beyond 512 inputs the size of a partial sum depends on the shape. So: rows are padded to a shape the main
//! loop takes, and inputs are cut into pieces of 512 that are summed in order. Then each number of `y` is one chain of
//! multiply-adds over the inputs from first to last. `a_row_does_not_depend_on_its_neighbours` holds the crate to it.

use gemm::Parallelism;

use super::CpuMatrix;

/// Inputs summed in one pass of the crate's main loop, whatever the shape.
const PIECE: usize = 512;
/// Products with at most this many results take the crate's small loop.
const SMALL_RESULTS: usize = 16 * 16;
/// Multiply-adds below which a second thread costs more than it brings.
const MIN_PARALLEL_WORK: usize = 1 << 20;

/// From this many rows on it pays to re-order the weights for the crate's main loop, which it does when the results are
/// wanted row by row. Below, they are wanted column by column and the weights are read as they lie.
const MIN_ROWS_BY_ROW: usize = 1000;

/// Rows of `x` times the transpose of `weight`.
pub(super) fn multiply(x: &[f32], weight: &CpuMatrix) -> Vec<f32> {
    let n_rows = x.len() / weight.n_inputs();
    let n_padded = n_rows.max(least_rows(weight.n_outputs()));
    if n_padded == n_rows {
        return multiply_padded(x, weight, n_rows);
    }
    let mut padded = x.to_vec();
    padded.resize(n_padded * weight.n_inputs(), 0.0);
    let mut y = multiply_padded(&padded, weight, n_padded);
    y.truncate(n_rows * weight.n_outputs());
    y
}

/// Rows from which on the crate's main loop is taken.
fn least_rows(n_outputs: usize) -> usize {
    (SMALL_RESULTS / n_outputs + 1).max(2)
}

fn multiply_padded(x: &[f32], weight: &CpuMatrix, n_rows: usize) -> Vec<f32> {
    let n_outputs = weight.n_outputs();
    let mut y = vec![0.0; n_rows * n_outputs];
    if n_rows >= MIN_ROWS_BY_ROW {
        multiply_pieces(x, weight, &mut y, Strides { row: n_outputs, column: 1 });
        return y;
    }
    multiply_pieces(x, weight, &mut y, Strides { row: 1, column: n_rows });
    transpose(&y, n_rows)
}

/// Columns of `n_rows` numbers to rows.
fn transpose(columns: &[f32], n_rows: usize) -> Vec<f32> {
    let n_outputs = columns.len() / n_rows;
    let mut rows = vec![0.0; columns.len()];
    for (output, column) in columns.chunks_exact(n_rows).enumerate() {
        for (row, value) in column.iter().enumerate() {
            rows[row * n_outputs + output] = *value;
        }
    }
    rows
}

/// Distance between neighbours in the result.
#[derive(Clone, Copy)]
struct Strides {
    row: usize,
    column: usize,
}

fn multiply_pieces(x: &[f32], weight: &CpuMatrix, y: &mut [f32], strides: Strides) {
    for first in (0..weight.n_inputs()).step_by(PIECE) {
        multiply_piece(x, weight, y, strides, first);
    }
}

/// Adds the product over the inputs `first..first + PIECE`.
#[expect(unsafe_code, reason = "the crate's only entry takes pointers and strides")]
fn multiply_piece(x: &[f32], weight: &CpuMatrix, y: &mut [f32], strides: Strides, first: usize) {
    let (n_inputs, n_outputs) = (weight.n_inputs(), weight.n_outputs());
    let n_rows = x.len() / n_inputs;
    let len = PIECE.min(n_inputs - first);
    let w = weight.values();
    assert!(len > 0 && x.len() == n_rows * n_inputs, "x has whole rows");
    assert!(w.len() == n_outputs * n_inputs && y.len() == n_rows * n_outputs, "shapes agree");
    let last = (n_rows - 1) * strides.row + (n_outputs - 1) * strides.column;
    assert!(last < y.len(), "strides stay inside the result");
    let work = n_rows * n_outputs * len;
    let parallelism = if work < MIN_PARALLEL_WORK { Parallelism::None } else { Parallelism::Rayon(0) };
    // SAFETY: in `x` and `w` rows are `n_inputs` apart and columns `first..first + len` lie inside a row; in `y` the
    // farthest element is `last`. All three lengths are asserted above, and `y` is borrowed exclusively, so it
    // overlaps neither input. The strides of `y` make every (row, column) its own element: one of them is 1 and the
    // other the length of the whole row or column.
    unsafe {
        gemm::gemm(
            n_rows,
            n_outputs,
            len,
            y.as_mut_ptr(),
            strides.column as isize,
            strides.row as isize,
            first > 0,
            x[first..].as_ptr(),
            1,
            n_inputs as isize,
            w[first..].as_ptr(),
            n_inputs as isize,
            1,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu::weights::test_matrix;

    /// Numbers without a pattern, in -1..1.
    fn noise(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64).map(|i| (crate::sample::uniform(seed, i) * 2.0 - 1.0) as f32).collect()
    }

    #[test]
    fn the_product_is_the_product() {
        let (n_rows, n_inputs, n_outputs) = (3, 700, 33);
        let x = noise(n_rows * n_inputs, 1);
        let w = noise(n_outputs * n_inputs, 2);
        let y = multiply(&x, &test_matrix(n_outputs, n_inputs, w.clone()));
        for row in 0..n_rows {
            for output in 0..n_outputs {
                let exact: f64 =
                    (0..n_inputs).map(|i| f64::from(x[row * n_inputs + i]) * f64::from(w[output * n_inputs + i])).sum();
                assert!((f64::from(y[row * n_outputs + output]) - exact).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        for (n_outputs, n_inputs) in [(2, 8), (32, 64), (64, 320), (320, 320), (48, 1100), (100, 1100), (2048, 513)] {
            let weight = test_matrix(n_outputs, n_inputs, noise(n_outputs * n_inputs, 3));
            let x = noise(130 * n_inputs, 4);
            let all = multiply(&x, &weight);
            for n_rows in [1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 63, 64, 65, 129] {
                let some = multiply(&x[..n_rows * n_inputs], &weight);
                assert_eq!(some, all[..some.len()], "{n_rows} rows of {n_outputs} x {n_inputs}");
            }
            let last = multiply(&x[129 * n_inputs..], &weight);
            assert_eq!(last, all[129 * n_outputs..], "the last row of {n_outputs} x {n_inputs} alone");
        }
    }
}
