//! Matrices of weights and of what enters them, row by row.

use nalgebra::{DMatrix, DMatrixView};

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

    /// Sum of the squares of `self * other^T`, both with the same columns.
    pub fn energy_with(&self, other: &Self) -> f64 {
        let product = self.view().tr_mul(&other.view());
        product.iter().map(|value| f64::from(*value) * f64::from(*value)).sum()
    }

    /// `self^T * self`: how columns go together.
    pub fn gram(&self) -> DMatrix<f32> {
        let columns = self.view();
        columns * columns.transpose()
    }

    /// The library's matrices lie column by column: ours, turned.
    fn view(&self) -> DMatrixView<'_, f32> {
        DMatrixView::from_slice(&self.values, self.width, self.n_rows())
    }
}
