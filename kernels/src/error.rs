//! What can go wrong here. A failed call names the operation and its shape.

use std::io;

use cudarc::{cublaslt::result::CublasError, driver::DriverError};

/// Why the GPU cannot be used, or why one call failed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The machine has no NVIDIA driver.
    #[error("no CUDA driver: libcuda is not found on this machine")]
    NoDriver,
    /// The driver lacks functions that are called here.
    #[error(
        "the NVIDIA driver is too old: it is for CUDA {}, this program needs one for CUDA {} (580 or later)",
        cuda_version(*found), cuda_version(*needed)
    )]
    DriverTooOld {
        /// The driver's version, as it counts: 13000 is 13.0.
        found: i32,
        /// The least.
        needed: i32,
    },
    /// The driver finds no device, or cannot start.
    #[error("no CUDA device {ordinal}: {source}")]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// What the driver says.
        source: DriverError,
    },
    /// The crate was compiled on a machine without nvcc.
    #[error("this program was built without GPU kernels: run kernels/tools/cuda.sh and build again")]
    NotBuilt,
    /// The kernels hold no code for this device.
    #[error(
        "the kernels, compiled for sm_{}, do not load on {device} (compute capability {major}.{minor}): {source}",
        crate::built_for().replace(',', ", sm_")
    )]
    Unloadable {
        /// The device's name.
        device: String,
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
        /// What the driver says.
        source: DriverError,
    },
    /// cuBLASLt is not installed.
    #[error("cuBLASLt (libcublasLt.so.13) is not found on this machine")]
    NoBlas,
    /// The chip is not the one that the batch-invariant products are written for.
    #[error(
        "the batch-invariant mode needs compute capability 9.0 (H100, H200), this GPU has {major}.{minor}: \
         switch batch_invariant off"
    )]
    NotInvariant {
        /// Its compute capability.
        major: i32,
        /// Its compute capability.
        minor: i32,
    },
    /// The context waits for events by itself, which the launchers and captured graphs rule out.
    #[error("the CUDA context tracks events: open it with Device::open")]
    EventTracking,
    /// Arguments that do not fit each other or the kernel.
    #[error("{op}: {problem}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What was given, what is expected.
        problem: String,
    },
    /// The driver refused a launch.
    #[error("{op} {shape}: {source}")]
    Launch {
        /// The operation.
        op: &'static str,
        /// Grid and block.
        shape: String,
        /// What the driver says.
        source: DriverError,
    },
    /// cuBLASLt refused a product.
    #[error("{op} {shape}: {source}")]
    Blas {
        /// The operation.
        op: &'static str,
        /// Rows, columns and depth.
        shape: String,
        /// What the library says.
        source: CublasError,
    },
    /// GPUs of a group that do not reach each other's memory.
    #[error(
        "GPU {from} cannot read the memory of GPU {to}: tensor parallelism needs GPUs of one machine with peer access \
         (NVLink, or PCIe without isolation): nvidia-smi topo -p2p r shows which have it"
    )]
    NoPeerAccess {
        /// Who would read.
        from: usize,
        /// Whose memory.
        to: usize,
    },
    /// A call of the operating system.
    #[error("{call}: {source}")]
    Host {
        /// What was being done.
        call: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// Any other call of the driver.
    #[error("{call}: {source}")]
    Driver {
        /// What was being done.
        call: &'static str,
        /// What the driver says.
        source: DriverError,
    },
}

impl KernelError {
    /// Wraps what the driver says during `call`.
    pub fn driver(call: &'static str) -> impl Fn(DriverError) -> Self {
        move |source| Self::Driver { call, source }
    }

    /// Wraps what the operating system says during `call`.
    pub(crate) fn host(call: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Host { call, source }
    }
}

/// As people write it.
pub(crate) fn cuda_version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
