//! The header of a GGUF file: metadata and the description of tensors. Believes no count, length or offset: nothing is
//! allocated for what the file does not hold.
//!
//! ```text
//! "GGUF" | version u32 | n_tensors u64 | n_keys u64 | keys ... | tensors ... | padding | data
//! key:    name | type u32 | value          tensor: name | n_dims u32 | dims u64 ... | type u32 | offset u64
//! ```

use std::{collections::BTreeMap, ops::Range};

use serde_json::Value;

use crate::format::WeightFormat;

const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Values in all arrays together: beyond every vocabulary with its merges, and little memory.
const MAX_VALUES: u64 = 1 << 22;
const MAX_DIMS: u32 = 4;

/// Metadata and tensors.
#[derive(Debug)]
pub struct Header {
    /// What the file says of itself.
    pub metadata: BTreeMap<String, Value>,
    /// Its tensors, by name.
    pub tensors: BTreeMap<String, TensorInfo>,
}

/// One tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// How its numbers are stored.
    pub format: WeightFormat,
    /// Rows first, as elsewhere; the file has it the other way round.
    pub shape: Vec<usize>,
    /// Where its bytes lie in the file.
    pub range: Range<usize>,
}

/// How much of a file there is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Extent {
    /// All of it: tensors lie inside.
    Whole,
    /// As much as holds the header: tensors may lie behind.
    Beginning,
}

impl Header {
    /// Reads the header of a file; the error says what is wrong.
    pub fn read(file: &[u8], extent: Extent) -> Result<Self, String> {
        let mut cursor = Cursor { rest: file, n_values: 0 };
        if cursor.bytes(MAGIC.len() as u64)? != MAGIC {
            return Err("it does not begin with \"GGUF\"".into());
        }
        let version = cursor.u32()?;
        if !(2..=3).contains(&version) {
            return Err(format!("its version is {version}; supported: 2, 3"));
        }
        let (n_tensors, n_keys) = (cursor.u64()?, cursor.u64()?);
        let metadata = read_metadata(&mut cursor, n_keys)?;
        let described = (0..n_tensors).map(|_| cursor.tensor()).collect::<Result<Vec<_>, _>>()?;
        let alignment = alignment(&metadata)?;
        let data_start = (file.len() - cursor.rest.len()).next_multiple_of(alignment as usize);
        let end = match extent {
            Extent::Whole => file.len(),
            Extent::Beginning => usize::MAX,
        };
        let tensors = place(described, data_start, alignment, end)?;
        Ok(Self { metadata, tensors })
    }
}

fn read_metadata(cursor: &mut Cursor, n_keys: u64) -> Result<BTreeMap<String, Value>, String> {
    let mut metadata = BTreeMap::new();
    for _ in 0..n_keys {
        let key = cursor.string()?;
        let kind = cursor.u32()?;
        let value = cursor.value(kind).map_err(|reason| format!("its key {key}: {reason}"))?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("its key {key} is there twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, String> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment = value.as_u64().filter(|n| n.is_power_of_two() && (8..=1 << 16).contains(n));
    alignment.ok_or_else(|| format!("its key general.alignment is {value}, expected a power of two from 8 to 65536"))
}

/// A tensor as the file describes it.
struct Described {
    name: String,
    shape: Vec<usize>,
    format: WeightFormat,
    offset: u64,
}

/// Finds each tensor's bytes. They may neither reach beyond the file nor into one another.
fn place(
    described: Vec<Described>,
    data_start: usize,
    alignment: u64,
    file_len: usize,
) -> Result<BTreeMap<String, TensorInfo>, String> {
    let mut tensors = BTreeMap::new();
    let mut ranges = Vec::new();
    for Described { name, shape, format, offset } in described {
        let n_bytes = n_bytes(&shape, format).map_err(|reason| format!("tensor {name}: {reason}"))?;
        if !offset.is_multiple_of(alignment) {
            return Err(format!("tensor {name}: its offset {offset} is not a multiple of {alignment}"));
        }
        let start = usize::try_from(offset).ok().and_then(|offset| data_start.checked_add(offset));
        let end = start.and_then(|start| start.checked_add(n_bytes)).filter(|end| *end <= file_len);
        let (Some(start), Some(end)) = (start, end) else {
            return Err(format!(
                "tensor {name} has {n_bytes} bytes at {offset} of the data, the file ends before: copy it again"
            ));
        };
        ranges.push((start, end, name.clone()));
        if tensors.insert(name.clone(), TensorInfo { format, shape, range: start..end }).is_some() {
            return Err(format!("tensor {name} is there twice"));
        }
    }
    ranges.sort_unstable();
    match ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(format!("tensors {} and {} overlap", pair[0].2, pair[1].2)),
        None => Ok(tensors),
    }
}

fn n_bytes(shape: &[usize], format: WeightFormat) -> Result<usize, String> {
    let absurd = || format!("its shape {shape:?} is more than any machine has");
    let n_values = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size)).ok_or_else(absurd)?;
    let (columns, block) = (shape.last().expect("a shape has a size"), format.block_values());
    if !columns.is_multiple_of(block) {
        return Err(format!("its rows of {columns} are not whole blocks: {} has {block} a block", format.name()));
    }
    (n_values / block).checked_mul(format.block_bytes()).ok_or_else(absurd)
}

