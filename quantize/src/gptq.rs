//! GPTQ (Frantar et al. 2022, arXiv:2210.17323): inputs are rounded one after the other, and what rounding one of them does to the outputs
//! is made up for by those that are not rounded yet, by the inverse of how inputs go together. Pure.

use anyhow::{Context, Result};
use faer::{Mat, Side, get_global_parallelism, linalg::triangular_inverse::invert_lower_triangular};
use rayon::prelude::*;
use stoker_engine::model::WeightFormat;

use crate::{
    matrix::Matrix,
    round::{Grid, Rounded, round},
    scheme::Scheme,
};

/// Share of the mean of the diagonal that is added to it, so that inputs that always go together can be told apart.
const DAMPING: f32 = 0.01;
/// Inputs whose effect on all later ones is added up before it is taken into account there.
const BLOCK: usize = 128;
/// Rows that go through a block together, so that it is read once for them.
const ROWS: usize = 16;

/// Rounds a matrix; `gram` is `x^T x` of what enters it. Inputs that matter most go first, while the most others are left to make up for them;
/// scales are those of groups as they lie, chosen before (act-order "static" of others).
pub(crate) fn gptq(weights: &Matrix, scheme: &Scheme, stored: WeightFormat, gram: &Mat<f32>) -> Result<Rounded> {
    let (grid, width) = (Grid::new(scheme.format, stored), weights.width);
    let order = order(gram);
    let factor = inverse_factor(gram, &order).context("inputs of a projection are not numbers")?;
    let importance: Vec<f32> = (0..width).map(|input| gram[(input, input)]).collect();
    let mut rounded = round(weights, scheme, stored, Some(&importance));
    let (group, n_groups) = (rounded.group, width.div_ceil(rounded.group));
    let rows = rounded.codes.par_chunks_mut(width * ROWS).zip(rounded.scales.par_chunks(n_groups * ROWS));
    rows.zip(weights.values.par_chunks(width * ROWS)).for_each(|((codes, scales), weights)| {
        let mut left: Vec<f32> =
            weights.chunks_exact(width).flat_map(|row| order.iter().map(|input| row[*input])).collect();
        for from in (0..width).step_by(BLOCK) {
            let to = (from + BLOCK).min(width);
            let outputs = left.chunks_exact_mut(width).zip(codes.chunks_exact_mut(width));
            for ((left, codes), scales) in outputs.zip(scales.chunks_exact(n_groups)) {
                let mut errors = [0f32; BLOCK];
                for place in from..to {
                    let (input, row) = (order[place], &factor[place * width..][..width]);
                    let scale = scales[input / group];
                    codes[input] = grid.code(left[place] / scale);
                    let error = (left[place] - codes[input] * scale) / row[place];
                    errors[place - from] = error;
                    left[place..to].iter_mut().zip(&row[place..to]).for_each(|(left, factor)| *left -= error * factor);
                }
                for (error, place) in errors.iter().zip(from..to) {
                    let row = &factor[place * width..][..width];
                    left[to..].iter_mut().zip(&row[to..]).for_each(|(left, factor)| *left -= error * factor);
                }
            }
        }
    });
    Ok(rounded)
}

/// Inputs by how much enters there, most first.
fn order(gram: &Mat<f32>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..gram.nrows()).collect();
    order.sort_by(|a, b| gram[(*b, *b)].total_cmp(&gram[(*a, *a)]));
    order
}

