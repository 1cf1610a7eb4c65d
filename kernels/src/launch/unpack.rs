//! Launches that unpack stored weights.

use stoker_fit::format::WeightFormat;

use super::{Entry, LaunchConfig, config, count, not_empty, refused};
use crate::{
    code_words::{CodeOrder, FOURS},
    error::KernelError,
    int4::Int4Layout,
    quantise::E4M3_WHOLE,
};

const THREADS: usize = 256;
/// Chunks of a tile that a block widens.
const CHUNKS: usize = 32;
/// Inputs that a thread repacks.
const REPACKED_INPUTS: usize = 16;

/// Lines of words of four bits that are repacked together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CodeLines {
    /// How they lie.
    pub order: CodeOrder,
    /// Outputs and inputs of the share that they are of.
    pub share: [usize; 2],
    /// Of the share's lines.
    pub first: usize,
    /// How many.
    pub n_lines: usize,
}

/// Blocks of `n_values` numbers to bf16, one number a thread.
pub fn unpack_blocks(format: WeightFormat, n_values: usize) -> Result<LaunchConfig, KernelError> {
    let entry = match format {
        WeightFormat::F32 => Entry::UnpackF32,
        WeightFormat::F16 => Entry::UnpackF16,
        WeightFormat::Bf16 => return Err(refused("unpack_blocks", "bf16 is not packed".to_owned())),
        WeightFormat::Q8_0 => Entry::UnpackQ8_0,
        WeightFormat::Q4_0 => Entry::UnpackQ4_0,
        WeightFormat::Q4_1 => Entry::UnpackQ4_1,
        WeightFormat::Q5_0 => Entry::UnpackQ5_0,
        WeightFormat::Q5_1 => Entry::UnpackQ5_1,
        WeightFormat::Q4K => Entry::UnpackQ4K,
        WeightFormat::Q5K => Entry::UnpackQ5K,
        WeightFormat::Q6K => Entry::UnpackQ6K,
    };
    not_empty("unpack_blocks", n_values)?;
    if !n_values.is_multiple_of(format.block_values()) {
        return Err(refused("unpack_blocks", format!("{n_values} values are not whole blocks of {}", format.name())));
    }
    Ok(config(entry, [count(n_values.div_ceil(THREADS)), 1, 1], count(THREADS)))
}

/// Codes in words as they are stored to words of tiles: 16 inputs of an output a thread. Of the first word or line so many codes are skipped.
pub fn repack_int4(lines: CodeLines, n_skipped: usize) -> Result<LaunchConfig, KernelError> {
    let CodeLines { order, share: [n_outputs, n_inputs], first, n_lines } = lines;
    not_empty("repack_int4", n_lines.min(n_outputs).min(n_inputs))?;
    let (entry, n_outputs, inputs) = match order {
        CodeOrder::Packed => (Entry::RepackPacked, n_lines, 0..n_inputs),
        CodeOrder::Awq => (Entry::RepackAwq, n_outputs, first..first + n_lines),
        CodeOrder::Gptq => {
            let end = (FOURS * (first + n_lines) - n_skipped).min(n_inputs);
            (Entry::RepackGptq, n_outputs, (FOURS * first).saturating_sub(n_skipped)..end)
        }
    };
    let n_steps = inputs.end.div_ceil(REPACKED_INPUTS) - inputs.start / REPACKED_INPUTS;
    Ok(config(entry, [count((n_outputs * n_steps).div_ceil(THREADS)), 1, 1], count(THREADS)))
}

/// Weights of four bits to e4m3; also how many chunks a block takes.
pub fn widen_int4(layout: Int4Layout) -> Result<(LaunchConfig, usize), KernelError> {
    const OP: &str = "widen_int4";
    not_empty(OP, layout.n.min(layout.k))?;
    if !layout.k.is_multiple_of(E4M3_WHOLE) {
        return Err(refused(OP, format!("depth {} is not a multiple of {E4M3_WHOLE}", layout.k)));
    }
    if layout.n_tiles() > 65535 {
        return Err(refused(OP, format!("{} outputs are more than 1048560", layout.n)));
    }
    let grid = [count(layout.n_chunks().div_ceil(CHUNKS)), count(layout.n_tiles()), 1];
    Ok((config(Entry::WidenInt4, grid, count(THREADS)), CHUNKS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::int4::{GroupSize, ScaleFormat};

    #[test]
    fn blocks_share_the_depth_of_a_tile_of_outputs() {
        let launch = |n, k| widen_int4(Int4Layout { n, k, group: GroupSize::G32, scales: ScaleFormat::F16 });
        assert_eq!(launch(40, 14_336).unwrap().0.grid, [7, 3, 1]);
        assert_eq!(launch(16, 2064).unwrap().0.grid, [2, 1, 1]);
        let refusal = |n, k| launch(n, k).unwrap_err().to_string();
        assert_eq!(refusal(16, 40), "widen_int4: depth 40 is not a multiple of 16");
        assert_eq!(refusal(1 << 21, 16), "widen_int4: 2097152 outputs are more than 1048560");
    }

    #[test]
    fn a_thread_repacks_what_lines_hold_of_sixteen_inputs_of_an_output() {
        let launch = |order, first, n_lines, n_skipped| {
            let lines = CodeLines { order, share: [300, 40], first, n_lines };
            let launch = repack_int4(lines, n_skipped).unwrap();
            (launch.entry, launch.grid[0] as usize * THREADS)
        };
        let blocks = |n: usize| n.next_multiple_of(THREADS);
        assert_eq!(launch(CodeOrder::Packed, 7, 100, 4), (Entry::RepackPacked, blocks(100 * 3)));
        // Inputs 30 to 33; 4 to 20; the last line has four of the share.
        assert_eq!(launch(CodeOrder::Awq, 30, 3, 4), (Entry::RepackAwq, blocks(300 * 2)));
        assert_eq!(launch(CodeOrder::Gptq, 1, 2, 4), (Entry::RepackGptq, blocks(300 * 2)));
        assert_eq!(launch(CodeOrder::Gptq, 5, 1, 4), (Entry::RepackGptq, blocks(300)));
        assert!(repack_int4(CodeLines { order: CodeOrder::Awq, share: [0, 40], first: 0, n_lines: 1 }, 0).is_err());
    }

    #[test]
    fn one_number_a_thread_and_whole_blocks_only() {
        let launch = unpack_blocks(WeightFormat::Q8_0, 288).unwrap();
        assert_eq!((launch.entry, launch.grid, launch.threads), (Entry::UnpackQ8_0, [2, 1, 1], 256));
        let refusal = unpack_blocks(WeightFormat::Q4K, 288).unwrap_err().to_string();
        assert_eq!(refusal, "unpack_blocks: 288 values are not whole blocks of q4_k");
    }
}
