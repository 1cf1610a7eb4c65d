//! What the copy engine of Hopper and later needs to know of a tensor in global memory: sizes, strides and the box that it
//! copies at once. Pure but for the driver's encoding, which runs on the host; owns no device memory.

use std::ffi::c_void;

use cudarc::driver::sys;

use crate::error::KernelError;

/// A tensor of bf16 and the box of it that one copy moves, swizzled in shared memory over the width of the box: in 128 bytes
/// as warpgroup products read it. Dimensions run from the one along memory outwards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BoxedTensor<const RANK: usize> {
    /// The first value's address, a multiple of 16 bytes.
    pub(crate) address: u64,
    /// Values in each dimension.
    pub(crate) sizes: [usize; RANK],
    /// Values from one to the next in each dimension: 1, then multiples of 8.
    pub(crate) strides: [usize; RANK],
    /// Values of the box in each dimension; 64 or 32 in the first.
    pub(crate) box_sizes: [usize; RANK],
    /// What the L2 cache fetches for each of its 128-byte lines that a box has.
    pub(crate) fetches: Fetches,
}

/// What comes from memory for a line that the L2 cache lacks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fetches {
    /// That line. Weights that are read once, by every multiprocessor at its own place: 2 % faster with 8 rows.
    Line,
    /// Its neighbour, too.
    Pair,
}

/// The driver's encoding of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMap(pub(crate) sys::CUtensorMap);

impl TensorMap {
    /// Encodes. `op` is whose tensor it is.
    pub(crate) fn new<const RANK: usize>(op: &'static str, tensor: &BoxedTensor<RANK>) -> Result<Self, KernelError> {
        let swizzle = match tensor.box_sizes[0] {
            64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            width => panic!("a box of {width} values has no swizzle"),
        };
        Self::encode(op, tensor, swizzle)
    }

    /// Of a tensor whose boxes lie in shared memory line by line: up to 256 values in each dimension.
    pub(crate) fn in_lines<const RANK: usize>(
        op: &'static str,
        tensor: &BoxedTensor<RANK>,
    ) -> Result<Self, KernelError> {
        Self::encode(op, tensor, sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE)
    }

    fn encode<const RANK: usize>(
        op: &'static str,
        tensor: &BoxedTensor<RANK>,
        swizzle: sys::CUtensorMapSwizzle,
    ) -> Result<Self, KernelError> {
        let sizes = tensor.sizes.map(|size| size as u64);
        let strides_bytes = tensor.strides.map(|stride| 2 * stride as u64);
        let box_sizes = tensor.box_sizes.map(crate::launch::count);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays hold RANK values (of the strides the first is left out) and live until the call returns, as the
        // map does. The address is only noted.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                RANK as u32,
                tensor.address as *mut c_void,
                sizes.as_ptr(),
                strides_bytes[1..].as_ptr(),
                box_sizes.as_ptr(),
                [1; RANK].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                match tensor.fetches {
                    Fetches::Line => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                    Fetches::Pair => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                },
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(|source| KernelError::Launch { op, shape: format!("{tensor:?}"), source })?;
        Ok(Self(map))
    }
}
