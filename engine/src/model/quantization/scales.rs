//! Scales and zero points of a quantised projection as numbers, read from the tensors that hold them.

use std::ops::Range;

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};
use stoker_fit::{
    format::WeightFormat,
    model::quantization::{Codes, PartKind, SCALES_OF_ONE, Scheme},
};
use stoker_kernels::{code_words::place_of_awq, codes};

use super::{
    BLOCK, field,
    found::{Found, refused},
    taken_from_words, words_of,
};
use crate::model::{ModelError, tensor::Tensor};

/// Scales of a whole tensor, and zero points where it has some: row by row of its grid.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scales {
    /// Outputs and inputs that share one.
    pub(super) block: [usize; 2],
    /// Scales of a row of the grid.
    pub(super) n_columns: usize,
    /// The scales.
    pub(super) values: Vec<f32>,
    /// As many zero points, or none.
    pub(super) zero_points: Vec<f32>,
    /// Which column of the grid each input has.
    column_of: Vec<u32>,
}

impl Scales {
    pub(super) fn read(scheme: &Scheme, shape: [usize; 2], found: &Found) -> Result<Self, ModelError> {
        let [n_rows, n_columns] = scheme.shared.grid(shape);
        let block = scheme.shared.block(shape);
        let in_rows = |values: Vec<f32>| match scheme.is_by_inputs() {
            true => transposed(&values, [n_columns, n_rows]),
            false => values,
        };
        let scales = found.scales();
        let values = match scheme.codes {
            Codes::Levels => scales_of_levels(scheme, shape, found, scales)?,
            _ => in_rows(finite(scales)?),
        };
        let zero_points =
            found.get(PartKind::ZeroPoints).map(|tensor| zero_points(scheme, tensor, [n_rows, n_columns]));
        let column_of = match found.get(PartKind::GroupIndices) {
            Some(tensor) => columns_named(tensor, n_columns)?,
            None => (0..shape[1]).map(|input| (input / block[1]) as u32).collect(),
        };
        Ok(Self { block, n_columns, values, zero_points: zero_points.unwrap_or_default(), column_of })
    }

    /// Whether blocks of 32 inputs have one scale each, which f16 holds.
    pub(super) fn fit_blocks(&self, n_inputs: usize) -> bool {
        let [_, inputs] = self.block;
        let is_f16 = |scale: &f32| f16::from_f32(*scale).to_f32() == *scale;
        (inputs.is_multiple_of(BLOCK) || inputs == n_inputs)
            && self.values.iter().all(is_f16)
            && are_in_order(&self.column_of, inputs)
    }

    /// Scale and zero point of one weight.
    pub(super) fn of(&self, output: usize, input: usize) -> (f32, f32) {
        let at = output / self.block[0] * self.n_columns + self.column_of[input] as usize;
        (self.values[at], self.zero_points.get(at).copied().unwrap_or_default())
    }

    /// Some codes of one output to numbers.
    pub(super) fn apply(&self, output: usize, inputs: Range<usize>, row: &mut [f32]) {
        let first = output / self.block[0] * self.n_columns;
        let scales = &self.values[first..first + self.n_columns];
        let columns = self.column_of[inputs].iter().map(|column| *column as usize);
        if self.zero_points.is_empty() {
            row.iter_mut().zip(columns).for_each(|(code, column)| *code *= scales[column]);
            return;
        }
        let zero_points = &self.zero_points[first..first + self.n_columns];
        row.iter_mut().zip(columns).for_each(|(code, column)| *code = (*code - zero_points[column]) * scales[column]);
    }
}

/// The numbers of a tensor, which are some.
pub(super) fn finite(tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
    let values = numbers(tensor);
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(refused(tensor, format!("has a scale that is {value}: quantise the model again"))),
        None => Ok(values),
    }
}

/// Refuses scales that are none, and groups that there are not. Keeps nothing of them.
pub(super) fn check_groups(scheme: &Scheme, shape: [usize; 2], found: &Found) -> Result<(), ModelError> {
    if !is_finite(found.scales()) {
        finite(found.scales())?;
    }
    let [_, n_columns] = scheme.shared.grid(shape);
    found.get(PartKind::GroupIndices).map_or(Ok(()), |tensor| columns_named(tensor, n_columns).map(drop))
}

/// Whether all numbers of a tensor are some, by their bits where they are plain.
fn is_finite(tensor: &Tensor) -> bool {
    let halves = || tensor.bytes().as_chunks::<2>().0.iter();
    match tensor.format {
        Ok(WeightFormat::F16) => halves().all(|bytes| f16::from_le_bytes(*bytes).is_finite()),
        Ok(WeightFormat::Bf16) => halves().all(|bytes| bf16::from_le_bytes(*bytes).is_finite()),
        _ => numbers(tensor).iter().all(|value| value.is_finite()),
    }
}

