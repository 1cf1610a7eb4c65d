//! Matrices of weights and of what enters them, row by row.

use faer::{Accum, Mat, MatRef, Par, get_global_parallelism, linalg::matmul::matmul};
use rayon::prelude::*;

/// Rows that a thread works on at a time.
pub(crate) const PART_ROWS: usize = 64;

/// `outputs x inputs`, or `tokens x inputs`, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Columns.
    pub width: usize,
    /// All rows, one behind the other.
    pub values: Vec<f32>,
}

impl Matrix {
    /// Rows.
    pub fn n_rows(&self) -> usize {
        self.values.len() / self.width
    }

    /// Each column by its factor.
    pub fn scale_columns(&mut self, factors: &[f32]) {
        for row in self.values.chunks_exact_mut(self.width) {
            row.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
        }
    }

    /// What is left of `other`.
    pub fn minus(&self, other: &Self) -> Self {
        let values = self.values.iter().zip(&other.values).map(|(a, b)| a - b).collect();
        Self { width: self.width, values }
    }

    /// Sum of the squares of `self * other^T`, both with the same columns; in the same order by any number of threads.
    pub fn energy_with(&self, other: &Self) -> f64 {
        let energy = |rows: &[f32]| {
            let rows = MatRef::from_row_major_slice(rows, rows.len() / self.width, self.width);
            let mut product = Mat::zeros(rows.nrows(), other.n_rows());
            matmul(&mut product, Accum::Replace, rows, other.view().transpose(), 1.0, Par::Seq);
            let squares = product.col_iter().flat_map(|column| column.iter()).map(|value| f64::from(value * value));
            squares.sum::<f64>()
        };
        self.values.par_chunks(self.width * PART_ROWS).map(energy).collect::<Vec<f64>>().iter().sum()
    }

    /// `sum += self^T * self`: how columns go together.
    pub fn add_gram_to(&self, sum: &mut Mat<f32>) {
        matmul(sum, Accum::Add, self.view().transpose(), self.view(), 1.0, get_global_parallelism());
    }

    fn view(&self) -> MatRef<'_, f32> {
        MatRef::from_row_major_slice(&self.values, self.n_rows(), self.width)
    }
}
