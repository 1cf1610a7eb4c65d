//! Weights of four bits in groups along the depth: how they lie on the device, packing them so, buffers of them. The layout is drawn
//! in `csrc/int4.cuh`. Multiplies nothing.
//!
//! ```text
//! weight = scale (code - zero)       code, zero: 0 to 15; a scale and a zero point for each output and group
//! ```

use std::{array, ops::Range};

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use half::{bf16, f16};
use stoker_fit::gpu::{CHUNK, Int4Size};
pub use stoker_fit::gpu::{GroupSize, TILE_ROWS};

use crate::{Device, KernelError, check_len, noise::Noise, sys::Launch};

/// How scales are stored, which both hold as they were published.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ScaleFormat {
    /// As f16.
    F16,
    /// As bf16.
    Bf16,
}

/// A matrix of that format.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Int4Layout {
    /// Outputs.
    pub n: usize,
    /// Depth.
    pub k: usize,
    /// Who shares a scale.
    pub group: GroupSize,
    /// How it is stored.
    pub scales: ScaleFormat,
}

/// A matrix on its way to the device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PackedInt4 {
    codes: Vec<u32>,
    groups: Vec<u32>,
}

/// A matrix on the device.
#[derive(Debug)]
pub struct Int4Matrix {
    layout: Int4Layout,
    codes: CudaSlice<u32>,
    groups: CudaSlice<u32>,
}

/// The same, to be multiplied with.
#[derive(Debug)]
pub struct Int4View<'a> {
    /// What it is.
    pub layout: Int4Layout,
    /// [`Int4Layout::n_code_words`].
    pub codes: CudaView<'a, u32>,
    /// [`Int4Layout::n_group_words`].
    pub groups: CudaView<'a, u32>,
}

impl ScaleFormat {
    /// Both.
    pub const ALL: [Self; 2] = [Self::F16, Self::Bf16];

    /// Whether it holds all of them as they are.
    pub fn holds(self, scales: &[f32]) -> bool {
        scales.iter().all(|scale| self.value(self.bits(*scale)) == *scale)
    }

    /// A scale as it is stored.
    pub fn bits(self, scale: f32) -> u16 {
        match self {
            Self::F16 => f16::from_f32(scale).to_bits(),
            Self::Bf16 => bf16::from_f32(scale).to_bits(),
        }
    }

    fn value(self, bits: u16) -> f32 {
        match self {
            Self::F16 => f16::from_bits(bits).to_f32(),
            Self::Bf16 => bf16::from_bits(bits).to_f32(),
        }
    }
}

impl Int4Layout {
    fn size(&self) -> Int4Size {
        Int4Size { n: self.n, k: self.k, group: self.group }
    }

    /// Words of all codes.
    pub fn n_code_words(&self) -> usize {
        self.size().n_code_words()
    }

    /// Words of all scales and zero points.
    pub fn n_group_words(&self) -> usize {
        self.size().n_group_words()
    }

    /// Bytes on the device.
    pub fn n_bytes(&self) -> usize {
        self.size().n_bytes()
    }