/// Scales of bitsandbytes: numbers, or places in a list of 256 times a number for every 256 of them, and an offset to all.
fn scales_of_levels(
    scheme: &Scheme,
    shape: [usize; 2],
    found: &Found,
    scales: &Tensor,
) -> Result<Vec<f32>, ModelError> {
    let [_, size] = scheme.shared.block(shape);
    let state = found.get(PartKind::State).expect("the state is needed");
    let described: Value = serde_json::from_slice(state.bytes()).unwrap_or_default();
    if described["blocksize"].as_u64() != Some(size as u64) || described["shape"] != json!(shape) {
        return Err(refused(state, format!("is {described}, expected blocks of {size} and shape {shape:?}")));
    }
    if !shape[1].is_multiple_of(size) {
        return Err(refused(scales, format!("has blocks of {size}, which do not divide rows of {} inputs", shape[1])));
    }
    if scales.format.is_ok() {
        return finite(scales);
    }
    let (Some(outer), Some(levels)) = (found.get(PartKind::OuterScales), found.get(PartKind::OuterLevels)) else {
        return Err(refused(scales, "has bytes, but nested_absmax or nested_quant_map is missing".into()));
    };
    let Some(offset) = described["nested_offset"].as_f64().filter(|_| described["nested_blocksize"] == SCALES_OF_ONE)
    else {
        return Err(refused(
            state,
            format!("is {described}, expected a nested_offset and nested blocks of {SCALES_OF_ONE}"),
        ));
    };
    let (outer, levels) = (finite(outer)?, finite(levels)?);
    let scale = |(idx, code): (usize, &u8)| levels[usize::from(*code)] * outer[idx / SCALES_OF_ONE] + offset as f32;
    Ok(scales.bytes().iter().enumerate().map(scale).collect())
}

/// Scales as numbers; those of eight bits are exponents.
pub(super) fn numbers(tensor: &Tensor) -> Vec<f32> {
    match tensor.format {
        Ok(format) => format.unpack(tensor.bytes()),
        Err(_) => tensor.bytes().iter().map(|code| codes::e8m0(*code)).collect(),
    }
}

/// Zero points, row by row of the grid.
fn zero_points(scheme: &Scheme, tensor: &Tensor, [n_rows, n_columns]: [usize; 2]) -> Vec<f32> {
    let words: Vec<u32> = match scheme.codes {
        Codes::E4m3 | Codes::E2m1 | Codes::Int8 | Codes::Levels => {
            return tensor.bytes().iter().map(|code| f32::from(*code as i8)).collect();
        }
        Codes::Packed(_) | Codes::Gptq { .. } | Codes::Awq => words_of(tensor.bytes()).collect(),
    };
    let point = |row: usize, column: usize| match scheme.codes {
        Codes::Packed(bits) => {
            let word = words[row / bits.per_word() * n_columns + column];
            field(word, row % bits.per_word(), bits.n()) - bits.half()
        }
        Codes::Gptq { bits, .. } => {
            let word = words[column * n_rows.div_ceil(bits.per_word()) + row / bits.per_word()];
            field(word.wrapping_add(taken_from_words(scheme)), row % bits.per_word(), bits.n())
        }
        _ => field(words[column * n_rows.div_ceil(8) + row / 8], place_of_awq(row), 4),
    };
    (0..n_rows)
        .flat_map(|row| (0..n_columns).map(move |column| (row, column)))
        .map(|(r, c)| point(r, c) as f32)
        .collect()
}

/// Whether inputs follow each other in groups of `size`, by the group of each.
pub(super) fn are_in_order(column_of: &[u32], size: usize) -> bool {
    column_of.iter().enumerate().all(|(input, column)| input / size == *column as usize)
}

/// The group of each input, all of which there are.
pub(super) fn columns_named(tensor: &Tensor, n_groups: usize) -> Result<Vec<u32>, ModelError> {
    let indices: Vec<i64> = match tensor.format {
        Err(Dtype::I64) => tensor.bytes().as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        _ => words_of(tensor.bytes()).map(|word| i64::from(word as i32)).collect(),
    };
    match indices.iter().find(|idx| !(0..n_groups as i64).contains(idx)) {
        Some(idx) => Err(refused(tensor, format!("names group {idx}, quantization_config says there are {n_groups}"))),
        None => Ok(indices.into_iter().map(|idx| idx as u32).collect()),
    }
}

fn transposed(values: &[f32], [n_rows, n_columns]: [usize; 2]) -> Vec<f32> {
    (0..n_columns).flat_map(|column| (0..n_rows).map(move |row| values[row * n_columns + column])).collect()
}
