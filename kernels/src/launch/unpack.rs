//! Launches that unpack stored weights.

use super::{Entry, LaunchConfig, config, count, not_empty, refused};
use crate::{error::KernelError, format::WeightFormat};

const THREADS: usize = 256;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_a_thread_and_whole_blocks_only() {
        let launch = unpack_blocks(WeightFormat::Q8_0, 288).unwrap();
        assert_eq!((launch.entry, launch.grid, launch.threads), (Entry::UnpackQ8_0, [2, 1, 1], 256));
        let refusal = unpack_blocks(WeightFormat::Q4K, 288).unwrap_err().to_string();
        assert_eq!(refusal, "unpack_blocks: 288 values are not whole blocks of q4_k");
    }
}