    /// How groups are stored.
    pub(crate) fn pass<'a>(&self, launch: Launch<'a>) -> Launch<'a> {
        launch.int(self.group.n_units()).int(usize::from(self.scales == ScaleFormat::F16))
    }

    pub(crate) fn n_tiles(&self) -> usize {
        self.size().n_tiles()
    }

    pub(crate) fn n_chunks(&self) -> usize {
        self.size().n_chunks()
    }

    /// Groups of an output, with those behind its end that fill a stage.
    pub fn n_groups(&self) -> usize {
        self.size().n_groups()
    }

    /// Packs a matrix on the host: `codes` output by output, and for each of these and each group behind each other scale and zero point.
    /// What a GPU makes of stored words (`csrc/repack_int4.cu`) is this.
    pub fn pack(&self, codes: &[u8], groups: &[(f32, u8)]) -> PackedInt4 {
        assert_eq!(codes.len(), self.n * self.k, "every output and input");
        let mut words = Vec::with_capacity(self.n_code_words());
        codes.chunks(TILE_ROWS * self.k).for_each(|tile| self.pack_codes(tile, &mut words));
        PackedInt4 { codes: words, groups: self.pack_groups(groups) }
    }

    /// Scales and zero points alone, of all outputs.
    fn pack_groups(&self, groups: &[(f32, u8)]) -> Vec<u32> {
        let n_groups = self.k.div_ceil(self.group.values());
        assert_eq!(groups.len(), self.n * n_groups, "every output and group");
        let word = |(scale, zero): (f32, u8)| group_word(self.scales.bits(scale), zero);
        let mut words = vec![0; self.n_group_words()];
        self.write_groups(0..self.n_tiles(), &mut words, |row| move |group| word(groups[row * n_groups + group]));
        words
    }

    /// Words of groups that a tile of outputs has.
    pub fn n_tile_group_words(&self) -> usize {
        self.n_groups() * TILE_ROWS
    }

    /// Writes the words of the groups of some tiles; `of_row` gives of a row what makes the word of each of its groups.
    pub fn write_groups<F: Fn(usize) -> u32>(
        &self,
        tiles: Range<usize>,
        words: &mut [u32],
        of_row: impl Fn(usize) -> F,
    ) {
        assert_eq!(words.len(), tiles.len() * self.n_tile_group_words(), "whole tiles");
        let n_groups = self.k.div_ceil(self.group.values());
        for (tile, words) in tiles.zip(words.chunks_exact_mut(self.n_tile_group_words())) {
            // Of rows g and g + 8 by turns.
            let rows: [Option<F>; TILE_ROWS] = array::from_fn(|at| {
                let row = tile * TILE_ROWS + at / 2 + at % 2 * (TILE_ROWS / 2);
                (row < self.n).then(|| of_row(row))
            });
            for (group, words) in words.chunks_exact_mut(TILE_ROWS).enumerate() {
                let word = |row: &Option<F>| row.as_ref().filter(|_| group < n_groups).map_or(0, |row| row(group));
                words.iter_mut().zip(&rows).for_each(|(out, row)| *out = word(row));
            }
        }
    }

    /// A tile's words: of lane 4 g + t in step s, bits from 0 on, the codes of rows g, g + 8, g and g + 8 at the inputs 2t, 2t, 2t + 8 and
    /// 2t + 8 of 16, then those at the inputs behind them.
    ///
    /// ```text
    /// x: a byte an input of 0..8: row g | row g + 8 << 4        word t: x[2t] y[2t] x[2t+1] y[2t+1]
    /// y: the same of 8..16
    /// ```
    fn pack_codes(&self, codes: &[u8], out: &mut Vec<u32>) {
        let width = self.n_chunks() * CHUNK;
        let filled: Vec<u8>;
        let rows = match codes.len() == TILE_ROWS * width {
            true => codes,
            false => {
                filled = self.filled(codes, width);
                &filled
            }
        };
        let first = out.len();
        out.resize(first + self.n_chunks() * 128, 0);
        for g in 0..TILE_ROWS / 2 {
            let [low, high] = [g, g + 8].map(|row| rows[row * width..][..width].as_chunks::<8>().0);
            let pairs = low.as_chunks::<2>().0.iter().zip(high.as_chunks::<2>().0);
            for (at, (low, high)) in pairs.enumerate() {
                let [x, y] = [0, 1].map(|half| u64::from_le_bytes(low[half]) | u64::from_le_bytes(high[half]) << 4);
                let (chunk, step) = (at / 4, at % 4);
                for t in 0..4 {
                    let [x, y] = [x, y].map(|bytes| (bytes >> (16 * t)) as u32);
                    let word = (x & 0xff) | (y & 0xff) << 8 | (x & 0xff00) << 8 | (y & 0xff00) << 16;
                    out[first + chunk * 128 + (g * 4 + t) * 4 + step] = word;
                }
            }
        }
    }

    /// A tile whose rows or inputs do not fill it, with zeros behind both.
    fn filled(&self, codes: &[u8], width: usize) -> Vec<u8> {
        let mut rows = vec![0; TILE_ROWS * width];
        let targets = rows.chunks_exact_mut(width).zip(codes.chunks_exact(self.k));
        targets.for_each(|(row, codes)| row[..self.k].copy_from_slice(codes));
        rows
    }

    /// The weights of what was packed, output by output, as the formula says: for tests and references.
    pub fn unpack(&self, packed: &PackedInt4) -> Vec<f32> {
        (0..self.n)
            .flat_map(|row| (0..self.k).map(move |at| (row, at)))
            .map(|(row, at)| self.weight(packed, row, at))
            .collect()
    }

    fn weight(&self, packed: &PackedInt4, row: usize, at: usize) -> f32 {
        let (tile, in_tile, in_chunk) = (row / TILE_ROWS, row % TILE_ROWS, at % CHUNK);
        let (step, in_step) = (in_chunk / 16, in_chunk % 16);
        let lane = in_tile % 8 * 4 + in_step % 8 / 2;
        let word = packed.codes[((tile * self.n_chunks() + at / CHUNK) * 32 + lane) * 4 + step];
        let place = in_tile / 8 + in_step / 8 * 2;
        let code = word >> (4 * place + 16 * (in_step % 2)) & 15;
        let group = at / self.group.values();
        let word = packed.groups[((tile * self.n_groups() + group) * 8 + in_tile % 8) * 2 + in_tile / 8];
        let zero = bf16::from_bits((word >> 16) as u16).to_f32() - 128.0;
        self.scales.value(word as u16) * (code as f32 - zero)
    }
}

