//! A quantised projection in its file, and the numbers that its codes stand for. Each is one product rounded once to f32, or exact.

use std::{iter::repeat, ops::Range, sync::OnceLock};

use half::f16;
use stoker_fit::{
    format::WeightFormat,
    gpu::{BLOCK_INPUTS, block_scales_of_rows},
    model::quantization::{Bits, Codes, PartKind, Scheme, SharedBy},
};
use stoker_kernels::{
    code_words::{CodeWords, WORD_BYTES, place_of_awq},
    codes,
    int4::{GroupSize, ScaleFormat},
};

use super::{
    BLOCK, field,
    found::{Found, Place},
    int4_groups::{Int4Groups, code_order},
    scales::{Scales, are_in_order, check_groups, columns_named, finite, numbers},
    words_of,
};
use crate::model::{ModelError, spec::WeightSlice, tensor::Tensor};

/// Inputs that are unpacked together where they lie far apart: a cache line of numbers.
const INPUTS_AT_ONCE: usize = 16;

/// A rank's share of a quantised projection.
#[derive(Clone, Debug)]
pub(crate) struct QuantisedWeight {
    scheme: Scheme,
    /// Outputs and inputs of the whole tensor.
    shape: [usize; 2],
    slice: WeightSlice,
    stored: Found,
    codes: Tensor,
    /// Read when numbers are made of them: who takes four bits as they are stored has no use for it, and there are 55 million of an 8B
    /// model's.
    scales: OnceLock<Scales>,
    /// What codes are places of; empty where they are numbers.
    levels: Vec<f32>,
    /// Of all tensors of the whole projection.
    n_bytes: usize,
}

