//! Matrix products through cuBLASLt, for the shapes where it is the fastest there is. Owns the handle, the workspace and, per
//! shape, the descriptors and the algorithm: the library's own lookup costs 10 us a call. Chooses nothing: an algorithm is named by
//! its place in the library's list of guesses, which is the same at every start with one version of the library.
//!
//! The library loads an algorithm's code with its first product, and that waits for all work on the device: 0.2 to 0.4 s behind
//! two steps of a prefill. So algorithms are asked for and run once at start for a list of row counts, and any other count takes the
//! algorithm of the next larger one.

use std::{
    collections::HashMap,
    ffi::c_void,
    sync::{Mutex, OnceLock},
};

use cudarc::{
    cublaslt::{result, result::CublasError, sys},
    driver::{CudaSlice, DevicePtr, DevicePtrMut},
};
use libloading::Library;

/// Device memory that a `Blas` allocates, for the memory plan: what NVIDIA recommends for Hopper; split-K algorithms need it.
pub use stoker_fit::gpu::WORKSPACE_BYTES;

use crate::{
    Device, KernelError,
    launch::{Epilogue, GemmShape, refused},
    linear::{self, Linear, Operand, Output},
};

/// The library's name for a transposed operand; the bindings have the enum only in another module.
const CUBLAS_OP_T: i32 = 1;
/// Guesses of the library for one shape that may be chosen.
pub const GUESSES: usize = 6;

/// An algorithm of the library: the guess `rank` of its list for a product of `rows` rows.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Algorithm {
    /// Rows of x that the library is asked about: at least those that are multiplied.
    pub rows: usize,
    /// Place in the list; 0 is its best guess.
    pub rank: usize,
}

/// cuBLASLt on one device.
#[derive(Debug)]
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    device: Device,
    workspace: CudaSlice<u8>,
    plans: Mutex<HashMap<(Key, Algorithm), Plan>>,
}

// SAFETY: the library allows a handle to be used from any thread; the plans are behind a mutex.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

type Key = (GemmShape, Epilogue);

/// Descriptors and algorithm of one shape, freed with the `Blas`.
#[derive(Clone, Copy, Debug)]
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Device addresses of a product's operands.
#[derive(Clone, Copy, Debug)]
struct Operands {
    w: u64,
    x: u64,
    y: u64,
    /// What y is multiplied by before the product is added: 0 or 1.
    keep: f32,
}

/// Loads the library if it can be; needs no driver. It is kept: the bindings' own look at it lets go of it again, and to load it takes
/// 60 ms each time.
pub(crate) fn find_library() -> Result<(), KernelError> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let load = || {
        let names = cudarc::get_lib_name_candidates("cublasLt");
        // SAFETY: the library's own initialisation may run anywhere; nothing of it is called.
        names.iter().find_map(|name| unsafe { Library::new(name) }.ok())
    };
    LIBRARY.get_or_init(load).as_ref().map(|_| ()).ok_or(KernelError::NoBlas)
}

