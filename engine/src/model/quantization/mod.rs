//! Projections that a checkpoint holds quantised: how they are found in files and read. How they are described is
//! [`stoker_fit::model`]'s.

mod found;
mod int4_groups;
mod scales;
#[cfg(test)]
pub(super) mod tests;
mod weight;

use stoker_fit::model::quantization::{Codes, Scheme};
use stoker_kernels::code_words::WORD_BYTES;

pub(super) use found::Place;
pub(crate) use int4_groups::Int4Groups;
pub(crate) use weight::QuantisedWeight;

/// Inputs of a block of Q8_0 and Q4_0.
const BLOCK: usize = 32;

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<WORD_BYTES>().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

/// The code at place `idx` of a word.
fn field(word: u32, idx: usize, bits: usize) -> i32 {
    (word >> (idx * bits) & ((1 << bits) - 1)) as i32
}

/// What was taken from words of zero points before they were stored. GPTQ's library adds it to whole words, as what it took may have been
/// borrowed from the next place.
fn taken_from_words(scheme: &Scheme) -> u32 {
    match scheme.codes {
        Codes::Gptq { bits, zeros_less_one: true } => bits.ones(),
        _ => 0,
    }
}