/// What is left of the file.
struct Cursor<'a> {
    rest: &'a [u8],
    n_values: u64,
}

impl<'a> Cursor<'a> {
    fn bytes(&mut self, n: u64) -> Result<&'a [u8], String> {
        let split = usize::try_from(n).ok().and_then(|n| self.rest.split_at_checked(n));
        let (taken, rest) =
            split.ok_or_else(|| format!("its header ends early: {n} bytes expected, {} left", self.rest.len()))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.bytes(N as u64)?.try_into().expect("as many bytes were taken"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// Broken UTF-8 is replaced: some vocabularies hold bytes.
    fn string(&mut self) -> Result<String, String> {
        let len = self.u64()?;
        Ok(String::from_utf8_lossy(self.bytes(len)?).into_owned())
    }

    fn value(&mut self, kind: u32) -> Result<Value, String> {
        const ARRAY: u32 = 9;
        if kind != ARRAY {
            return self.scalar(kind);
        }
        let (kind, len) = (self.u32()?, self.u64()?);
        self.n_values = self.n_values.saturating_add(len);
        if self.n_values > MAX_VALUES {
            return Err(format!("an array of {len} values is more than any model has"));
        }
        (0..len).map(|_| self.scalar(kind)).collect()
    }

    fn scalar(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array()?).into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            6 => f32::from_le_bytes(self.array()?).into(),
            7 => (self.array::<1>()? != [0]).into(),
            8 => self.string()?.into(),
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.array()?).into(),
            12 => f64::from_le_bytes(self.array()?).into(),
            _ => return Err(format!("values of type {kind} are not known")),
        })
    }

    fn tensor(&mut self) -> Result<Described, String> {
        let name = self.string()?;
        let n_dims = self.u32()?;
        if !(1..=MAX_DIMS).contains(&n_dims) {
            return Err(format!("tensor {name} has {n_dims} dimensions, expected 1 to {MAX_DIMS}"));
        }
        let mut shape = (0..n_dims).map(|_| self.size(&name)).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let format = format(self.u32()?).map_err(|reason| format!("tensor {name}: {reason}"))?;
        Ok(Described { name, shape, format, offset: self.u64()? })
    }

    fn size(&mut self, name: &str) -> Result<usize, String> {
        let size = self.u64()?;
        usize::try_from(size).ok().filter(|size| *size > 0).ok_or_else(|| format!("tensor {name} has a size of {size}"))
    }
}

/// The numbers of the formats are ggml's.
fn format(kind: u32) -> Result<WeightFormat, String> {
    Ok(match kind {
        0 => WeightFormat::F32,
        1 => WeightFormat::F16,
        30 => WeightFormat::Bf16,
        2 => WeightFormat::Q4_0,
        3 => WeightFormat::Q4_1,
        6 => WeightFormat::Q5_0,
        7 => WeightFormat::Q5_1,
        8 => WeightFormat::Q8_0,
        12 => WeightFormat::Q4K,
        13 => WeightFormat::Q5K,
        14 => WeightFormat::Q6K,
        _ => {
            let known = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";
            return Err(format!("its format has ggml's number {kind}; supported: {known}"));
        }
    })
}