/// The upper factor of the inverse of the matrix in this order, `u^T u = gram^-1`, row by row. `None`: it holds something that is no number.
///
/// The matrix is turned end to end: with its lower factor `l` there, `gram = r r^T` has the upper `r`, which is `l` turned back, and
/// `u` is its inverse. So nothing is inverted but a triangle.
fn inverse_factor(gram: &Mat<f32>, order: &[usize]) -> Option<Vec<f32>> {
    let width = order.len();
    let mean = (0..width).map(|input| gram[(input, input)]).sum::<f32>() / width as f32;
    let extra = DAMPING * if mean > 0.0 { mean } else { 1.0 };
    let turned = |place: usize| order[width - 1 - place];
    let damped = Mat::from_fn(width, width, |row, column| {
        let value = gram[(turned(row), turned(column))];
        match row == column {
            true if value > 0.0 => value + extra,
            // What never enters does not matter: it may have any size of its own.
            true => mean.max(1.0),
            false => value,
        }
    });
    let lower = damped.llt(Side::Lower).ok()?;
    let mut inverse = Mat::zeros(width, width);
    invert_lower_triangular(inverse.as_mut(), lower.L(), get_global_parallelism());
    let mut upper = vec![0.0; width * width];
    for (place, row) in upper.chunks_exact_mut(width).enumerate() {
        row[place..]
            .iter_mut()
            .zip(place..)
            .for_each(|(value, at)| *value = inverse[(width - 1 - place, width - 1 - at)]);
    }
    Some(upper)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::{Format, Method};

    /// Numbers that look drawn, the same in every run.
    fn drawn(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from((state >> 16) as u16) / 32_768.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    const SCHEME: Scheme = Scheme { format: Format::Int4, method: Method::Gptq, group: 32 };

    #[test]
    fn inputs_that_go_together_lose_less_than_by_the_nearest() {
        let (width, n_outputs) = (96, 40);
        let weights = Matrix { width, values: drawn(width * n_outputs, 1) };
        // Every input is a mixture of twelve.
        let (sources, mixture) = (drawn(12 * 400, 2), drawn(12 * width, 3));
        let mix = |row: &[f32]| -> Vec<f32> {
            (0..width).map(|column| (0..12).map(|idx| row[idx] * mixture[idx * width + column]).sum()).collect()
        };
        let inputs = Matrix { width, values: sources.chunks(12).flat_map(mix).collect() };
        let lost = |rounded: &Rounded| weights.minus(&rounded.numbers()).energy_with(&inputs);
        let mut gram = Mat::zeros(width, width);
        inputs.add_gram_to(&mut gram);
        let ours = lost(&gptq(&weights, &SCHEME, WeightFormat::Bf16, &gram).unwrap());
        let nearest = lost(&round(&weights, &SCHEME, WeightFormat::Bf16, None));
        assert!(ours < 0.2 * nearest, "{ours} of {nearest}");
    }

    #[test]
    fn the_factor_is_that_of_the_inverse_in_the_order_asked_for() {
        let (width, order) = (40, (0..40).map(|place| place * 7 % 40).collect::<Vec<_>>());
        let mut gram = Mat::zeros(width, width);
        Matrix { width, values: drawn(width * 200, 6) }.add_gram_to(&mut gram);
        let upper = inverse_factor(&gram, &order).unwrap();
        let upper = Mat::from_fn(width, width, |row, column| f64::from(upper[row * width + column]));
        assert!((0..width).all(|row| (0..row).all(|column| upper[(row, column)] == 0.0)));
        let extra =
            f64::from(DAMPING) * (0..width).map(|input| f64::from(gram[(input, input)])).sum::<f64>() / width as f64;
        let damped = Mat::from_fn(width, width, |row, column| {
            f64::from(gram[(order[row], order[column])]) + if row == column { extra } else { 0.0 }
        });
        let one = upper.transpose() * &upper * damped;
        let most = (0..width * width)
            .map(|at| (one[(at / width, at % width)] - f64::from(u8::from(at / width == at % width))).abs());
        let most = most.fold(0.0, f64::max);
        assert!(most < 1e-4, "{most}");
    }

    /// Without anything to make up with it is the nearest: inputs that never meet.
    #[test]
    fn inputs_that_never_meet_are_rounded_to_the_nearest() {
        let weights = Matrix { width: 160, values: drawn(160 * 3, 4) };
        let gram = Mat::identity(160, 160);
        let ours = gptq(&weights, &SCHEME, WeightFormat::Bf16, &gram).unwrap();
        assert_eq!(ours, round(&weights, &SCHEME, WeightFormat::Bf16, Some(&[1.0; 160])));
    }

    #[test]
    fn what_never_enters_and_what_is_no_number_are_told_apart() {
        let weights = Matrix { width: 32, values: drawn(64, 5) };
        let rounded = gptq(&weights, &SCHEME, WeightFormat::Bf16, &Mat::zeros(32, 32)).unwrap();
        assert_eq!(rounded, round(&weights, &SCHEME, WeightFormat::Bf16, Some(&[0.0; 32])));
        let refused = gptq(&weights, &SCHEME, WeightFormat::Bf16, &Mat::full(32, 32, f32::NAN));
        assert_eq!(refused.unwrap_err().to_string(), "inputs of a projection are not numbers");
    }
}
