//! Launches that unpack stored weights.

use super::{Entry, LaunchConfig, config, count, not_empty, refused};
use crate::{error::KernelError, format::WeightFormat, int4::Int4Layout, quantise::E4M3_WHOLE};

const THREADS: usize = 256;
/// Chunks of a tile that a block widens.
const CHUNKS: usize = 32;

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
    fn one_number_a_thread_and_whole_blocks_only() {
        let launch = unpack_blocks(WeightFormat::Q8_0, 288).unwrap();
        assert_eq!((launch.entry, launch.grid, launch.threads), (Entry::UnpackQ8_0, [2, 1, 1], 256));
        let refusal = unpack_blocks(WeightFormat::Q4K, 288).unwrap_err().to_string();
        assert_eq!(refusal, "unpack_blocks: 288 values are not whole blocks of q4_k");
    }
}
