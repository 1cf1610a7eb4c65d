//! From numbers to codes: each group of inputs of an output has a scale, and every number becomes the nearest multiple of it that the
//! format has. Pure.

use std::{cmp::Ordering, sync::LazyLock};

use half::{bf16, f16};
use rayon::prelude::*;
use stoker_engine::model::WeightFormat;
use stoker_kernels::codes;

use crate::{
    matrix::Matrix,
    scheme::{Format, Scheme},
};

/// Numbers that are summed up side by side, so that the compiler takes wide instructions.
const LANES: usize = 8;

/// Shares of a group's largest number that are tried as the largest that a code stands for.
const SHARES: [f32; 9] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6];

/// A matrix as codes and their scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Rounded {
    /// Columns.
    pub width: usize,
    /// Inputs that share a scale.
    pub group: usize,
    /// Row by row: integers, or numbers of e4m3.
    pub codes: Vec<f32>,
    /// Row by row, one a group.
    pub scales: Vec<f32>,
}

impl Rounded {
    /// What it stands for.
    pub fn numbers(&self) -> Matrix {
        let mut values = self.codes.clone();
        let n_groups = self.width.div_ceil(self.group);
        for (row, scales) in values.chunks_exact_mut(self.width).zip(self.scales.chunks_exact(n_groups)) {
            for (group, scale) in row.chunks_mut(self.group).zip(scales) {
                group.iter_mut().for_each(|value| *value *= scale);
            }
        }
        Matrix { width: self.width, values }
    }
}

/// The numbers of one format, and in which format its scales are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    format: Format,
    scales: WeightFormat,
}

impl Grid {
    /// Scales are stored as the checkpoint's other numbers are; those of f32 in f16, so that integers can be multiplied in blocks.
    pub(crate) fn new(format: Format, stored: WeightFormat) -> Self {
        Self { format, scales: if stored == WeightFormat::F32 { WeightFormat::F16 } else { stored } }
    }

    /// How scales are stored.
    pub(crate) fn scale_format(self) -> WeightFormat {
        self.scales
    }

    /// The largest code.
    pub(crate) fn largest(self) -> f32 {
        match self.format {
            Format::Fp8 | Format::Fp8Static => 448.0,
            Format::Int8 => 127.0,
            Format::Int4 => 7.0,
        }
    }

    /// The code nearest to a number that was divided by its scale; what is too large becomes the largest.
    pub(crate) fn code(self, number: f32) -> f32 {
        match self.format {
            Format::Fp8 | Format::Fp8Static => e4m3(number),
            Format::Int8 | Format::Int4 => integer(number, self.largest()),
        }
    }

    /// The scale with which a group loses least, where the error of each number counts `importance` of its square; without that, by its
    /// largest number.
    pub(crate) fn scale(self, group: &[f32], importance: Option<&[f32]>) -> f32 {
        let most = group.iter().fold(0f32, |most, value| most.max(value.abs()));
        let by_share = |share: &f32| self.stored(most * share / self.largest());
        let Some(importance) = importance else { return by_share(&1.0) };
        let largest = self.largest();
        // The format is asked once a group: a loop that asks for each number takes no wide instructions.
        let loss = |scale: f32| match self.format {
            Format::Fp8 | Format::Fp8Static => loss(group, importance, scale, e4m3),
            Format::Int8 | Format::Int4 => loss(group, importance, scale, |number| integer(number, largest)),
        };
        let losses = SHARES.iter().map(by_share).map(|scale| (scale, loss(scale)));
        losses.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(1.0, |(scale, _)| scale)
    }

    /// A scale as it is stored. Of a group of zeros, or of numbers too small to have one, it is 1.
    fn stored(self, scale: f32) -> f32 {
        let stored = match self.scales {
            WeightFormat::Bf16 => bf16::from_f32(scale).to_f32(),
            _ => f16::from_f32(scale).to_f32(),
        };
        if stored > 0.0 { stored } else { 1.0 }
    }
}

/// What is lost of a group with a scale: the squares of the errors, each by its weight.
fn loss(group: &[f32], weights: &[f32], scale: f32, code: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0f32; LANES];
    for (values, weights) in group.chunks(LANES).zip(weights.chunks(LANES)) {
        for ((sum, value), weight) in sums.iter_mut().zip(values).zip(weights) {
            *sum += (code(value / scale) * scale - value).powi(2) * weight;
        }
    }
    sums.iter().sum()
}

/// The nearest integer that a format has whose largest is this one.
fn integer(number: f32, largest: f32) -> f32 {
    nearest(number.clamp(-largest - 1.0, largest))
}

/// The integer nearest to a small number, an even one where two are as near: floats of this size have no digits behind the point. The
/// machine's own word for it is a call of a library where no instruction set is asked for.
fn nearest(number: f32) -> f32 {
    const WHOLE: f32 = 1.5 * (1u32 << 23) as f32;
    (number + WHOLE) - WHOLE
}

/// The number of e4m3 nearest to this one, even where two are as near; what is larger than all becomes the largest.
fn e4m3(number: f32) -> f32 {
    let magnitude = number.abs().min(448.0);
    let at = E4M3.partition_point(|known| *known < magnitude);
    let (above, below) = (E4M3[at], E4M3[at.saturating_sub(1)]);
    let is_below = match (magnitude - below).total_cmp(&(above - magnitude)) {
        Ordering::Less => true,
        Ordering::Equal => !at.is_multiple_of(2),
        Ordering::Greater => false,
    };
    (if is_below { below } else { above }).copysign(number)
}

