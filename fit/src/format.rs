//! Number formats of stored weights: plain numbers, and ggml's blocks of small integers with their scales. The reference for
//! whoever unpacks them; sums nothing.
//!
//! ```text
//! Q8_0   d f16 | 32 x i8                                                  x = d q
//! Q4_0   d f16 | 32 x 4 bit: low halves first, then high                  x = d (q - 8)
//! Q4_1   d, m f16 | 32 x 4 bit                                            x = d q + m
//! Q5_0   d f16 | 32 x 1 bit: the fifth bits | 32 x 4 bit                  x = d (q - 16)
//! Q5_1   d, m f16 | 32 x 1 bit: the fifth bits | 32 x 4 bit               x = d q + m
//! Q4_K   d, m f16 | 8 x (scale, min) 6 bit | 256 x 4 bit                  x = (d scale) q - (m min)
//! Q5_K   as Q4_K, and 256 x 1 bit: the fifth bits                         x = (d scale) q - (m min)
//! Q6_K   256 x 4 bit | 256 x 2 bit | 16 x i8 scales | d f16               x = (d scale) (q - 32)
//! ```
//!
//! A plain number is a block of one.

use std::collections::BTreeMap;

use half::{bf16, f16};

/// How weights are stored, little-endian.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum WeightFormat {
    /// 4 bytes.
    F32,
    /// 2 bytes, more digits than bf16.
    F16,
    /// 2 bytes, the upper half of an f32.
    Bf16,
    /// 8 bits, 32 numbers a scale.
    Q8_0,
    /// 4 bits, 32 numbers a scale.
    Q4_0,
    /// 4 bits, 32 numbers a scale and a minimum.
    Q4_1,
    /// 5 bits, 32 numbers a scale.
    Q5_0,
    /// 5 bits, 32 numbers a scale and a minimum.
    Q5_1,
    /// 4 bits, 256 numbers a block.
    Q4K,
    /// 5 bits, 256 numbers a block.
    Q5K,
    /// 6 bits, 256 numbers a block.
    Q6K,
}

/// Bytes of weights by the name of the format that they are held in.
pub type BytesByFormat = BTreeMap<&'static str, u64>;

/// Numbers of a block of the formats whose name ends in K.
const K: usize = 256;
/// Numbers that share a scale in them, Q6_K aside.
const GROUP: usize = 32;

impl WeightFormat {
    /// All.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// The format of that name, in any case.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name))
    }

    /// Its name, lower case; that of blocks is in files' names.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }

    /// Whether a number stands alone.
    pub fn is_plain(self) -> bool {
        self.block_values() == 1
    }

    /// Numbers of a block.
    pub fn block_values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => GROUP,
            Self::Q4K | Self::Q5K | Self::Q6K => K,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 2 + GROUP,
            Self::Q4_0 => 2 + GROUP / 2,
            Self::Q4_1 => 4 + GROUP / 2,
            Self::Q5_0 => 2 + GROUP / 8 + GROUP / 2,
            Self::Q5_1 => 4 + GROUP / 8 + GROUP / 2,
            Self::Q4K => 4 + 12 + K / 2,
            Self::Q5K => 4 + 12 + K / 8 + K / 2,
            Self::Q6K => K / 2 + K / 4 + K / 16 + 2,
        }
    }

    /// Bytes of so many numbers, which are whole blocks.
    pub fn bytes_of(self, n_values: usize) -> usize {
        n_values / self.block_values() * self.block_bytes()
    }

    /// Numbers in so many bytes, which are whole blocks.
    pub fn values_in(self, n_bytes: usize) -> usize {
        n_bytes / self.block_bytes() * self.block_values()
    }

    /// The numbers of whole blocks.
    pub fn unpack(self, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; self.values_in(bytes.len())];
        for (block, out) in bytes.chunks_exact(self.block_bytes()).zip(values.chunks_exact_mut(self.block_values())) {
            match self {
                Self::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
                Self::F16 => out[0] = f16_at(block, 0),
                Self::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
                Self::Q8_0 => q8_0(block, out),
                Self::Q4_0 => four_bits(&block[2..], out, |q| d(block) * f32::from(q as i8 - 8)),
                Self::Q4_1 => four_bits(&block[4..], out, |q| d(block) * f32::from(q) + f16_at(block, 2)),
                Self::Q5_0 => five_bits(&block[2..], out, |q| d(block) * f32::from(q as i8 - 16)),
                Self::Q5_1 => five_bits(&block[4..], out, |q| d(block) * f32::from(q) + f16_at(block, 2)),
                Self::Q4K => q4_k(block, out),
                Self::Q5K => q5_k(block, out),
                Self::Q6K => q6_k(block, out),
            }
        }
        values
    }
}

