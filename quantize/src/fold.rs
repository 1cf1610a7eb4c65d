//! Moving size between inputs and weights: columns of projections are multiplied, and what makes their inputs is divided by as much, so that
//! nothing changes but what rounding does. Which factors is what AWQ and SmoothQuant are.

use std::collections::BTreeMap;

use rayon::prelude::*;
use stoker_engine::model::{NormWeight, WeightFormat};

use crate::{
    calibration::Inputs,
    layers::{From, Source},
    matrix::{Matrix, PART_ROWS},
    round::round,
    scheme::Scheme,
};

/// Powers of an input's mean size that AWQ tries: so many steps from 0 to 1.
const STEPS: u32 = 20;
/// Smaller sizes count as this one.
const LEAST: f32 = 1e-4;

/// AWQ (Lin et al. 2023, arXiv:2306.00978): the power of the inputs' mean sizes with which rounding changes the outputs least. 1 for each
/// where none is better.
pub(crate) fn awq(weights: &[&Matrix], inputs: &Inputs, scheme: &Scheme, stored: WeightFormat) -> Vec<f32> {
    let candidate = |step: u32| {
        let power = step as f32 / STEPS as f32;
        let sizes = inputs.mean_size.iter().map(|size| size.max(LEAST).powf(power).max(LEAST));
        levelled(sizes.collect())
    };
    let loss = |factors: &[f32]| -> f64 {
        let inverse: Vec<f32> = factors.iter().map(|factor| factor.recip()).collect();
        let importance: Vec<f32> = inputs.mean_square.iter().zip(&inverse).map(|(mean, by)| mean * by * by).collect();
        let lost = |width: usize, values: &[f32]| {
            let part = Matrix { width, values: values.to_vec() };
            let mut scaled = part.clone();
            scaled.scale_columns(factors);
            let mut numbers = round(&scaled, scheme, stored, Some(&importance)).numbers();
            numbers.scale_columns(&inverse);
            numbers.minus(&part).energy_with(&inputs.rows)
        };
        let parts = |weights: &Matrix| -> Vec<f64> {
            weights.values.par_chunks(weights.width * PART_ROWS).map(|part| lost(weights.width, part)).collect()
        };
        weights.iter().flat_map(|weights| parts(weights)).sum()
    };
    let tried = (0..=STEPS).map(candidate).map(|factors| (loss(&factors), factors));
    tried.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, factors)| factors).expect("powers are tried")
}

/// SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) with equal shares: the square root of how much larger an input's largest number is than
/// its weights'.
pub(crate) fn smooth(weights: &[&Matrix], inputs: &Inputs) -> Vec<f32> {
    let largest = |column: usize| {
        let values = |matrix: &&Matrix| {
            matrix.values.iter().skip(column).step_by(matrix.width).fold(0f32, |most, value| most.max(value.abs()))
        };
        weights.iter().map(values).fold(LEAST, f32::max)
    };
    levelled(
        inputs.largest.iter().enumerate().map(|(column, input)| (input.max(LEAST) / largest(column)).sqrt()).collect(),
    )
}

/// Around 1, so that weights keep their size.
fn levelled(mut factors: Vec<f32>) -> Vec<f32> {
    let (least, most) =
        factors.iter().fold((f32::MAX, 0f32), |(least, most), factor| (least.min(*factor), most.max(*factor)));
    let level = (least * most).sqrt();
    factors.iter_mut().for_each(|factor| *factor /= level);
    factors
}

/// Divides what makes the inputs. Projections are tensors by name, norms and biases such of one row.
pub(crate) fn divide(source: &Source, factors: &[f32], tensors: &mut BTreeMap<String, Matrix>) {
    let mut change = |name: &str, change: &dyn Fn(&mut Matrix)| {
        if let Some(tensor) = tensors.get_mut(name) {
            change(tensor);
        }
    };
    match &source.from {
        From::Norm(name, stored) => change(name, &|norm| {
            let offset = if *stored == NormWeight::OnePlusFactor { 1.0 } else { 0.0 };
            norm.values
                .iter_mut()
                .zip(factors)
                .for_each(|(value, factor)| *value = (*value + offset) / factor - offset);
        }),
        From::Rows { tensor, rows, bias } => {
            change(tensor, &|matrix| {
                let width = matrix.width;
                let part = &mut matrix.values[rows.start * width..rows.end * width];
                for (row, factor) in part.chunks_exact_mut(width).zip(factors) {
                    row.iter_mut().for_each(|value| *value /= factor);
                }
            });
            if let Some((name, part)) = bias {
                change(name, &|bias| {
                    bias.values[part.clone()].iter_mut().zip(factors).for_each(|(value, factor)| *value /= factor);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_engine::exec::ProjectionInput;

    use super::*;

    #[test]
    fn what_feeds_is_divided_where_it_lies() {
        let row = |values: &[f32]| Matrix { width: values.len(), values: values.to_vec() };
        let mut tensors = BTreeMap::from([
            ("norm".to_owned(), row(&[2.0, 3.0])),
            ("gemma".to_owned(), row(&[1.0, 3.0])),
            ("gate_up".to_owned(), Matrix { width: 1, values: vec![1.0, 2.0, 8.0, 8.0] }),
            ("bias".to_owned(), row(&[4.0, 4.0])),
        ]);
        let mut apply = |from| divide(&Source { input: ProjectionInput::Down, from }, &[2.0, 4.0], &mut tensors);
        apply(From::Norm("norm".to_owned(), NormWeight::Factor));
        apply(From::Norm("gemma".to_owned(), NormWeight::OnePlusFactor));
        apply(From::Rows { tensor: "gate_up".to_owned(), rows: 2..4, bias: Some(("bias".to_owned(), 0..2)) });
        let values: Vec<_> = tensors.values().map(|tensor| tensor.values.as_slice()).collect();
        // In the order of their names: bias, gate_up, gemma, norm.
        assert_eq!(values, [&[2.0, 1.0][..], &[1.0, 2.0, 4.0, 2.0], &[0.0, 0.0], &[1.0, 0.75]]);
    }
}