impl Blas {
    /// Loads the library and allocates its workspace.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        find_library()?;
        device.context().bind_to_thread().map_err(KernelError::driver("bind the context"))?;
        let handle = result::create_handle().map_err(|source| failed("create a handle", String::new(), source))?;
        let workspace = device.stream().alloc_zeros(WORKSPACE_BYTES);
        let workspace = workspace.map_err(KernelError::driver("allocate the workspace of cuBLASLt"))?;
        Ok(Self { handle, device: device.clone(), workspace, plans: Mutex::default() })
    }

    /// The library's version, which its guesses depend on: 130103 for 13.1.3.
    pub fn version() -> Result<usize, KernelError> {
        find_library()?;
        // SAFETY: the library was just found; the call takes nothing and touches no device.
        Ok(unsafe { sys::cublasLtGetVersion() })
    }

    /// Multiplies. The first product of a shape by an algorithm asks the library for it.
    pub fn gemm(&self, mut op: Linear<'_>, algorithm: Algorithm) -> Result<(), KernelError> {
        linear::check("gemm", &op)?;
        let key = (op.shape, op.y.epilogue());
        let plan = self.plan(key, algorithm)?;
        let operands = self.operands(&mut op)?;
        self.multiply(&plan, operands).map_err(|source| failed("gemm", describe(key), source))
    }

    fn operands(&self, op: &mut Linear<'_>) -> Result<Operands, KernelError> {
        let stream = self.device.stream();
        let (y, keep) = match &mut op.y {
            Output::Bf16(y) => (y.device_ptr_mut(stream).0, 0.0),
            Output::Sum(y) => (y.device_ptr_mut(stream).0, 1.0),
            Output::F32(y) => (y.device_ptr_mut(stream).0, 0.0),
            Output::Gated(_) => unreachable!("a plan of such a product was refused"),
        };
        let (Operand::Bf16(w), Operand::Bf16(x)) = (&op.w, &op.x) else {
            return Err(refused("gemm", "cuBLASLt is asked for products of bf16 only".to_owned()));
        };
        Ok(Operands { w: w.device_ptr(stream).0, x: x.device_ptr(stream).0, y, keep })
    }

    fn plan(&self, key: Key, algorithm: Algorithm) -> Result<Plan, KernelError> {
        if let Some(plan) = self.plans.lock().expect("no holder of this lock panics").get(&(key, algorithm)) {
            return Ok(*plan);
        }
        let plan = self.make_plan(key, algorithm)?;
        self.plans.lock().expect("no holder of this lock panics").insert((key, algorithm), plan);
        Ok(plan)
    }

    /// By the guess for as many rows as were asked about if the library takes it for these too, else by its first guess for these.
    fn make_plan(&self, key: Key, algorithm: Algorithm) -> Result<Plan, KernelError> {
        let (shape, epilogue) = key;
        if shape.m == 0 || shape.n == 0 || shape.k == 0 {
            return Err(refused("gemm", "nothing to do: a dimension is 0".to_owned()));
        }
        if matches!(epilogue, Epilogue::Gated | Epilogue::Update) {
            return Err(refused("gemm", "cuBLASLt neither activates nor norms".to_owned()));
        }
        let asked = GemmShape { m: algorithm.rows, ..shape };
        let guess = if asked == shape {
            None
        } else {
            let plan = self.plan((asked, epilogue), algorithm)?;
            Some(plan.algorithm)
        };
        let mut plan = describe_product(shape, epilogue).map_err(|source| failed("gemm", describe(key), source))?;
        if let Some(guess) = guess.filter(|guess| self.takes(&plan, guess)) {
            plan.algorithm = guess;
            return Ok(plan);
        }
        let rank = if asked == shape { algorithm.rank } else { 0 };
        let found = self.guesses(&plan).map_err(|source| failed("gemm", describe(key), source))?;
        let Some(found) = found.get(rank).or(found.first()) else {
            return Err(refused("gemm", format!("cuBLASLt has no algorithm for {}", describe(key))));
        };
        plan.algorithm = *found;
        Ok(plan)
    }

    /// Whether the library multiplies this shape by this algorithm with our workspace.
    fn takes(&self, plan: &Plan, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: a C struct of integers, filled by the call below.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all descriptors of the plan are alive; the algorithm is one that the library gave.
        let outcome = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                plan.product,
                plan.w,
                plan.x,
                plan.y,
                plan.y,
                algorithm,
                &raw mut found,
            )
        };
        outcome.result().is_ok() && found.workspaceSize <= WORKSPACE_BYTES
    }

    /// The library's guesses, its best one first.
    fn guesses(&self, plan: &Plan) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = result::create_matmul_pref()?;
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE_BYTES;
        // SAFETY: a C struct of integers, filled by the call below.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; GUESSES] = unsafe { std::mem::zeroed() };
        let mut n_found = 0;
        // SAFETY: the attribute is a size_t; all descriptors of the plan are alive.
        let outcome = unsafe {
            result::set_matmul_pref_attribute(preference, attribute, (&raw const bytes).cast(), size_of_val(&bytes))
        }
        .and_then(|()| {
            // SAFETY: as above; `found` has room for GUESSES results.
            unsafe {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    plan.product,
                    plan.w,
                    plan.x,
                    plan.y,
                    plan.y,
                    preference,
                    GUESSES as i32,
                    found.as_mut_ptr(),
                    &raw mut n_found,
                )
            }
            .result()
        });
        // SAFETY: created above, freed once.
        unsafe { result::destroy_matmul_pref(preference) }?;
        outcome?;
        let usable = found.iter().take(usize::try_from(n_found).unwrap_or(0));
        Ok(usable.filter(|found| found.state.result().is_ok()).map(|found| found.algo).collect())
    }

    fn multiply(&self, plan: &Plan, operands: Operands) -> Result<(), CublasError> {
        let one = 1f32;
        let stream = self.device.stream();
        let workspace = self.workspace.device_ptr(stream).0;
        // SAFETY: the layouts describe operands whose lengths `linear::check` has compared with the shape; alpha and beta
        // are host f32, as the descriptor says; the workspace is used by this stream only.
        unsafe {
            result::matmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                (&raw const operands.keep).cast(),
                operands.w as *const c_void,
                plan.w,
                operands.x as *const c_void,
                plan.x,
                operands.y as *const c_void,
                plan.y,
                operands.y as *mut c_void,
                plan.y,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cu_stream().cast(),
            )
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let plans = std::mem::take(self.plans.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner));
        for plan in plans.into_values() {
            // SAFETY: made by `describe_product`, freed once: copies of a plan live only inside calls of this object.
            let _ = unsafe { free(&plan) };
        }
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The library is column-major: what it sees as y (n x m) = w^T (k x n, transposed) * x (k x m) is our row-major
/// y = x * w^T without moving anything.
fn describe_product(shape: GemmShape, epilogue: Epilogue) -> Result<Plan, CublasError> {
    use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
    let y_type = match epilogue {
        Epilogue::Bf16 | Epilogue::Sum | Epilogue::Gated | Epilogue::Update => CUDA_R_16BF,
        Epilogue::F32 => CUDA_R_32F,
    };
    let [m, n, k] = [shape.m, shape.n, shape.k].map(|size| size as u64);
    let product = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F)?;
    let transposed: i32 = CUBLAS_OP_T;
    let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
    // SAFETY: the descriptor was just made; the attribute is a C enum, an int.
    unsafe {
        result::set_matmul_desc_attribute(product, attribute, (&raw const transposed).cast(), size_of_val(&transposed))
    }?;
    Ok(Plan {
        product,
        w: result::create_matrix_layout(CUDA_R_16BF, k, n, k as i64)?,
        x: result::create_matrix_layout(CUDA_R_16BF, k, m, k as i64)?,
        y: result::create_matrix_layout(y_type, n, m, n as i64)?,
        // SAFETY: opaque words, replaced by the heuristic's before use.
        algorithm: unsafe { std::mem::zeroed() },
    })
}

/// # Safety
/// The plan's descriptors are alive and not used again.
unsafe fn free(plan: &Plan) -> Result<(), CublasError> {
    // SAFETY: promised by the caller.
    unsafe {
        result::destroy_matmul_desc(plan.product)?;
        result::destroy_matrix_layout(plan.w)?;
        result::destroy_matrix_layout(plan.x)?;
        result::destroy_matrix_layout(plan.y)
    }
}

fn describe((shape, epilogue): Key) -> String {
    format!("m {} n {} k {} to {epilogue:?}", shape.m, shape.n, shape.k)
}

fn failed(op: &'static str, shape: String, source: CublasError) -> KernelError {
    KernelError::Blas { op, shape, source }
}
