//! A quantised projection in its file: finding the tensors that hold it, refusing what cannot be right before a code is read,
//! and the numbers that its codes stand for. Each is one product rounded once to f32, or exact.

use std::{ops::Range, sync::OnceLock};

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};
use stoker_fit::{
    format::WeightFormat,
    model::quantization::{Bits, Codes, Part, PartKind, SCALES_OF_ONE, Scheme, SharedBy},
};
use stoker_kernels::{
    code_words::{CodeOrder, CodeWords, WORD_BYTES, place_of_awq},
    codes,
    int4::{GroupSize, ScaleFormat, group_word},
};

use crate::model::{ModelError, spec::WeightSlice, tensor::Tensor};

/// Inputs that are unpacked together where they lie far apart: a cache line of numbers.
const INPUTS_AT_ONCE: usize = 16;
/// Inputs of a block of Q8_0 and Q4_0.
const BLOCK: usize = 32;

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

/// Scales of a whole tensor, and zero points where it has some: row by row of its grid.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scales {
    /// Outputs and inputs that share one.
    pub(crate) block: [usize; 2],
    /// Scales of a row of the grid.
    pub(crate) n_columns: usize,
    /// The scales.
    pub(crate) values: Vec<f32>,
    /// As many zero points, or none.
    zero_points: Vec<f32>,
    /// Which column of the grid each input has.
    column_of: Vec<u32>,
}

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
        /// What words lack.
        add: u32,
    },
}

/// The tensors of one projection, found by name and checked against their description.
#[derive(Clone, Debug)]
struct Found {
    parts: Vec<(PartKind, Tensor)>,
}

