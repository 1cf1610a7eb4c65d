//! What was measured of GEMMs on one chip: by shape, epilogue and numerics, for some row counts, which kernel was the fastest. Made by
//! `stoker-bench autotune`, committed in `tables/`, read at start. A table serves the chip it was measured on and no other.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    choose::{GemmDesc, Numerics, Operands},
    device::Properties,
    gemm::Tile,
    launch::{Epilogue, GemmShape},
};

/// All that were measured.
const BUILT_IN: [&str; 2] = [include_str!("../tables/h100.json"), include_str!("../tables/h200.json")];

/// The fastest way that was found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Entry {
    /// Our tile.
    Tile(Tile),
    /// The guess of cuBLASLt at this place of its list.
    CublasLt(usize),
    /// A GEMM to bf16, and what else is to be done in a launch of its own.
    Apart,
}

/// One chip's.
#[derive(Clone, Debug, Default)]
pub struct ChipTable {
    /// What it was measured on.
    header: Header,
    by_shape: BTreeMap<Key, BTreeMap<usize, Entry>>,
}

/// What a table was measured on.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// The driver's name of the chip.
    pub chip: String,
    /// Its compute capability.
    pub capability: (i32, i32),
    /// Its multiprocessors.
    pub n_multiprocessors: u32,
    /// The version of cuBLASLt, whose list of guesses may differ from another's.
    pub cublaslt: usize,
}

/// Numerics, format of the weights, epilogue, columns, depth.
type Key = (Numerics, Operands, Epilogue, usize, usize);

/// A table as it lies in its file.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct File {
    measured_on: Header,
    gemms: Vec<Line>,
}

/// One shape.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Line {
    n: usize,
    k: usize,
    epilogue: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    batch_invariant: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<String>,
    rows: BTreeMap<usize, String>,
}

/// Why a table is not taken.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// It is not one.
    #[error("table of GEMMs: {0}")]
    Unreadable(String),
    /// It was measured elsewhere.
    #[error(
        "table of GEMMs: it was measured on {} with {} multiprocessors, this is {here} with {n_multiprocessors}: measure this chip \
         with `stoker-bench autotune`",
        measured_on.chip, measured_on.n_multiprocessors
    )]
    OtherChip {
        /// Where it was measured.
        measured_on: Header,
        /// The chip here.
        here: String,
        /// Its multiprocessors.
        n_multiprocessors: u32,
    },
}

impl ChipTable {
    /// An empty one, for measuring.
    pub fn new(header: Header) -> Self {
        Self { header, by_shape: BTreeMap::new() }
    }

    /// That of the chip, if it was measured.
    pub fn built_in(chip: &str, properties: Properties) -> Option<Self> {
        Self::all_built_in().find(|table| table.is_of(chip, properties))
    }

    /// All that were measured.
    pub fn all_built_in() -> impl Iterator<Item = Self> {
        BUILT_IN.into_iter().map(|text| text.parse().expect("a test reads every built-in table"))
    }

    /// Reads a table for this chip.
    pub fn read(text: &str, chip: &str, properties: Properties) -> Result<Self, TableError> {
        let table: Self = text.parse()?;
        if table.is_of(chip, properties) {
            return Ok(table);
        }
        let n_multiprocessors = properties.n_multiprocessors;
        Err(TableError::OtherChip { measured_on: table.header, here: chip.to_owned(), n_multiprocessors })
    }

    fn is_of(&self, chip: &str, properties: Properties) -> bool {
        self.header.chip == chip && self.header.n_multiprocessors == properties.n_multiprocessors
    }

    /// What it was measured on.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Whether places in its lists are those of this version of cuBLASLt.
    pub fn is_of_cublaslt(&self, version: Option<usize>) -> bool {
        version == Some(self.header.cublaslt)
    }

    /// What was the fastest at the shape for the next larger row count.
    pub fn get(&self, numerics: Numerics, desc: GemmDesc) -> Option<Entry> {
        let GemmShape { m, n, k } = desc.shape;
        let by_rows = self.by_shape.get(&(numerics, desc.operands, desc.epilogue, n, k))?;
        by_rows.range(m..).next().map(|(_, entry)| *entry)
    }

