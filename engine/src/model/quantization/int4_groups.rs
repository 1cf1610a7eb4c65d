//! Scales and zero points of four bits where they are stored: a GPU is given words made of them, and no numbers in between.

use std::ops::Range;

use half::{bf16, f16};
use stoker_fit::{
    format::WeightFormat,
    model::quantization::{Codes, PartKind, Scheme},
};
use stoker_kernels::{
    code_words::{CodeOrder, WORD_BYTES, place_of_awq},
    int4::{GroupSize, ScaleFormat, group_word},
};

use super::{field, found::Found, taken_from_words, words_of};
use crate::model::{spec::WeightSlice, tensor::Tensor};

/// Scales and zero points of a rank's share of a projection in four bits, where they are stored.
#[derive(Debug)]
pub(crate) struct Int4Groups<'a> {
    scales: &'a Tensor,
    format: ScaleFormat,
    /// From a row of the grid to the next, and from a column.
    scale_strides: [usize; 2],
    zero_points: ZeroPoints<'a>,
    /// Of the whole projection.
    outputs: Range<usize>,
    /// That share a row of the grid.
    row_outputs: usize,
    /// Of the grid, of each group.
    columns: Vec<usize>,
}

/// Where zero points of four bits are.
#[derive(Clone, Copy, Debug)]
enum ZeroPoints<'a> {
    /// All of them are this.
    Alike(u8),
    /// Eight rows share a word.
    Words {
        bytes: &'a [u8],
        /// From eight rows to the next, and from a column.
        strides: [usize; 2],
        order: CodeOrder,
        /// See [`taken_from_words`].
        add: u32,
    },
}

impl<'a> Int4Groups<'a> {
    /// Of a share of a projection of this shape, as the GPU's groups and their scales are.
    pub(super) fn of(
        stored: &'a Found,
        scheme: &Scheme,
        (shape, slice): ([usize; 2], &WeightSlice),
        group: GroupSize,
        format: ScaleFormat,
    ) -> Self {
        let (grid, [row_outputs, size]) = (scheme.shared.grid(shape), scheme.shared.block(shape));
        let [n_rows, n_columns] = grid;
        Self {
            scales: stored.scales(),
            format,
            scale_strides: if scheme.is_by_inputs() { [1, n_rows] } else { [n_columns, 1] },
            zero_points: ZeroPoints::of(stored, scheme, grid),
            outputs: slice.rows.clone(),
            row_outputs,
            columns: slice.columns.clone().step_by(group.values()).map(|input| input / size).collect(),
        }
    }

    pub(crate) fn n_outputs(&self) -> usize {
        self.outputs.len()
    }

    /// What makes the word of each group of one of the share's outputs.
    pub(crate) fn of_output(&self, output: usize) -> impl Fn(usize) -> u32 {
        let row = (self.outputs.start + output) / self.row_outputs;
        let [from_row, from_column] = self.scale_strides;
        let zero = self.zero_points.of_row(row);
        move |group| {
            let column = self.columns[group];
            group_word(self.scale_bits(row * from_row + column * from_column), zero(column))
        }
    }

    fn scale_bits(&self, at: usize) -> u16 {
        let bytes = self.scales.bytes();
        let half = || u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]);
        match (self.scales.format, self.format) {
            (Ok(WeightFormat::F16), ScaleFormat::F16) | (Ok(WeightFormat::Bf16), ScaleFormat::Bf16) => half(),
            (Ok(WeightFormat::F16), ScaleFormat::Bf16) => self.format.bits(f16::from_bits(half()).to_f32()),
            (Ok(WeightFormat::Bf16), ScaleFormat::F16) => self.format.bits(bf16::from_bits(half()).to_f32()),
            _ => self.format.bits(words_of(&bytes[4 * at..][..4]).map(f32::from_bits).sum()),
        }
    }
}

impl<'a> ZeroPoints<'a> {
    fn of(stored: &'a Found, scheme: &Scheme, [n_rows, n_columns]: [usize; 2]) -> Self {
        let Some(tensor) = stored.get(PartKind::ZeroPoints) else {
            return Self::Alike(if let Codes::Packed(bits) = scheme.codes { bits.half() as u8 } else { 0 });
        };
        let strides = if scheme.is_by_inputs() { [1, n_rows.div_ceil(8)] } else { [n_columns, 1] };
        Self::Words { bytes: tensor.bytes(), strides, order: code_order(scheme), add: taken_from_words(scheme) }
    }

    /// What knows those of a row of the grid by their columns.
    fn of_row(self, row: usize) -> impl Fn(usize) -> u8 + 'a {
        let place = match self {
            Self::Words { order: CodeOrder::Awq, .. } => place_of_awq(row),
            _ => row % 8,
        };
        move |column| match self {
            Self::Alike(zero) => zero,
            Self::Words { bytes, strides, add, .. } => {
                let at = (row / 8 * strides[0] + column * strides[1]) * WORD_BYTES;
                let word = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
                field(word.wrapping_add(add), place, 4) as u8
            }
        }
    }
}

/// How words hold codes of four bits.
pub(super) fn code_order(scheme: &Scheme) -> CodeOrder {
    match scheme.codes {
        Codes::Packed(_) => CodeOrder::Packed,
        Codes::Gptq { .. } => CodeOrder::Gptq,
        _ => CodeOrder::Awq,
    }
}