/// Scale and zero point in a word: the second one as 128 more in bf16, whose digits behind 128 are units.
pub fn group_word(scale_bits: u16, zero: u8) -> u32 {
    const BITS_OF_128: u32 = 0x4300;
    u32::from(scale_bits) | (BITS_OF_128 + u32::from(zero)) << 16
}

impl PackedInt4 {
    /// Words of codes.
    pub fn codes(&self) -> &[u32] {
        &self.codes
    }

    /// Words of scales and zero points.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }
}

impl Int4Matrix {
    /// With these weights.
    pub fn holding(device: &Device, layout: Int4Layout, packed: &PackedInt4) -> Result<Self, KernelError> {
        const OP: &str = "int4";
        check_len(OP, "codes", packed.codes.len(), layout.n_code_words())?;
        check_len(OP, "groups", packed.groups.len(), layout.n_group_words())?;
        Ok(Self { layout, codes: device.holding(&packed.codes)?, groups: device.holding(&packed.groups)? })
    }

    /// Codes of zeros, and groups of nothing yet: both are uploaded to [`Self::words_mut`].
    pub fn awaited(device: &Device, layout: Int4Layout) -> Result<Self, KernelError> {
        let codes = device.own_zeros(layout.n_code_words())?;
        Ok(Self { layout, codes, groups: device.own_unset(layout.n_group_words())? })
    }

    /// Where its codes lie, and its groups.
    pub fn words_mut(&mut self) -> [CudaViewMut<'_, u32>; 2] {
        [self.codes.as_view_mut(), self.groups.as_view_mut()]
    }

    /// Random ones, whose deviation is about `scale`: a piece on the host, again and again.
    pub fn random(device: &Device, layout: Int4Layout, noise: &mut Noise, scale: f32) -> Result<Self, KernelError> {
        // Codes are evenly spread, zero points near the middle: deviation about 4.7 scales.
        let scales = [0.9, 1.0, 1.1].map(|factor| layout.scales.bits(factor * scale / 4.7));
        let group = |noise: &mut Noise| {
            let zero = 6 + noise.below(4) as u8;
            group_word(scales[noise.below(scales.len())], zero)
        };
        let codes = repeated(device, layout.n_code_words(), || noise.bits() as u32)?;
        Ok(Self { layout, codes, groups: repeated(device, layout.n_group_words(), || group(noise))? })
    }