/// Its numbers from 0 on, each at the place that is its code.
static E4M3: LazyLock<Vec<f32>> = LazyLock::new(|| (0..0x7F).map(codes::e4m3).collect());

/// The byte that stands for a number of e4m3.
pub(crate) fn byte_of_e4m3(number: f32) -> u8 {
    let at = E4M3.partition_point(|known| *known < number.abs());
    at as u8 | (u8::from(number.is_sign_negative()) << 7)
}

/// Every number to the nearest. `importance` of an input is the mean square of what enters there.
pub fn round(weights: &Matrix, scheme: &Scheme, stored: WeightFormat, importance: Option<&[f32]>) -> Rounded {
    let (grid, group) = (Grid::new(scheme.format, stored), scheme.group_of(weights.width));
    let row = |row: &[f32]| {
        let (mut codes, mut scales) = (Vec::with_capacity(row.len()), Vec::new());
        for (idx, values) in row.chunks(group).enumerate() {
            let importance = importance.map(|all| &all[idx * group..][..values.len()]);
            let scale = grid.scale(values, importance);
            codes.extend(values.iter().map(|value| grid.code(value / scale)));
            scales.push(scale);
        }
        (codes, scales)
    };
    let rows: Vec<_> = weights.values.par_chunks_exact(weights.width).map(row).collect();
    let (codes, scales): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    Rounded { width: weights.width, group, codes: codes.concat(), scales: scales.concat() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stoker_kernels::reference;

    use super::*;
    use crate::scheme::Method;

    fn scheme(format: Format) -> Scheme {
        Scheme { format, method: Method::Nearest, group: 32 }
    }

    #[test]
    fn every_number_of_e4m3_is_its_own_code_and_ties_go_to_even() {
        for byte in (0..=u8::MAX).filter(|byte| byte & 0x7F != 0x7F) {
            let number = codes::e4m3(byte);
            assert_eq!((e4m3(number).to_bits(), byte_of_e4m3(number)), (number.to_bits(), byte), "{byte:#x}");
        }
        // 17 lies between 16 (code even) and 18; 19 between 18 and 20.
        assert_eq!([17.0, 19.0, -17.0, 1e9, 0.0].map(e4m3), [16.0, 20.0, -16.0, 448.0, 0.0]);
    }

    proptest! {
        #[test]
        fn e4m3_is_what_the_kernels_reference_says(number in -500f32..500.0, exponent in -12i32..1) {
            let number = number * 2f32.powi(exponent);
            prop_assert_eq!(e4m3(number), reference::e4m3(number), "{}", number);
        }

        /// Half a step at most, and of the scale that is searched no more in the sum than without.
        #[test]
        fn what_is_lost_is_at_most_half_a_step(values in prop::collection::vec(-3f32..3.0, 96), important in 0usize..96) {
            let weights = Matrix { width: 96, values };
            let importance: Vec<f32> = (0..96).map(|idx| if idx == important { 1e4 } else { 1.0 }).collect();
            for (format, steps) in [(Format::Int4, 0.5f32), (Format::Int8, 0.5), (Format::Fp8, 16.0)] {
                let plain = round(&weights, &scheme(format), WeightFormat::Bf16, None);
                let n_groups = 96 / plain.group;
                let lost = weights.minus(&plain.numbers());
                for (idx, lost) in lost.values.iter().enumerate() {
                    let scale = plain.scales[idx / plain.group % n_groups];
                    // The scale is stored in bf16: the largest number may lie a little beyond the largest code.
                    prop_assert!(lost.abs() <= scale * (steps + 2.0 * Grid::new(format, WeightFormat::Bf16).largest() / 256.0), "{format} {lost} {scale}");
                }
                let searched = round(&weights, &scheme(format), WeightFormat::Bf16, Some(&importance));
                let loss = |rounded: &Rounded| -> f64 {
                    let lost = weights.minus(&rounded.numbers()).values;
                    lost.iter().zip(&importance).map(|(lost, weight)| f64::from(lost * lost * weight)).sum()
                };
                prop_assert!(loss(&searched) <= loss(&plain) * 1.000_01);
            }
        }
    }

    #[test]
    fn integers_are_the_nearest_and_ties_go_to_even() {
        for quarter in -600i16..600 {
            let number = f32::from(quarter) / 4.0;
            assert_eq!(nearest(number), number.round_ties_even(), "{number}");
        }
        let codes = |format| [-1e9, 7.4, 7.6, 1e9].map(|number| Grid::new(format, WeightFormat::Bf16).code(number));
        assert_eq!((codes(Format::Int4), codes(Format::Int8)), ([-8.0, 7.0, 7.0, 7.0], [-128.0, 7.0, 8.0, 127.0]));
    }

    #[test]
    fn a_group_of_zeros_stays_zeros() {
        let weights = Matrix { width: 64, values: vec![0.0; 64] };
        let rounded = round(&weights, &scheme(Format::Int4), WeightFormat::F16, Some(&[1.0; 64]));
        assert_eq!((rounded.scales.as_slice(), rounded.numbers()), ([1.0, 1.0].as_slice(), weights));
    }
}