    /// The same at the shape that is nearest by the ratios of columns and depths.
    pub fn nearest(&self, numerics: Numerics, desc: GemmDesc) -> Option<Entry> {
        let GemmShape { m, n, k } = desc.shape;
        let far = |a: usize, b: usize| (a as f64 / b as f64).ln().abs();
        let of = (numerics, desc.operands, desc.epilogue);
        let own = self
            .by_shape
            .iter()
            .filter(|((numerics, weights, epilogue, ..), _)| (*numerics, *weights, *epilogue) == of);
        let known = own.filter_map(|(&(.., n, k), by_rows)| Some((n, k, by_rows.range(m..).next()?.1)));
        let distance = |(other_n, other_k, _): &(usize, usize, &Entry)| far(*other_n, n) + far(*other_k, k);
        known.min_by(|a, b| distance(a).total_cmp(&distance(b))).map(|(.., entry)| *entry)
    }

    /// Takes over what another table of this chip says.
    pub fn merge(&mut self, other: Self) {
        for (key, by_rows) in other.by_shape {
            self.by_shape.entry(key).or_default().extend(by_rows);
        }
    }

    /// Writes down what is the fastest.
    pub fn set(&mut self, numerics: Numerics, desc: GemmDesc, entry: Entry) {
        let GemmShape { m, n, k } = desc.shape;
        self.by_shape.entry((numerics, desc.operands, desc.epilogue, n, k)).or_default().insert(m, entry);
    }
}

impl FromStr for ChipTable {
    type Err = TableError;

    fn from_str(text: &str) -> Result<Self, TableError> {
        let file: File = serde_json::from_str(text).map_err(|error| TableError::Unreadable(error.to_string()))?;
        let mut table = Self::new(file.measured_on);
        for Line { n, k, epilogue, batch_invariant, weights, rows } in file.gemms {
            let unreadable = |problem| TableError::Unreadable(format!("n {n} k {k} to {epilogue}: {problem}"));
            let numerics = if batch_invariant { Numerics::BatchInvariant } else { Numerics::Fastest };
            let weights = weights.map_or(Ok(Operands::Bf16), |name| format_named(&name)).map_err(unreadable)?;
            let key = (numerics, weights, epilogue_named(&epilogue).map_err(unreadable)?, n, k);
            let rows = rows.into_iter().map(|(m, entry)| Ok((m, entry.parse()?)));
            table.by_shape.insert(key, rows.collect::<Result<_, String>>().map_err(unreadable)?);
        }
        Ok(table)
    }
}

/// As its file: JSON, a line for each shape.
impl fmt::Display for ChipTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.by_shape.iter().map(|(&(numerics, weights, epilogue, n, k), by_rows)| Line {
            n,
            k,
            epilogue: name(epilogue).to_owned(),
            batch_invariant: numerics == Numerics::BatchInvariant,
            weights: FORMATS.into_iter().find(|(format, _)| *format == weights).map(|(_, name)| name.to_owned()),
            rows: by_rows.iter().map(|(m, entry)| (*m, entry.to_string())).collect(),
        });
        let lines: Vec<String> = lines.map(|line| json(&line)).collect();
        write!(f, "{{\"measured_on\":{},\n\"gemms\":[\n{}\n]}}", json(&self.header), lines.join(",\n"))
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("numbers and strings are JSON")
}

fn name(epilogue: Epilogue) -> &'static str {
    match epilogue {
        Epilogue::Bf16 => "bf16",
        Epilogue::F32 => "f32",
        Epilogue::Sum => "sum",
        Epilogue::Gated => "gated",
        Epilogue::Update => "update",
    }
}

/// As a line says it; one of bf16 says nothing.
const FORMATS: [(Operands, &str); 4] = [
    (Operands::E4m3, "e4m3"),
    (Operands::E4m3Blocks, "e4m3 blocks"),
    (Operands::Int4, "int4"),
    (Operands::Int4BesideE4m3, "int4 beside e4m3"),
];

fn format_named(text: &str) -> Result<Operands, String> {
    let found = FORMATS.into_iter().find(|(_, name)| *name == text);
    found.map(|(format, _)| format).ok_or_else(|| format!("no format of weights is named {text:?}"))
}

fn epilogue_named(text: &str) -> Result<Epilogue, String> {
    let all = [Epilogue::Bf16, Epilogue::F32, Epilogue::Sum, Epilogue::Gated, Epilogue::Update];
    all.into_iter().find(|epilogue| name(*epilogue) == text).ok_or_else(|| format!("no epilogue is named {text:?}"))
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tile(tile) => write!(f, "{tile}"),
            Self::CublasLt(rank) => write!(f, "cublaslt {rank}"),
            Self::Apart => write!(f, "apart"),
        }
    }
}

impl FromStr for Entry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("cublaslt ") {
            Some(rank) => rank.parse().map(Self::CublasLt).map_err(|_| format!("{rank:?} is no place in a list")),
            None if text == "apart" => Ok(Self::Apart),
            None => text.parse().map(Self::Tile),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choose::Prologue;