    /// What it is.
    pub fn layout(&self) -> Int4Layout {
        self.layout
    }

    /// All of it.
    pub fn view(&self) -> Int4View<'_> {
        Int4View { layout: self.layout, codes: self.codes.as_view(), groups: self.groups.as_view() }
    }
}

/// A piece of words, again and again; no tile divides it.
fn repeated(device: &Device, n: usize, mut word: impl FnMut() -> u32) -> Result<CudaSlice<u32>, KernelError> {
    const PIECE: usize = (1 << 18) - 24;
    let failed = KernelError::driver("fill with random codes");
    let piece: Vec<u32> = (0..PIECE.min(n)).map(|_| word()).collect();
    let (piece, mut all) = (device.holding(&piece)?, device.zeros::<u32>(n)?);
    for begin in (0..n).step_by(PIECE) {
        let len = PIECE.min(n - begin);
        let mut target = all.slice_mut(begin..begin + len);
        device.stream().memcpy_dtod(&piece.slice(..len), &mut target).map_err(&failed)?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random codes and groups of a layout.
    fn drawn(layout: Int4Layout, seed: u64) -> (Vec<u8>, Vec<(f32, u8)>) {
        let mut noise = Noise(seed);
        let codes = (0..layout.n * layout.k).map(|_| noise.below(16) as u8).collect();
        let n_groups = layout.n * layout.k.div_ceil(layout.group.values());
        let scale = |noise: &mut Noise| layout.scales.value(layout.scales.bits(noise.normal() / 64.0));
        (codes, (0..n_groups).map(|_| (scale(&mut noise), noise.below(16) as u8)).collect())
    }

    #[test]
    fn what_is_packed_is_unpacked_as_the_formula_says() {
        for (seed, (n, k)) in [(16, 128), (1, 32), (17, 192), (48, 4096), (33, 1064), (100, 8)].into_iter().enumerate()
        {
            for group in [GroupSize::G32, GroupSize::G128] {
                for scales in [ScaleFormat::F16, ScaleFormat::Bf16] {
                    let layout = Int4Layout { n, k, group, scales };
                    let (codes, groups) = drawn(layout, seed as u64);
                    let packed = layout.pack(&codes, &groups);
                    assert_eq!(
                        (packed.codes.len(), packed.groups.len()),
                        (layout.n_code_words(), layout.n_group_words())
                    );
                    let n_groups = k.div_ceil(group.values());
                    let weight = |(at, code): (usize, &u8)| {
                        let (scale, zero) = groups[at / k * n_groups + at % k / group.values()];
                        f64::from(scale) * (f64::from(*code) - f64::from(zero))
                    };
                    let wanted: Vec<f64> = codes.iter().enumerate().map(weight).collect();
                    let found: Vec<f64> = layout.unpack(&packed).into_iter().map(f64::from).collect();
                    assert_eq!(found, wanted, "{layout:?}");
                }
            }
        }
    }

    #[test]
    fn groups_that_do_not_fill_thirty_twos_are_not_stored() {
        let of = |size| GroupSize::of(size, 4096);
        assert_eq!([32, 64, 96].map(of), [Some(GroupSize::G32); 3]);
        assert_eq!([128, 256, 4096, 5000].map(of), [Some(GroupSize::G128); 4]);
        assert_eq!([16, 48].map(of), [None; 2]);
    }

    #[test]
    fn scales_keep_the_format_that_holds_all_of_them() {
        let of = |scales: &[f32]| ScaleFormat::ALL.into_iter().find(|format| format.holds(scales));
        assert_eq!(of(&[0.5, 2f32.powi(-24)]), Some(ScaleFormat::F16));
        assert_eq!(of(&[0.5, 2f32.powi(-30)]), Some(ScaleFormat::Bf16));
        assert_eq!(of(&[1.0 + 2f32.powi(-9), 2f32.powi(-30)]), None);
    }
}
