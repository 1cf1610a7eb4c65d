//! Comparisons of weights that arrive on the device in every format, and of codes of four bits in every order of words.

use std::ops::Range;

use stoker_fit::format::WeightFormat;

use super::{Gpu, Outcome, fixture::widened, relative_error};
use crate::{
    KernelError, bf16,
    code_words::{CodeOrder, CodeWords, FOURS, place_of_awq},
    int4::{GroupSize, Int4Layout, ScaleFormat, group_word},
    launch::GATE_UP_GROUP,
    upload::{MakeWords, PlacedCodes, RowPlaces, Stored, Upload, upload},
};

/// Where blocks have scales in f16.
fn scales(format: WeightFormat) -> &'static [usize] {
    match format {
        WeightFormat::F32 | WeightFormat::Bf16 => &[],
        WeightFormat::F16 | WeightFormat::Q8_0 | WeightFormat::Q4_0 | WeightFormat::Q5_0 => &[0],
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => &[0, 2],
        WeightFormat::Q6K => &[208],
    }
}

/// Random blocks whose scales are finite.
fn random_blocks(gpu: &mut Gpu, format: WeightFormat, n_blocks: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..n_blocks * format.block_bytes()).map(|_| gpu.noise.below(256) as u8).collect();
    for block in bytes.chunks_mut(format.block_bytes()) {
        // Exponents far below those of infinity and NaN, in f16 and in f32.
        scales(format).iter().for_each(|at| block[at + 1] &= 0xbf);
        if matches!(format, WeightFormat::F32 | WeightFormat::Bf16) {
            let last = block.len() - 1;
            block[last] &= 0xbf;
        }
    }
    bytes
}

/// Every format alone, its parts shared out over pieces and threads, and all of them in one tensor. Not a bit differs.
pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    let mut mixed = Vec::new();
    for format in WeightFormat::ALL {
        let small = random_blocks(gpu, format, 9);
        // Some pieces of 4 MiB, and the beginning of one more.
        let large = random_blocks(gpu, format, (9 << 20) / format.block_bytes());
        outcomes.push(compare(gpu, format.name(), &[(format, large), (format, small.clone())])?);
        mixed.push((format, small));
    }
    outcomes.push(compare(gpu, "all formats", &mixed)?);
    for order in [CodeOrder::Packed, CodeOrder::Gptq, CodeOrder::Awq] {
        for case in CODE_CASES {
            outcomes.push(repacked(gpu, order, case)?);
        }
    }
    Ok(outcomes)
}

/// Matrices of codes that share a buffer.
#[derive(Clone, Copy, Debug)]
struct CodeCase {
    /// Outputs of each matrix's share.
    n: &'static [usize],
    /// Inputs of all.
    k: usize,
    /// Outputs and inputs of a whole tensor in front of the share and behind it.
    around: [[usize; 2]; 2],
    /// Rows of one behind the other, or of each in turn.
    in_turn: bool,
}

/// Tiles, chunks and words that end early; shares that begin inside of a word; matrices of several pieces of 4 MiB, which meet in the
/// words of a tile.
const CODE_CASES: [CodeCase; 7] = [
    CodeCase { n: &[16], k: 64, around: [[0; 2]; 2], in_turn: false },
    CodeCase { n: &[33], k: 1064, around: [[0; 2]; 2], in_turn: false },
    CodeCase { n: &[24, 13, 9], k: 136, around: [[8, 8], [16, 8]], in_turn: false },
    CodeCase { n: &[5, 7], k: 51, around: [[3, 5], [6, 2]], in_turn: false },
    CodeCase { n: &[40, 40], k: 200, around: [[8, 16], [0, 8]], in_turn: true },
    CodeCase { n: &[2056, 2056], k: 8200, around: [[0; 2]; 2], in_turn: true },
    CodeCase { n: &[3000, 1100], k: 4104, around: [[1100, 0], [4, 4104]], in_turn: false },
];

/// Every code in its order of words, by the rules of [`CodeWords`] written the other way round.
fn words_of(order: CodeOrder, codes: &[u8], [n_outputs, n_inputs]: [usize; 2]) -> Vec<u8> {
    let n_words = match order {
        CodeOrder::Packed => n_outputs * n_inputs.div_ceil(FOURS),
        CodeOrder::Gptq => n_inputs.div_ceil(FOURS) * n_outputs,
        CodeOrder::Awq => n_inputs * n_outputs.div_ceil(FOURS),
    };
    let mut words = vec![0u32; n_words];
    for (at, code) in codes.iter().enumerate() {
        let (output, input) = (at / n_inputs, at % n_inputs);
        let (word, place) = match order {
            CodeOrder::Packed => (output * n_inputs.div_ceil(FOURS) + input / FOURS, input % FOURS),
            CodeOrder::Gptq => (input / FOURS * n_outputs + output, input % FOURS),
            CodeOrder::Awq => (input * n_outputs.div_ceil(FOURS) + output / FOURS, place_of_awq(output)),
        };
        words[word] |= u32::from(*code) << (4 * place);
    }
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// A whole tensor in its words, and the codes of a share of it.
struct Tensor {
    bytes: Vec<u8>,
    shape: [usize; 2],
    share: [Range<usize>; 2],
    codes: Vec<u8>,
}

impl Tensor {
    fn drawn(gpu: &mut Gpu, order: CodeOrder, n: usize, case: CodeCase) -> Self {
        let [front, behind] = case.around;
        let share = [front[0]..front[0] + n, front[1]..front[1] + case.k];
        let shape = [share[0].end + behind[0], share[1].end + behind[1]];
        let all: Vec<u8> = (0..shape[0] * shape[1]).map(|_| gpu.noise.below(16) as u8).collect();
        let codes = share[0].clone().flat_map(|row| all[row * shape[1]..][share[1].clone()].to_vec()).collect();
        Self { bytes: words_of(order, &all, shape), shape, share, codes }
    }

    fn words(&self, order: CodeOrder) -> CodeWords<'_> {
        CodeWords::of(order, &self.bytes, self.shape, self.share.clone())
    }
}