impl QuantisedWeight {
    /// Finds and checks the tensors of a projection; `tensor` gives one by its name.
    pub(in crate::model) fn find<'a>(
        scheme: &Scheme,
        place: &Place<'_>,
        slice: WeightSlice,
        tensor: impl Fn(&str) -> Option<&'a Tensor>,
    ) -> Result<Self, ModelError> {
        let found = Found::of(scheme, place, tensor)?;
        let scales = match scheme.is_int4() {
            true => {
                check_groups(scheme, place.shape, &found)?;
                OnceLock::new()
            }
            false => OnceLock::from(Scales::read(scheme, place.shape, &found)?),
        };
        let levels = found.get(PartKind::Levels).map(finite).transpose()?.unwrap_or_default();
        let codes = found.get(PartKind::Codes).expect("codes are needed").clone();
        let n_bytes = found.parts.iter().map(|(_, tensor)| tensor.bytes().len()).sum();
        Ok(Self { scheme: scheme.clone(), shape: place.shape, slice, stored: found, codes, scales, levels, n_bytes })
    }

    fn scales(&self) -> &Scales {
        let read =
            || Scales::read(&self.scheme, self.shape, &self.stored).expect("they were checked when they were found");
        self.scales.get_or_init(read)
    }

    /// How it is quantised.
    pub(crate) fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// Rows.
    pub(crate) fn n_outputs(&self) -> usize {
        self.slice.rows.len()
    }

    /// Columns.
    pub(crate) fn n_inputs(&self) -> usize {
        self.slice.columns.len()
    }

    /// Its part of the bytes of all tensors that hold the projection.
    pub(crate) fn n_bytes(&self) -> usize {
        let [n_outputs, n_inputs] = self.shape;
        (self.n_bytes as u64 * (self.n_outputs() * self.n_inputs()) as u64 / (n_outputs * n_inputs) as u64) as usize
    }

    /// Says that its codes are not read again soon.
    pub(crate) fn release(&self) {
        self.codes.content.release(self.codes.range.clone());
    }

    /// The scale of each row, if its numbers are e4m3 and share one.
    pub(crate) fn row_scales(&self) -> Option<Vec<f32>> {
        let are_rows = matches!(self.scheme.shared, SharedBy::Tensor | SharedBy::Output);
        let scale = |row: usize| {
            let scales = self.scales();
            scales.values[row / scales.block[0] * scales.n_columns]
        };
        (self.scheme.codes == Codes::E4m3 && are_rows).then(|| self.slice.rows.clone().map(scale).collect())
    }

    /// The scales of each [`BLOCK_INPUTS`] numbers of a row, and of the [`BLOCK_OUTPUTS`](stoker_fit::gpu::BLOCK_OUTPUTS) that begin with
    /// it, if its numbers are e4m3 in such blocks; behind them zeros, as kernels want so many.
    pub(crate) fn block_scales(&self, output: usize) -> Option<Vec<f32>> {
        let WeightSlice { rows, columns } = &self.slice;
        let inputs = columns.clone().step_by(BLOCK_INPUTS);
        let scale = |input| self.scales().of(rows.start + output, input).0;
        let padded = || inputs.map(scale).chain(repeat(0.0)).take(block_scales_of_rows(self.n_inputs())).collect();
        self.scheme.has_blocks_of_e4m3().then(padded)
    }

    /// Who shares a scale where a GPU keeps it in four bits, or why it does not.
    pub(crate) fn int4_group(&self) -> Result<GroupSize, String> {
        if !self.scheme.is_int4() {
            return Err(format!("{} is not four bits of integers", self.scheme));
        }
        let n_inputs = self.shape[1];
        if !self.groups_are_in_order() {
            return Err(format!("{} has its inputs in any order", self.codes.name));
        }
        let [_, size] = self.scheme.shared.block(self.shape);
        let group = GroupSize::of(size, n_inputs).ok_or_else(|| format!("{} has groups of {size}", self.codes.name))?;
        // A rank's inputs: of all of them a group may end early, and of one that is as long as a row any part has its scale.
        let cuts_groups =
            self.n_inputs() != n_inputs && size < n_inputs && !self.n_inputs().is_multiple_of(group.values());
        match cuts_groups {
            true => Err(format!("{} has groups of {size}, and {} inputs a rank", self.codes.name, self.n_inputs())),
            false => Ok(group),
        }
    }

    fn groups_are_in_order(&self) -> bool {
        let Some(indices) = self.stored.get(PartKind::GroupIndices) else { return true };
        let [_, n_columns] = self.scheme.shared.grid(self.shape);
        let columns = columns_named(indices, n_columns).expect("they were checked when they were found");
        are_in_order(&columns, self.scheme.shared.block(self.shape)[1])
    }

    /// Whether scales are stored in that format.
    pub(crate) fn scales_are(&self, format: ScaleFormat) -> bool {
        let stored = match format {
            ScaleFormat::F16 => WeightFormat::F16,
            ScaleFormat::Bf16 => WeightFormat::Bf16,
        };
        self.stored.scales().format == Ok(stored)
    }

    /// Whether that format holds all scales as they are.
    pub(crate) fn scales_fit(&self, format: ScaleFormat) -> bool {
        self.scales_are(format) || format.holds(&numbers(self.stored.scales()))
    }

    /// Scales and zero points as a GPU keeps them in four bits.
    pub(crate) fn int4_groups(&self, group: GroupSize, format: ScaleFormat) -> Int4Groups<'_> {
        Int4Groups::of(&self.stored, &self.scheme, (self.shape, &self.slice), group, format)
    }

    /// Codes of four bits in the words that are stored, from 0 on: the host makes nothing of them, since a start waits for all of a
    /// model's.
    pub(crate) fn code_words(&self) -> CodeWords<'_> {
        let WeightSlice { rows, columns } = self.slice.clone();
        CodeWords::of(code_order(&self.scheme), self.codes.bytes(), self.shape, [rows, columns])
    }

    /// The format that a CPU keeps it in: blocks of integers where they are the same numbers, else numbers of the format `plain`.
    pub(crate) fn kept_as(&self, plain: WeightFormat) -> WeightFormat {
        let is_whole = self.slice.columns.start.is_multiple_of(BLOCK) && self.n_inputs().is_multiple_of(BLOCK);
        let offset = match self.scheme.codes {
            Codes::E4m3 | Codes::E2m1 | Codes::Levels => return plain,
            Codes::Int8 | Codes::Packed(_) => 0.0,
            Codes::Gptq { bits, .. } => bits.half() as f32,
            Codes::Awq => Bits::Four.half() as f32,
        };
        if !is_whole || !self.scales().fit_blocks(self.shape[1]) {
            return plain;
        }
        let is_centred = self.scales().zero_points.iter().all(|point| *point == offset);
        match (self.scheme.codes.bits(), is_centred) {
            (Bits::Four, true) => WeightFormat::Q4_0,
            (Bits::Four, false) | (Bits::Eight, true) => WeightFormat::Q8_0,
            // A difference of two bytes has nine bits.
            (Bits::Eight, false) => plain,
        }
    }

    /// Some rows in the blocks that [`Self::kept_as`] said.
    pub(crate) fn to_blocks(&self, outputs: Range<usize>, format: WeightFormat) -> Vec<u8> {
        let codes = self.codes_of(outputs.clone());
        let mut blocks = Vec::with_capacity(format.bytes_of(codes.len()));
        for (output, row) in outputs.zip(codes.chunks_exact(self.n_inputs())) {
            for (idx, codes) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
                let input = self.slice.columns.start + idx * BLOCK;
                let (scale, zero_point) = self.scales().of(self.slice.rows.start + output, input);
                blocks.extend(f16::from_f32(scale).to_le_bytes());
                let quants = codes.map(|code| (code - zero_point) as i8);
                match format {
                    WeightFormat::Q8_0 => blocks.extend(quants.map(|quant| quant as u8)),
                    _ => blocks.extend(halves(quants)),
                }
            }
        }
        blocks
    }

    /// Codes of one row that are a byte each, as they lie in the file.
    pub(crate) fn row_of_bytes(&self, output: usize) -> &[u8] {
        let start = (self.slice.rows.start + output) * self.shape[1];
        &self.codes.bytes()[start + self.slice.columns.start..start + self.slice.columns.end]
    }

    /// The same of some rows, in as few runs as there are in the file.
    pub(crate) fn runs_of_bytes(&self, outputs: Range<usize>) -> Vec<&[u8]> {
        if self.n_inputs() != self.shape[1] {
            return outputs.map(|output| self.row_of_bytes(output)).collect();
        }
        let at = |output: usize| (self.slice.rows.start + output) * self.shape[1];
        vec![&self.codes.bytes()[at(outputs.start)..at(outputs.end)]]
    }

    /// The numbers of some rows, one row behind the other.
    pub(crate) fn dequantise(&self, outputs: Range<usize>) -> Vec<f32> {
        let mut rows = self.codes_of(outputs.clone());
        for (output, row) in outputs.zip(rows.chunks_exact_mut(self.n_inputs())) {
            self.scales().apply(self.slice.rows.start + output, self.slice.columns.clone(), row);
        }
        rows
    }

    /// Codes as numbers.
    fn codes_of(&self, outputs: Range<usize>) -> Vec<f32> {
        match self.scheme.codes {
            Codes::E4m3 => self.codes_of_bytes(outputs, codes::e4m3),
            Codes::Int8 => self.codes_of_bytes(outputs, |code| f32::from(code as i8)),
            Codes::E2m1 => outputs.flat_map(|output| self.row_of_e2m1(output)).collect(),
            Codes::Levels => outputs.flat_map(|output| self.row_of_levels(output)).collect(),
            Codes::Packed(_) | Codes::Gptq { .. } | Codes::Awq => {
                let first = self.slice.rows.start;
                let rows = self.codes_of_words(first + outputs.start..first + outputs.end);
                if self.n_inputs() == self.shape[1] {
                    return rows;
                }
                rows.chunks_exact(self.shape[1]).flat_map(|row| &row[self.slice.columns.clone()]).copied().collect()
            }
        }
    }

    /// Two codes a byte, the first one low; rows begin with a byte.
    fn row_of_e2m1(&self, output: usize) -> impl Iterator<Item = f32> {
        let start = (self.slice.rows.start + output) * self.shape[1].div_ceil(2);
        let bytes = &self.codes.bytes()[start..];
        self.slice.columns.clone().map(move |at| codes::e2m1(bytes[at / 2] >> (4 * (at % 2)) & 15))
    }

    /// Two codes a byte, the first one high.
    fn row_of_levels(&self, output: usize) -> impl Iterator<Item = f32> {
        let start = (self.slice.rows.start + output) * self.shape[1];
        let bytes = self.codes.bytes();
        let code = move |at: usize| bytes[at / 2] >> (4 * (1 - at % 2)) & 15;
        let places = start + self.slice.columns.start..start + self.slice.columns.end;
        places.map(move |at| self.levels[usize::from(code(at))])
    }

    fn codes_of_bytes(&self, outputs: Range<usize>, number: impl Fn(u8) -> f32) -> Vec<f32> {
        let numbers: Vec<f32> = (0..=u8::MAX).map(number).collect();
        outputs.flat_map(|output| self.row_of_bytes(output)).map(|code| numbers[usize::from(*code)]).collect()
    }

    /// All inputs of some outputs of the whole tensor.
    fn codes_of_words(&self, outputs: Range<usize>) -> Vec<f32> {
        let mut rows = vec![0.0; outputs.len() * self.shape[1]];
        match self.scheme.codes {
            Codes::Packed(bits) => self.codes_of_rows_of_words(bits, outputs, &mut rows),
            Codes::Gptq { bits, .. } => self.codes_of_gptq(bits, outputs, &mut rows),
            _ => self.codes_of_awq(outputs, &mut rows),
        }
        rows
    }

    /// Words along inputs, output by output.
    fn codes_of_rows_of_words(&self, bits: Bits, outputs: Range<usize>, rows: &mut [f32]) {
        let n_inputs = self.shape[1];
        let row_bytes = n_inputs.div_ceil(bits.per_word()) * WORD_BYTES;
        let stored = self.codes.bytes()[outputs.start * row_bytes..].chunks_exact(row_bytes);
        for (row, stored) in rows.chunks_exact_mut(n_inputs).zip(stored) {
            for (codes, word) in row.chunks_mut(bits.per_word()).zip(words_of(stored)) {
                let codes = codes.iter_mut().enumerate();
                codes.for_each(|(idx, code)| *code = (field(word, idx, bits.n()) - bits.half()) as f32);
            }
        }
    }

    /// Words along inputs, input by input.
    fn codes_of_gptq(&self, bits: Bits, outputs: Range<usize>, rows: &mut [f32]) {
        let [n_outputs, n_inputs] = self.shape;
        for (at, stored) in self.codes.bytes().chunks_exact(n_outputs * WORD_BYTES).enumerate() {
            let words = words_of(&stored[outputs.start * WORD_BYTES..outputs.end * WORD_BYTES]);
            for (row, word) in rows.chunks_exact_mut(n_inputs).zip(words) {
                let codes = row[at * bits.per_word()..].iter_mut().take(bits.per_word()).enumerate();
                codes.for_each(|(idx, code)| *code = field(word, idx, bits.n()) as f32);
            }
        }
    }

    /// Words along outputs: those of the range that a word has. Some inputs at a time, so that a row is written a cache line after
    /// the other and not all rows by turns.
    fn codes_of_awq(&self, outputs: Range<usize>, rows: &mut [f32]) {
        let [n_outputs, n_inputs] = self.shape;
        let row_bytes = n_outputs.div_ceil(8) * WORD_BYTES;
        for (chunk, stored) in self.codes.bytes().chunks(INPUTS_AT_ONCE * row_bytes).enumerate() {
            for output in outputs.clone() {
                let (at, place) = (output / 8 * WORD_BYTES, place_of_awq(output));
                let row = &mut rows[(output - outputs.start) * n_inputs + chunk * INPUTS_AT_ONCE..];
                for (code, stored) in row.iter_mut().zip(stored.chunks_exact(row_bytes)) {
                    let word = u32::from_le_bytes([stored[at], stored[at + 1], stored[at + 2], stored[at + 3]]);
                    *code = field(word, place, 4) as f32;
                }
            }
        }
    }
}

/// Integers from -8 to 7 as Q4_0 stores them: the first half low, the second high.
fn halves(quants: [i8; BLOCK]) -> [u8; BLOCK / 2] {
    let (low, high) = quants.split_at(BLOCK / 2);
    std::array::from_fn(|idx| (low[idx] + 8) as u8 | ((high[idx] + 8) as u8) << 4)
}
