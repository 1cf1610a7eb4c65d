//! Matrix products through cuBLASLt, for the shapes where it is the fastest there is (m of 64 and more). Owns the handle,
//! the workspace and, per shape, the descriptors and the algorithm: the library's own lookup costs 10 us a call.
//!
//! The library loads an algorithm's code with its first product, and that waits for all work on the device: 0.2 to 0.4 s behind
//! two steps of a prefill. So algorithms are chosen and run once at start for a list of row counts, and any other count takes the
//! algorithm of the next larger one.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::c_void,
    sync::Mutex,
};

use cudarc::{
    cublaslt::{result, result::CublasError, sys},
    driver::{CudaSlice, CudaView, DevicePtr, DevicePtrMut},
};
use half::bf16;

use crate::{
    Device, KernelError, check_len,
    launch::{GemmShape, OutputType, refused},
    linear::{self, Linear, Output},
    timing::Contest,
};

/// Device memory that a `Blas` allocates, for the memory plan: what NVIDIA recommends for Hopper; split-K algorithms need it.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// The library's name for a transposed operand; the bindings have the enum only in another module.
const CUBLAS_OP_T: i32 = 1;
/// Algorithms that `tune` times.
const CANDIDATES: usize = 6;

/// cuBLASLt on one device.
#[derive(Debug)]
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    device: Device,
    workspace: CudaSlice<u8>,
    plans: Mutex<HashMap<Key, Plan>>,
    chosen: Mutex<Chosen>,
}

/// Algorithms that were chosen at start.
#[derive(Debug, Default)]
struct Chosen {
    /// By columns, depth and output, then by rows.
    by_rows: HashMap<(usize, usize, OutputType), BTreeMap<usize, sys::cublasLtMatmulAlgo_t>>,
    /// Those whose code is loaded.
    loaded: HashSet<sys::cublasLtMatmulAlgo_t>,
}

impl Chosen {
    fn keep(&mut self, (shape, output): Key, algorithm: sys::cublasLtMatmulAlgo_t) {
        self.by_rows.entry((shape.n, shape.k, output)).or_default().insert(shape.m, algorithm);
        self.loaded.insert(algorithm);
    }

    /// That of the next larger row count.
    fn for_rows(&self, (shape, output): Key) -> Option<sys::cublasLtMatmulAlgo_t> {
        let by_rows = self.by_rows.get(&(shape.n, shape.k, output))?;
        by_rows.range(shape.m..).next().map(|(_, algorithm)| *algorithm)
    }
}

// SAFETY: the library allows a handle to be used from any thread; the plans are behind a mutex.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

type Key = (GemmShape, OutputType);

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

/// Looks whether the library can be loaded; needs no driver.
pub(crate) fn find_library() -> Result<(), KernelError> {
    // SAFETY: loads the library, calls nothing of it.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(KernelError::NoBlas) }
}

impl Blas {
    /// Loads the library and allocates its workspace.
    pub fn new(device: &Device) -> Result<Self, KernelError> {
        find_library()?;
        device.context().bind_to_thread().map_err(KernelError::driver("bind the context"))?;
        let handle = result::create_handle().map_err(|source| failed("create a handle", String::new(), source))?;
        let workspace = device.stream().alloc_zeros(WORKSPACE_BYTES);
        let workspace = workspace.map_err(KernelError::driver("allocate the workspace of cuBLASLt"))?;
        Ok(Self { handle, device: device.clone(), workspace, plans: Mutex::default(), chosen: Mutex::default() })
    }

    /// Multiplies. The first product of a shape asks the library for its algorithm, unless `tune` has chosen one.
    pub fn gemm(&self, mut op: Linear<'_>) -> Result<(), KernelError> {
        linear::check("gemm", &op)?;
        let key = (op.shape, op.y.output_type());
        let plan = self.plan(key)?;
        let operands = self.operands(&mut op);
        self.multiply(&plan, operands).map_err(|source| failed("gemm", describe(key), source))
    }