impl CodeCase {
    fn layout(&self) -> Int4Layout {
        Int4Layout { n: self.n.iter().sum(), k: self.k, group: GroupSize::G128, scales: ScaleFormat::F16 }
    }

    /// Outputs of a matrix that lie together.
    fn turn(&self, n: usize) -> usize {
        if self.in_turn { GATE_UP_GROUP } else { n }
    }

    fn places(&self) -> Vec<RowPlaces> {
        let mut first = 0;
        let place = |n: &usize| {
            let turn = self.turn(*n);
            first += turn;
            RowPlaces { first: first - turn, turn, period: turn * self.n.len() }
        };
        self.n.iter().map(place).collect()
    }

    /// Codes of all rows, as the host puts them together.
    fn codes(&self, tensors: &[Tensor]) -> Vec<u8> {
        let n_turns = self.n[0] / self.turn(self.n[0]);
        let turns = (0..n_turns).flat_map(|turn| tensors.iter().map(move |tensor| (turn, tensor)));
        let codes = turns.flat_map(|(idx, tensor)| {
            let of_turn = self.turn(tensor.share[0].len()) * self.k;
            &tensor.codes[idx * of_turn..][..of_turn]
        });
        codes.copied().collect()
    }
}

/// Scales and zero points that are packed on their way.
#[derive(Debug)]
struct DrawnGroups {
    layout: Int4Layout,
    groups: Vec<(f32, u8)>,
}

impl DrawnGroups {
    fn drawn(gpu: &mut Gpu, layout: Int4Layout) -> Self {
        let n_groups = layout.n * layout.k.div_ceil(layout.group.values());
        let groups = (0..n_groups).map(|at| ((at % 1000) as f32, gpu.noise.below(16) as u8)).collect();
        Self { layout, groups }
    }

    fn word(&self, at: usize) -> u32 {
        let (scale, zero) = self.groups[at];
        group_word(self.layout.scales.bits(scale), zero)
    }
}

impl MakeWords for DrawnGroups {
    fn make(&self, tiles: Range<usize>, words: &mut [u32]) {
        let n_groups = self.groups.len() / self.layout.n;
        self.layout.write_groups(tiles, words, |row| move |group| self.word(row * n_groups + group));
    }
}

/// What the device makes of words is what the host packs of codes, and groups are what it packs of them: the error is the number of words
/// that differ.
fn repacked(gpu: &mut Gpu, order: CodeOrder, case: CodeCase) -> Result<Outcome, KernelError> {
    let layout = case.layout();
    let tensors: Vec<Tensor> = case.n.iter().map(|n| Tensor::drawn(gpu, order, *n, case)).collect();
    let groups = DrawnGroups::drawn(gpu, layout);
    let wanted = layout.pack(&case.codes(&tensors), &groups.groups);
    let mut codes = gpu.guarded(vec![0u32; layout.n_code_words()])?;
    let mut words = gpu.guarded(vec![u32::MAX; layout.n_group_words()])?;
    let parts = tensors.iter().zip(case.places());
    let parts = parts.map(|(tensor, rows)| PlacedCodes { words: tensor.words(order), rows }).collect();
    let uploads = vec![
        Upload::Codes { target: codes.view(), layout, parts },
        Upload::Words { target: words.view(), unit_words: layout.n_tile_group_words(), maker: &groups },
    ];
    upload(&gpu.kernels, uploads, &|_| {})?;
    let found = [gpu.written(&codes)?, gpu.written(&words)?].map(Option::unwrap_or_default);
    let n_different: f64 = found.iter().zip([wanted.codes(), wanted.groups()]).map(|(a, b)| n_different(a, b)).sum();
    Ok(Outcome { op: "repack_int4", case: format!("{order:?}, {case:?}"), error: n_different, limit: 0.0 })
}

fn n_different(found: &[u32], wanted: &[u32]) -> f64 {
    match found.len() == wanted.len() {
        true => found.iter().zip(wanted).filter(|(found, wanted)| found != wanted).count() as f64,
        false => f64::INFINITY,
    }
}

fn compare(gpu: &Gpu, case: &str, parts: &[(WeightFormat, Vec<u8>)]) -> Result<Outcome, KernelError> {
    let unpacked = parts.iter().flat_map(|(format, bytes)| format.unpack(bytes));
    let wanted: Vec<f32> = unpacked.map(|value| bf16::from_f32(value).to_f32()).collect();
    let mut target = gpu.upload(&vec![bf16::NAN; wanted.len()])?;
    let parts = parts.iter().map(|(format, bytes)| Stored { format: *format, bytes }).collect();
    upload(&gpu.kernels, vec![Upload::Numbers { target: target.as_view_mut(), parts }], &|_| {})?;
    let error = relative_error(&widened(&gpu.download(&target)?), &wanted);
    Ok(Outcome { op: "unpack_blocks", case: format!("{case}, {} values", wanted.len()), error, limit: 0.0 })
}