/// Numbers as blocks of Q8_0: each the nearest multiple of a 127th of the block's largest.
pub fn to_q8_0(values: &[f32]) -> Vec<u8> {
    let mut blocks = Vec::with_capacity(WeightFormat::Q8_0.bytes_of(values.len()));
    for values in values.as_chunks::<GROUP>().0 {
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        let d = f16::from_f32(largest / 127.0);
        let inverse = if d == f16::ZERO { 0.0 } else { 1.0 / d.to_f32() };
        blocks.extend(d.to_le_bytes());
        blocks.extend(values.map(|value| (value * inverse).round() as i8 as u8));
    }
    blocks
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The scale that most formats begin with.
fn d(block: &[u8]) -> f32 {
    f16_at(block, 0)
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = d(block);
    for (out, q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(*q as i8);
    }
}

/// The numbers of 16 bytes: those of the low halves, then those of the high ones.
fn four_bits(quants: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(GROUP / 2);
    for ((q, low), high) in quants.iter().zip(low).zip(high) {
        *low = value(q & 15);
        *high = value(q >> 4);
    }
}

/// The same behind 32 fifth bits, the first number's lowest.
fn five_bits(packed: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (fifth_bits, quants) = packed.split_at(GROUP / 8);
    for (i, out) in out.iter_mut().enumerate() {
        let four = (quants[i % (GROUP / 2)] >> (4 * (i / (GROUP / 2)))) & 15;
        let fifth = (fifth_bits[i / 8] >> (i % 8)) & 1;
        *out = value(four | (fifth << 4));
    }
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (scales, quants) = block[4..].split_at(12);
    for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let (d, min) = scale_and_min(block, scales, group);
        for (out, q) in out.iter_mut().zip(nibbles(quants, group)) {
            *out = d * f32::from(q) - min;
        }
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (scales, rest) = block[4..].split_at(12);
    let (fifth_bits, quants) = rest.split_at(K / 8);
    for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let (d, min) = scale_and_min(block, scales, group);
        for ((out, q), bits) in out.iter_mut().zip(nibbles(quants, group)).zip(fifth_bits) {
            let fifth = (bits >> group) & 1;
            *out = d * f32::from(q | (fifth << 4)) - min;
        }
    }
}

/// Two groups share 32 bytes: the first has the low halves.
fn nibbles(quants: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let shift = 4 * (group % 2);
    quants[GROUP * (group / 2)..][..GROUP].iter().map(move |q| (q >> shift) & 15)
}

/// Scale and minimum of a group, six bits each: those of the first four groups whole in bytes 0-3 and 4-7, those of
/// the others as their low four bits in bytes 8-11 and their high two on top of bytes 0-7.
fn scale_and_min(block: &[u8], packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, min) = match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => (
            (packed[group + 4] & 15) | ((packed[group - 4] >> 2) & 48),
            (packed[group + 4] >> 4) | ((packed[group] >> 2) & 48),
        ),
    };
    (f16_at(block, 0) * f32::from(scale), f16_at(block, 2) * f32::from(min))
}

/// Each half of a block: 128 values in four runs of 32. Low bits: runs 0 and 1 in the low halves of 64 bytes, 2 and 3 in
/// the high ones. High bits: two of each run in 32 bytes.
fn q6_k(block: &[u8], out: &mut [f32]) {
    const RUN: usize = 32;
    let (low, rest) = block.split_at(K / 2);
    let (high, rest) = rest.split_at(K / 4);
    let d = f16_at(rest, K / 16);
    for (run, out) in out.chunks_exact_mut(RUN).enumerate() {
        let (half, run_of_half) = (run / 4, run % 4);
        let low = &low[64 * half + RUN * (run_of_half % 2)..][..RUN];
        let high = &high[RUN * half..][..RUN];
        for (i, out) in out.iter_mut().enumerate() {
            let low = (low[i] >> (4 * (run_of_half / 2))) & 15;
            let high = (high[i] >> (2 * run_of_half)) & 3;
            let scale = rest[2 * run + i / 16] as i8;
            *out = d * f32::from(scale) * f32::from((low | (high << 4)) as i8 - 32);
        }
    }
}