    /// Times the library's candidates for the shape of `op` and keeps the fastest; returns its microseconds. `others` are
    /// further weights of the same shape, taken in turn: a matrix that stays in the L2 cache says little about one that
    /// does not. For start-up, not while capturing. The heuristic alone leaves 4 to 6 % (engines measured it on several
    /// chips).
    pub fn tune(&self, mut op: Linear<'_>, others: &[CudaView<'_, bf16>]) -> Result<f64, KernelError> {
        linear::check("gemm", &op)?;
        let key = (op.shape, op.y.output_type());
        let plan = self.plan(key)?;
        let first = self.operands(&mut op);
        let stream = self.device.stream();
        let other = |w: &CudaView<'_, bf16>| Operands { w: w.device_ptr(stream).0, ..first };
        others.iter().try_for_each(|w| check_len("gemm", "w", w.len(), op.w.len()))?;
        let operands: Vec<Operands> = std::iter::once(first).chain(others.iter().map(other)).collect();
        let mut algorithms = self.candidates(&plan).map_err(|source| failed("gemm", describe(key), source))?;
        // A candidate that needs more than this call offers is refused by the library: not a candidate then.
        algorithms.retain(|&algorithm| self.multiply(&Plan { algorithm, ..plan }, first).is_ok());
        if algorithms.is_empty() {
            self.keep(key, plan);
            return Ok(f64::INFINITY);
        }
        let contest = Contest { n_ways: algorithms.len(), n_launches: operands.len() };
        let winner = contest.run(&self.device, |way, idx| {
            let multiplied = self.multiply(&Plan { algorithm: algorithms[way], ..plan }, operands[idx]);
            multiplied.map_err(|source| failed("gemm", describe(key), source))
        })?;
        self.keep(key, Plan { algorithm: algorithms[winner.way], ..plan });
        Ok(winner.us)
    }

    /// Takes the library's first guess for the shape of `op`, and multiplies once if its code is not loaded yet. For start-up,
    /// where timing gains nothing: from some hundred rows on the first guess is the best.
    pub fn prepare(&self, mut op: Linear<'_>) -> Result<(), KernelError> {
        linear::check("gemm", &op)?;
        let key = (op.shape, op.y.output_type());
        let plan = self.make_plan(key, None)?;
        let is_loaded = self.chosen.lock().expect("no holder of this lock panics").loaded.contains(&plan.algorithm);
        if !is_loaded {
            let operands = self.operands(&mut op);
            self.multiply(&plan, operands).map_err(|source| failed("gemm", describe(key), source))?;
        }
        self.keep(key, plan);
        Ok(())
    }

    /// Whether `tune` or `prepare` was here already.
    pub fn has_chosen(&self, op: &Linear<'_>) -> bool {
        let GemmShape { m, n, k } = op.shape;
        let chosen = self.chosen.lock().expect("no holder of this lock panics");
        chosen.by_rows.get(&(n, k, op.y.output_type())).is_some_and(|by_rows| by_rows.contains_key(&m))
    }

    fn keep(&self, key: Key, plan: Plan) {
        self.chosen.lock().expect("no holder of this lock panics").keep(key, plan.algorithm);
        let replaced = self.plans.lock().expect("no holder of this lock panics").insert(key, plan);
        // A plan that was tuned again kept its descriptors.
        if let Some(replaced) = replaced.filter(|replaced| replaced.product != plan.product) {
            // SAFETY: made by `describe_product`, in no table any more.
            let _ = unsafe { free(&replaced) };
        }
    }

    fn operands(&self, op: &mut Linear<'_>) -> Operands {
        let stream = self.device.stream();
        let (y, keep) = match &mut op.y {
            Output::Bf16(y) => (y.device_ptr_mut(stream).0, 0.0),
            Output::Sum(y) => (y.device_ptr_mut(stream).0, 1.0),
            Output::F32(y) => (y.device_ptr_mut(stream).0, 0.0),
            Output::Activated(_) => unreachable!("a plan of such a product was refused"),
        };
        Operands { w: op.w.device_ptr(stream).0, x: op.x.device_ptr(stream).0, y, keep }
    }

    fn plan(&self, key: Key) -> Result<Plan, KernelError> {
        let mut plans = self.plans.lock().expect("no holder of this lock panics");
        if let Some(plan) = plans.get(&key) {
            return Ok(*plan);
        }
        let chosen = self.chosen.lock().expect("no holder of this lock panics").for_rows(key);
        let plan = self.make_plan(key, chosen)?;
        plans.insert(key, plan);
        Ok(plan)
    }

    /// With the algorithm `chosen` if the library takes it for this shape, else with its own first guess.
    fn make_plan(&self, key: Key, chosen: Option<sys::cublasLtMatmulAlgo_t>) -> Result<Plan, KernelError> {
        let (shape, output) = key;
        if shape.m == 0 || shape.n == 0 || shape.k == 0 {
            return Err(refused("gemm", "nothing to do: a dimension is 0".to_owned()));
        }
        if matches!(output, OutputType::Activated | OutputType::Updated) {
            return Err(refused("gemm", "cuBLASLt neither activates nor norms".to_owned()));
        }
        let mut plan = describe_product(shape, output).map_err(|source| failed("gemm", describe(key), source))?;
        if let Some(chosen) = chosen.filter(|chosen| self.takes(&plan, chosen)) {
            plan.algorithm = chosen;
            return Ok(plan);
        }
        let found = self.candidates(&plan).map_err(|source| failed("gemm", describe(key), source))?;
        let Some(first) = found.into_iter().next() else {
            return Err(refused("gemm", format!("cuBLASLt has no algorithm for {}", describe(key))));
        };
        plan.algorithm = first;
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

    /// The library's candidates, best guess first.
    fn candidates(&self, plan: &Plan) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let preference = result::create_matmul_pref()?;
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE_BYTES;
        // SAFETY: a C struct of integers, filled by the call below.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut n_found = 0;
        // SAFETY: the attribute is a size_t; all descriptors of the plan are alive.
        let outcome = unsafe {
            result::set_matmul_pref_attribute(preference, attribute, (&raw const bytes).cast(), size_of_val(&bytes))
        }
        .and_then(|()| {
            // SAFETY: as above; `found` has room for CANDIDATES results.
            unsafe {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    plan.product,
                    plan.w,
                    plan.x,
                    plan.y,
                    plan.y,
                    preference,
                    CANDIDATES as i32,
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
fn describe_product(shape: GemmShape, output: OutputType) -> Result<Plan, CublasError> {
    use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_32F};
    let y_type = match output {
        OutputType::Bf16 | OutputType::Activated | OutputType::Updated => CUDA_R_16BF,
        OutputType::F32 => CUDA_R_32F,
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

fn describe((shape, output): Key) -> String {
    format!("m {} n {} k {} to {output:?}", shape.m, shape.n, shape.k)
}

fn failed(op: &'static str, shape: String, source: CublasError) -> KernelError {
    KernelError::Blas { op, shape, source }
}