/// Where a projection's tensors are looked for.
pub(in crate::model) struct Place<'a> {
    /// The projection's module.
    pub(in crate::model) module: &'a str,
    /// Outputs and inputs.
    pub(in crate::model) shape: [usize; 2],
    /// What a missing tensor is missing from.
    pub(in crate::model) whole: &'a str,
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
        let shared = &self.scheme.shared;
        let ([n_rows, n_columns], [row_outputs, size]) = (shared.grid(self.shape), shared.block(self.shape));
        let WeightSlice { rows, columns } = &self.slice;
        Int4Groups {
            scales: self.stored.scales(),
            format,
            scale_strides: if self.scheme.is_by_inputs() { [1, n_rows] } else { [n_columns, 1] },
            zero_points: self.zero_points_of_four_bits([n_rows, n_columns]),
            outputs: rows.clone(),
            row_outputs,
            columns: columns.clone().step_by(group.values()).map(|input| input / size).collect(),
        }
    }

    fn zero_points_of_four_bits(&self, [n_rows, n_columns]: [usize; 2]) -> ZeroPoints<'_> {
        let Some(tensor) = self.stored.get(PartKind::ZeroPoints) else {
            return ZeroPoints::Alike(if let Codes::Packed(bits) = self.scheme.codes { bits.half() as u8 } else { 0 });
        };
        let add = match self.scheme.codes {
            // The library adds to whole words, and what it took from them may have been borrowed from the next place.
            Codes::Gptq { bits, zeros_less_one: true } => bits.ones(),
            _ => 0,
        };
        let strides = if self.scheme.is_by_inputs() { [1, n_rows.div_ceil(8)] } else { [n_columns, 1] };
        ZeroPoints::Words { bytes: tensor.bytes(), strides, order: self.code_order(), add }
    }

    fn code_order(&self) -> CodeOrder {
        match self.scheme.codes {
            Codes::Packed(_) => CodeOrder::Packed,
            Codes::Gptq { .. } => CodeOrder::Gptq,
            _ => CodeOrder::Awq,
        }
    }

    /// Codes of four bits in the words that are stored, from 0 on: the host makes nothing of them, since a start waits for all of a
    /// model's.
    pub(crate) fn code_words(&self) -> CodeWords<'_> {
        let WeightSlice { rows, columns } = self.slice.clone();
        CodeWords::of(self.code_order(), self.codes.bytes(), self.shape, [rows, columns])
    }

    /// The format that a CPU keeps it in: blocks of integers where they are the same numbers, else numbers of the format `plain`.
    pub(crate) fn kept_as(&self, plain: WeightFormat) -> WeightFormat {
        let is_whole = self.slice.columns.start.is_multiple_of(BLOCK) && self.n_inputs().is_multiple_of(BLOCK);
        let offset = match self.scheme.codes {
            Codes::E4m3 | Codes::Levels => return plain,
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

impl Scales {
    fn read(scheme: &Scheme, shape: [usize; 2], found: &Found) -> Result<Self, ModelError> {
        let [n_rows, n_columns] = scheme.shared.grid(shape);
        let block = scheme.shared.block(shape);
        let in_rows = |values: Vec<f32>| match scheme.is_by_inputs() {
            true => transposed(&values, [n_columns, n_rows]),
            false => values,
        };
        let scales = found.get(PartKind::Scales).expect("scales are needed");
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
    fn fit_blocks(&self, n_inputs: usize) -> bool {
        let [_, inputs] = self.block;
        let is_f16 = |scale: &f32| f16::from_f32(*scale).to_f32() == *scale;
        (inputs.is_multiple_of(BLOCK) || inputs == n_inputs)
            && self.values.iter().all(is_f16)
            && are_in_order(&self.column_of, inputs)
    }

    /// Scale and zero point of one weight.
    fn of(&self, output: usize, input: usize) -> (f32, f32) {
        let at = output / self.block[0] * self.n_columns + self.column_of[input] as usize;
        (self.values[at], self.zero_points.get(at).copied().unwrap_or_default())
    }

    /// Some codes of one output to numbers.
    fn apply(&self, output: usize, inputs: Range<usize>, row: &mut [f32]) {
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

impl Found {
    fn of<'a>(
        scheme: &Scheme,
        place: &Place<'_>,
        tensor: impl Fn(&str) -> Option<&'a Tensor>,
    ) -> Result<Self, ModelError> {
        let mut parts = Vec::new();
        for part in scheme.parts(place.shape) {
            let names: Vec<String> = part.names.iter().map(|name| format!("{}.{name}", place.module)).collect();
            match names.iter().find_map(|name| tensor(name)) {
                Some(tensor) => {
                    check(scheme, place, &part, tensor)?;
                    parts.push((part.kind, tensor.clone()));
                }
                None if part.needed => {
                    return Err(missing(scheme, place, &part, names, tensor(&format!("{}.weight", place.module))));
                }
                None => {}
            }
        }
        Ok(Self { parts })
    }

    fn get(&self, kind: PartKind) -> Option<&Tensor> {
        self.parts.iter().find(|(found, _)| *found == kind).map(|(_, tensor)| tensor)
    }

    fn scales(&self) -> &Tensor {
        self.get(PartKind::Scales).expect("scales are needed")
    }
}

impl Int4Groups<'_> {
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

/// Refuses a tensor of another shape or number format than its part has.
fn check(scheme: &Scheme, place: &Place<'_>, part: &Part, tensor: &Tensor) -> Result<(), ModelError> {
    let dtype = dtype_of(tensor);
    if part.kind == PartKind::Codes && is_plain(dtype) {
        return Err(refused(tensor, not_quantised(scheme, place.module, &tensor.format_name())));
    }
    if !part.dtypes.is_empty() && !part.dtypes.contains(&dtype) {
        let expected: Vec<String> = part.dtypes.iter().map(Dtype::to_string).collect();
        let problem = format!("is {dtype}, quantization_config ({scheme}) says {}", expected.join(" or "));
        return Err(refused(tensor, problem));
    }
    if !part.shapes.is_empty() && !part.shapes.contains(&tensor.shape) {
        let hint = other_group_size(scheme, part, tensor, place.shape).unwrap_or_default();
        let (found, expected) = (&tensor.shape, &part.shapes[0]);
        let problem = format!("has shape {found:?}, quantization_config ({scheme}) says {expected:?}{hint}");
        return Err(refused(tensor, problem));
    }
    Ok(())
}

/// The size of groups that scales of another shape would have.
fn other_group_size(scheme: &Scheme, part: &Part, tensor: &Tensor, shape: [usize; 2]) -> Option<String> {
    let is_grouped = part.kind == PartKind::Scales && part.shapes[0].len() == 2;
    let n_groups = *if scheme.is_by_inputs() { tensor.shape.first() } else { tensor.shape.get(1) }?;
    let fits = is_grouped && n_groups > 0 && shape[1].is_multiple_of(n_groups);
    fits.then(|| format!("; groups of {} inputs would fit", shape[1] / n_groups))
}

fn missing(scheme: &Scheme, place: &Place<'_>, part: &Part, names: Vec<String>, plain: Option<&Tensor>) -> ModelError {
    match plain {
        Some(plain) if is_plain(dtype_of(plain)) => {
            refused(plain, not_quantised(scheme, place.module, &plain.format_name()))
        }
        _ => ModelError::MissingTensor {
            file: place.whole.into(),
            tensor: names.join(" or "),
            expected: part.shapes.first().cloned().unwrap_or_default(),
        },
    }
}

fn not_quantised(scheme: &Scheme, module: &str, found: &str) -> String {
    format!("is {found}, quantization_config says {scheme}; name {module} there among the modules that are left alone")
}

fn refused(tensor: &Tensor, problem: String) -> ModelError {
    ModelError::Quantised { file: tensor.file.to_string(), tensor: tensor.name.clone(), problem }
}

fn dtype_of(tensor: &Tensor) -> Dtype {
    match tensor.format {
        Ok(WeightFormat::F32) => Dtype::F32,
        Ok(WeightFormat::F16) => Dtype::F16,
        Ok(_) => Dtype::BF16,
        Err(dtype) => dtype,
    }
}

/// The numbers of a tensor, which are some.
fn finite(tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
    let values = numbers(tensor);
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(refused(tensor, format!("has a scale that is {value}: quantise the model again"))),
        None => Ok(values),
    }
}

/// Refuses scales that are none, and groups that there are not. Keeps nothing of them.
fn check_groups(scheme: &Scheme, shape: [usize; 2], found: &Found) -> Result<(), ModelError> {
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

/// Whether numbers stand for themselves.
fn is_plain(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// Scales as numbers; those of eight bits are exponents.
fn numbers(tensor: &Tensor) -> Vec<f32> {
    match tensor.format {
        Ok(format) => format.unpack(tensor.bytes()),
        Err(_) => tensor.bytes().iter().map(|code| codes::e8m0(*code)).collect(),
    }
}

/// Zero points, row by row of the grid.
fn zero_points(scheme: &Scheme, tensor: &Tensor, [n_rows, n_columns]: [usize; 2]) -> Vec<f32> {
    let words: Vec<u32> = match scheme.codes {
        Codes::E4m3 | Codes::Int8 | Codes::Levels => {
            return tensor.bytes().iter().map(|code| f32::from(*code as i8)).collect();
        }
        Codes::Packed(_) | Codes::Gptq { .. } | Codes::Awq => words_of(tensor.bytes()).collect(),
    };
    let point = |row: usize, column: usize| match scheme.codes {
        Codes::Packed(bits) => {
            let word = words[row / bits.per_word() * n_columns + column];
            field(word, row % bits.per_word(), bits.n()) - bits.half()
        }
        Codes::Gptq { bits, zeros_less_one } => {
            let word = words[column * n_rows.div_ceil(bits.per_word()) + row / bits.per_word()];
            // The library adds to whole words, and what it took from them may have been borrowed from the next place.
            let word = word.wrapping_add(if zeros_less_one { bits.ones() } else { 0 });
            field(word, row % bits.per_word(), bits.n())
        }
        _ => field(words[column * n_rows.div_ceil(8) + row / 8], place_of_awq(row), 4),
    };
    (0..n_rows)
        .flat_map(|row| (0..n_columns).map(move |column| (row, column)))
        .map(|(r, c)| point(r, c) as f32)
        .collect()
}

/// Whether inputs follow each other in groups of `size`, by the group of each.
fn are_in_order(column_of: &[u32], size: usize) -> bool {
    column_of.iter().enumerate().all(|(input, column)| input / size == *column as usize)
}

/// The group of each input, all of which there are.
fn columns_named(tensor: &Tensor, n_groups: usize) -> Result<Vec<u32>, ModelError> {
    let indices: Vec<i64> = match tensor.format {
        Err(Dtype::I64) => tensor.bytes().as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
        _ => words_of(tensor.bytes()).map(|word| i64::from(word as i32)).collect(),
    };
    match indices.iter().find(|idx| !(0..n_groups as i64).contains(idx)) {
        Some(idx) => Err(refused(tensor, format!("names group {idx}, quantization_config says there are {n_groups}"))),
        None => Ok(indices.into_iter().map(|idx| idx as u32).collect()),
    }
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<WORD_BYTES>().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

/// Integers from -8 to 7 as Q4_0 stores them: the first half low, the second high.
fn halves(quants: [i8; BLOCK]) -> [u8; BLOCK / 2] {
    let (low, high) = quants.split_at(BLOCK / 2);
    std::array::from_fn(|idx| (low[idx] + 8) as u8 | ((high[idx] + 8) as u8) << 4)
}

/// The code at place `idx` of a word.
fn field(word: u32, idx: usize, bits: usize) -> i32 {
    (word >> (idx * bits) & ((1 << bits) - 1)) as i32
}

fn transposed(values: &[f32], [n_rows, n_columns]: [usize; 2]) -> Vec<f32> {
    (0..n_columns).flat_map(|column| (0..n_rows).map(move |row| values[row * n_columns + column])).collect()
}
