//! One layer's keys and values on the device, in either number format.

use cudarc::driver::CudaSlice;
use half::bf16;
pub use stoker_fit::gpu::KvFormat;

use crate::{
    Device, KernelError, check_len, check_room, codes,
    launch::{BLOCK_SIZE, Heads},
    sys::Launch,
};

/// Keys, and values of the same shape: blocks x KV heads x 16 x dim.
#[derive(Debug)]
pub enum LayerCache {
    /// Numbers as they are.
    Bf16 {
        /// Keys.
        k: CudaSlice<bf16>,
        /// Values.
        v: CudaSlice<bf16>,
    },
    /// Codes; a number is its code's times its head's scale.
    E4m3 {
        /// Keys.
        k: CudaSlice<u8>,
        /// Values.
        v: CudaSlice<u8>,
        /// Of each KV head's keys, then of each one's values.
        scales: CudaSlice<f32>,
    },
}

impl LayerCache {
    /// `n_values` keys and as many values, all zero, of scales of one.
    pub fn zeros(device: &Device, format: KvFormat, n_values: usize, heads: Heads) -> Result<Self, KernelError> {
        Ok(match format {
            KvFormat::Bf16 => Self::Bf16 { k: device.own_zeros(n_values)?, v: device.own_zeros(n_values)? },
            KvFormat::E4m3 => {
                let scales = device.holding(&vec![1.0; 2 * heads.n_kv])?;
                Self::E4m3 { k: device.own_zeros(n_values)?, v: device.own_zeros(n_values)?, scales }
            }
        })
    }

    /// What it holds.
    pub fn format(&self) -> KvFormat {
        match self {
            Self::Bf16 { .. } => KvFormat::Bf16,
            Self::E4m3 { .. } => KvFormat::E4m3,
        }
    }

    /// The largest of what is stored in the first `n_values` keys, and values, of each head, without its scale: of each head's keys, then of
    /// each one's values. Empty of a cache without scales. Waits for the device.
    pub fn largest_stored(&self, device: &Device, n_values: usize, heads: Heads) -> Result<Vec<f32>, KernelError> {
        let Self::E4m3 { k, v, .. } = self else { return Ok(vec![]) };
        let failed = KernelError::driver("copy codes from the device");
        let mut largest = vec![];
        for codes in [k, v] {
            let codes = device.stream().clone_dtoh(&codes.slice(..n_values)).map_err(&failed)?;
            device.synchronize()?;
            largest.extend(largest_codes(&codes, heads).into_iter().map(codes::e4m3));
        }
        Ok(largest)
    }

    /// Other scales from now on, in the order of [`Self::largest_stored`]. What is stored is what it was, times other scales.
    pub fn set_scales(&mut self, device: &Device, new: &[f32]) -> Result<(), KernelError> {
        match self {
            Self::Bf16 { .. } => Ok(()),
            Self::E4m3 { scales, .. } => {
                check_len("set the cache's scales", "the scales", new.len(), scales.len())?;
                device.stream().memcpy_htod(new, scales).map_err(KernelError::driver("copy scales to the device"))
            }
        }
    }

    /// Keys, and values.
    fn lens(&self) -> (usize, usize) {
        match self {
            Self::Bf16 { k, v } => (k.len(), v.len()),
            Self::E4m3 { k, v, .. } => (k.len(), v.len()),
        }
    }

    /// Refuses what has no room for a block, or no scale for a head.
    pub(crate) fn check(&self, op: &'static str, heads: Heads) -> Result<(), KernelError> {
        let (n_keys, n_values) = self.lens();
        check_room(op, "the cache's keys", n_keys, heads.block_values())?;
        check_len(op, "the cache's values", n_values, n_keys)?;
        match self {
            Self::Bf16 { .. } => Ok(()),
            Self::E4m3 { scales, .. } => check_len(op, "the cache's scales", scales.len(), 2 * heads.n_kv),
        }
    }

    /// Both as a kernel's next arguments that it reads, then the scales.
    pub(crate) fn read_by<'a>(&self, launch: Launch<'a>) -> Launch<'a> {
        match self {
            Self::Bf16 { k, v } => launch.read(&k.as_view()).read(&v.as_view()).read_optional::<f32>(None),
            Self::E4m3 { k, v, scales } => launch.read(&k.as_view()).read(&v.as_view()).read(&scales.as_view()),
        }
    }

    /// Both as a kernel's next arguments that it writes, then the scales.
    pub(crate) fn written_by<'a>(&mut self, launch: Launch<'a>) -> Launch<'a> {
        match self {
            Self::Bf16 { k, v } => {
                launch.write(&mut k.as_view_mut()).write(&mut v.as_view_mut()).read_optional::<f32>(None)
            }
            Self::E4m3 { k, v, scales } => {
                launch.write(&mut k.as_view_mut()).write(&mut v.as_view_mut()).read(&scales.as_view())
            }
        }
    }
}

/// The code of each head's largest number, signs aside; what is not a number does not count.
fn largest_codes(codes: &[u8], heads: Heads) -> Vec<u8> {
    const SIGN: u8 = 0x80;
    const NO_NUMBER: u8 = 0x7f;
    let mut largest = vec![0; heads.n_kv];
    for (head, codes) in codes.chunks(BLOCK_SIZE * heads.dim).enumerate() {
        // Larger numbers have larger codes.
        let here = codes.iter().map(|code| code & !SIGN).filter(|code| *code != NO_NUMBER).max().unwrap_or(0);
        let all = &mut largest[head % heads.n_kv];
        *all = here.max(*all);
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_a_head_is_found_in_all_its_blocks_without_signs_and_what_is_no_number() {
        let heads = Heads { n_q: 2, n_kv: 2, dim: 16 };
        let mut codes = vec![0; 3 * heads.block_values()];
        codes[5] = 0x7f;
        codes[7] = 0x12;
        codes[heads.block_values() + 3] = 0x80 | 0x38;
        codes[2 * heads.block_values() + BLOCK_SIZE * heads.dim] = 0xff;
        codes[3 * heads.block_values() - 1] = 0x7e;
        assert_eq!(largest_codes(&codes, heads).into_iter().map(crate::codes::e4m3).collect::<Vec<_>>(), [1.0, 448.0]);
    }
}