    const TEXT: &str = r#"{"measured_on":{"chip":"NVIDIA H200","capability":[9,0],"n_multiprocessors":132,"cublaslt":130100},
"gemms":[
{"n":6144,"k":4096,"epilogue":"bf16","rows":{"8":"1x8/48","64":"cublaslt 2"}},
{"n":28672,"k":4096,"epilogue":"gated","rows":{"64":"apart"}},
{"n":6144,"k":4096,"epilogue":"bf16","weights":"e4m3","rows":{"64":"1x64/48"}},
{"n":6144,"k":4096,"epilogue":"bf16","batch_invariant":true,"rows":{"64":"1x64/32"}}
]}"#;
    const H200: Properties =
        Properties { n_multiprocessors: 132, capability: (9, 0), l2_bytes: 60 << 20, shared_bytes_max: 227 << 10 };

    fn desc(m: usize, n: usize, epilogue: Epilogue) -> GemmDesc {
        let shape = GemmShape { m, n, k: 4096 };
        GemmDesc { shape, operands: Operands::Bf16, prologue: Prologue::Plain, epilogue }
    }

    #[test]
    fn a_table_is_what_its_file_says_line_by_line() {
        assert_eq!(TEXT.parse::<ChipTable>().unwrap().to_string(), TEXT);
    }

    #[test]
    fn rows_that_were_not_measured_take_what_the_next_larger_count_found() {
        let table: ChipTable = TEXT.parse().unwrap();
        let found = |m| table.get(Numerics::Fastest, desc(m, 6144, Epilogue::Bf16));
        let tile = Entry::Tile("1x8/48".parse().unwrap());
        assert_eq!(
            [1, 8, 9, 64, 65].map(found),
            [Some(tile), Some(tile), Some(Entry::CublasLt(2)), Some(Entry::CublasLt(2)), None]
        );
        assert_eq!(table.get(Numerics::Fastest, desc(8, 6144, Epilogue::Gated)), None);
        let quantised = GemmDesc { operands: Operands::E4m3, ..desc(64, 6144, Epilogue::Bf16) };
        assert_eq!(table.get(Numerics::Fastest, quantised), Some(Entry::Tile("1x64/48".parse().unwrap())));
    }

    #[test]
    fn the_nearest_shape_is_of_the_same_epilogue_and_numerics() {
        let table: ChipTable = TEXT.parse().unwrap();
        assert_eq!(table.nearest(Numerics::Fastest, desc(33, 5000, Epilogue::Bf16)), Some(Entry::CublasLt(2)));
        assert_eq!(table.nearest(Numerics::Fastest, desc(33, 6144, Epilogue::Gated)), Some(Entry::Apart));
        assert_eq!(table.nearest(Numerics::BatchInvariant, desc(33, 6144, Epilogue::Gated)), None);
    }

    #[test]
    fn a_table_of_another_chip_is_refused_with_both_names() {
        let refusal = ChipTable::read(TEXT, "NVIDIA H100 80GB HBM3", H200).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "table of GEMMs: it was measured on NVIDIA H200 with 132 multiprocessors, this is NVIDIA H100 80GB HBM3 with 132: \
             measure this chip with `stoker-bench autotune`"
        );
        let fewer = Properties { n_multiprocessors: 114, ..H200 };
        assert!(matches!(ChipTable::read(TEXT, "NVIDIA H200", fewer), Err(TableError::OtherChip { .. })));
        assert!(ChipTable::read(TEXT, "NVIDIA H200", H200).is_ok());
    }

    #[test]
    fn what_is_not_a_table_says_where() {
        let refused = |from: &str, to: &str| TEXT.replace(from, to).parse::<ChipTable>().unwrap_err().to_string();
        let text = "table of GEMMs: n 6144 k 4096 to bf16: no tile of the kernel is written \"1x9/48\"";
        assert_eq!(refused("1x8/48", "1x9/48"), text);
        assert!(refused("\"gated\"", "\"gate\"").contains("no epilogue is named \"gate\""));
        assert!(refused("cublaslt 2", "cublaslt x").contains("\"x\" is no place in a list"));
        assert!(refused("\"n\":6144", "\"columns\":6144").contains("columns"));
    }

    #[test]
    fn every_built_in_table_can_be_read_and_is_written_as_the_command_writes_it() {
        for text in BUILT_IN {
            assert_eq!(text.trim_end(), text.parse::<ChipTable>().unwrap().to_string());
        }
    }
}
