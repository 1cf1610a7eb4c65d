//! A step's inputs as they arrive on the device, of a large table only the part that is used.

use super::{Gpu, Outcome};
use crate::{
    KernelError,
    packed::{Corner, Field, Layout, Packed},
};

/// Before the first upload, and where none writes.
const UNTOUCHED: i32 = 0;

pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    // (rows of the table, values of a row, rows used, values used): sent whole, and in rows.
    [(3, 50, 2, 7), (5, 5001, 4, 33), (256, 128, 200, 128)].into_iter().map(|sizes| arrival(gpu, sizes)).collect()
}

/// Numbers before the table and in it, by their places.
fn arrival(gpu: &Gpu, sizes: (usize, usize, usize, usize)) -> Result<Outcome, KernelError> {
    let (all_rows, row_values, n_rows, n_columns) = sizes;
    let mut layout = Layout::default();
    let (before, table) = (layout.field::<i32>(101), layout.field::<i32>(all_rows * row_values));
    let mut packed = Packed::new(gpu.kernels.device(), layout.n_words(), 2)?;
    packed.upload(layout, Corner { table, row_values, n_rows, n_columns }, |filling| {
        filling.field(before).copy_from_slice(&numbers(before));
        for (row, values) in
            filling.field(table).chunks_exact_mut(row_values).zip(numbers(table).chunks(row_values)).take(n_rows)
        {
            row[..n_columns].copy_from_slice(&values[..n_columns]);
        }
    })?;
    let stream = gpu.stream();
    let download =
        |field: Field<i32>| stream.clone_dtoh(&packed.view(field)).map_err(KernelError::driver("copy to the host"));
    let (found_before, found) = (download(before)?, download(table)?);
    let is_used = |at: usize| at / row_values < n_rows && at % row_values < n_columns;
    let wanted = numbers(table).into_iter().enumerate().map(|(at, n)| if is_used(at) { n } else { UNTOUCHED });
    let is_right = found_before == numbers(before) && found.into_iter().eq(wanted);
    let case = format!("{n_rows} x {n_columns} of {all_rows} x {row_values}");
    Ok(Outcome { op: "packed", case, error: if is_right { 0.0 } else { f64::INFINITY }, limit: 0.0 })
}

fn numbers(field: Field<i32>) -> Vec<i32> {
    (1..=field.len() as i32).collect()
}
