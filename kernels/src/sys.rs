//! The compiled kernels inside this program, loaded into a context, and the one call that starts them. Knows no shapes:
//! whoever calls `Launch::start` has checked them.

use std::{
    ffi::{CString, c_void},
    ptr,
    sync::Arc,
};

use cudarc::driver::{CudaContext, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, result, sys};

use crate::{
    device::Device,
    error::KernelError,
    launch::{Entry, LaunchConfig},
    ranks::Addresses,
    tensor_map::TensorMap,
};

/// The driver reads a fatbin's header in place, as 8-byte words.
#[repr(C, align(16))]
struct Aligned<Bytes: ?Sized>(Bytes);

macro_rules! fatbins {
    ($($name:literal),*) => {
        /// Empty where the crate was built without nvcc.
        static FATBINS: &[(&str, &Aligned<[u8]>)] =
            &[$(($name, &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin"))))),*];
    };
}
fatbins!(
    "add_bias",
    "embed",
    "feed_tokens",
    "gemm_fp8_blocks_sm90",
    "gemm_fp8_sm90",
    "gemm_int4_e4m3_sm90",
    "gemm_int4_sm90",
    "mark_tokens",
    "gemm_sm90",
    "paged_decode",
    "paged_prefill",
    "paged_prefill_sm90",
    "quantise_rows",
    "reduce",
    "repack_int4",
    "rms_norm",
    "rope_kv",
    "sample",
    "sample_options",
    "sample_shared",
    "sampling_floor_sm90",
    "score_tokens",
    "silu_mul",
    "skinny_gemm",
    "skinny_gemm_sm90",
    "skinny_int4_e4m3_sm90",
    "skinny_int4_sm90",
    "softcap",
    "sum_rows",
    "unpack_blocks",
    "widen_int4"
);

/// A kernel takes this many arguments at most.
const ARGUMENTS_MAX: usize = 24;

/// Whether this program holds compiled kernels.
pub fn built_with_kernels() -> bool {
    FATBINS.iter().all(|(_, image)| !image.0.is_empty())
}

/// Chips that this program holds machine code for, as nvcc names them (`80,89,90a,100a`); empty without kernels.
pub fn built_for() -> &'static str {
    env!("STOKER_CUDA_CHIPS")
}

/// Compiled kernels of one source file, loaded.
#[derive(Debug)]
struct Module {
    handle: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: a module handle may be used from any thread that has its context bound.
unsafe impl Send for Module {}
// SAFETY: as above; nothing here changes a loaded module.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the handle came from load_data and is dropped once. A failure means that the context is gone.
            let _ = unsafe { result::module::unload(self.handle) };
        }
    }
}

/// Every entry point, loaded. The modules live as long as the functions that point into them.
#[derive(Debug)]
pub(crate) struct Functions {
    by_entry: Vec<sys::CUfunction>,
    _modules: Vec<Module>,
    stream: Arc<CudaStream>,
    capability: (i32, i32),
}

// SAFETY: function handles may be used from any thread that has their context bound.
unsafe impl Send for Functions {}
// SAFETY: as above; nothing here changes them after loading.
unsafe impl Sync for Functions {}

impl Functions {
    pub(crate) fn load(device: &Device) -> Result<Self, KernelError> {
        if !built_with_kernels() {
            return Err(KernelError::NotBuilt);
        }
        if device.context().is_event_tracking() {
            return Err(KernelError::EventTracking);
        }
        device.context().bind_to_thread().map_err(KernelError::driver("bind the context"))?;
        let modules: Vec<Module> =
            FATBINS.iter().map(|(_, image)| load_module(device, &image.0)).collect::<Result<_, _>>()?;
        let find = |&entry: &Entry| {
            let at =
                FATBINS.iter().position(|(name, _)| *name == entry.module()).expect("every entry's module is embedded");
            find_function(&modules[at], entry, device.properties().shared_bytes_max)
        };
        let by_entry = Entry::ALL.iter().map(find).collect::<Result<_, _>>()?;
        let mut functions = Self { by_entry, _modules: modules, stream: device.stream().clone(), capability: (0, 0) };
        functions.capability = device.properties().capability.min(functions.compiled_for()?);
        Ok(functions)
    }

    /// The newest instructions that both the chip and the loaded code have. A chip for which there is no machine code runs
    /// what the driver makes of the portable code: kernels for Hopper are empty in it, and none waits for the one in front.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The virtual architecture that the loaded code was compiled for; the same for all, as `build.rs` compiles them alike.
    fn compiled_for(&self) -> Result<(i32, i32), KernelError> {
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        // SAFETY: the function handle is valid.
        let version =
            unsafe { result::function::get_function_attribute(self.by_entry[Entry::Embed as usize], attribute) }
                .map_err(KernelError::driver("read what a kernel was compiled for"))?;
        Ok((version / 10, version % 10))
    }

    /// Begins a launch on the device's stream.
    pub(crate) fn launch(&self, op: &'static str, config: LaunchConfig) -> Launch<'_> {
        Launch {
            functions: self,
            stream: &self.stream,
            op,
            config,
            arguments: [Argument::Word(0); ARGUMENTS_MAX],
            n_arguments: 0,
        }
    }
}

fn load_module(device: &Device, image: &[u8]) -> Result<Module, KernelError> {
    // SAFETY: the image is a fatbin that nvcc wrote; its header carries its length.
    let handle = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(|source| {
        let (major, minor) = device.properties().capability;
        KernelError::Unloadable { device: device.name().unwrap_or_default(), major, minor, source }
    })?;
    Ok(Module { handle, context: device.context().clone() })
}

fn find_function(module: &Module, entry: Entry, shared_bytes_max: u32) -> Result<sys::CUfunction, KernelError> {
    let name = CString::new(entry.name()).expect("entry names hold no NUL");
    // SAFETY: the module is loaded and outlives the function (both are owned by `Functions`).
    let function = unsafe { result::module::get_function(module.handle, name) }
        .map_err(KernelError::driver("find a kernel's entry point"))?;
    // A kernel for another chip may ask for more than this one has; it is never launched here.
    if let Some(bytes) = entry.shared_bytes_asked().filter(|&bytes| bytes <= shared_bytes_max) {
        allow_shared_memory(function, bytes)?;
    }
    Ok(function)
}

/// A block gets more than 48 KiB of dynamic shared memory only if its function says so beforehand.
fn allow_shared_memory(function: sys::CUfunction, bytes: u32) -> Result<(), KernelError> {
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let bytes = i32::try_from(bytes).expect("shared memory is counted in kilobytes");
    // SAFETY: the function handle is valid and the attribute takes a byte count.
    unsafe { result::function::set_function_attribute(function, attribute, bytes) }
        .map_err(KernelError::driver("allow a kernel more shared memory"))
}

/// One launch being put together: arguments in the kernel's order, then `start`.
pub(crate) struct Launch<'a> {
    functions: &'a Functions,
    stream: &'a CudaStream,
    op: &'static str,
    config: LaunchConfig,
    arguments: [Argument<'a>; ARGUMENTS_MAX],
    n_arguments: usize,
}

#[derive(Clone, Copy)]
enum Argument<'a> {
    /// A pointer, an i32 or an f32: eight bytes hold any of them (the low ones of the smaller).
    Word(u64),
    Map(&'a TensorMap),
    Addresses(&'a Addresses),
}

impl Argument<'_> {
    fn address(&mut self) -> *mut c_void {
        match self {
            Self::Word(word) => ptr::from_mut(word).cast(),
            Self::Map(map) => ptr::from_ref(&map.0).cast_mut().cast(),
            Self::Addresses(addresses) => ptr::from_ref(*addresses).cast_mut().cast(),
        }
    }
}

impl<'a> Launch<'a> {
    /// On another stream than the device's.
    pub(crate) fn on(self, stream: &'a CudaStream) -> Self {
        Self { stream, ..self }
    }

    /// A device address that whoever launches vouches for.
    pub(crate) fn address(self, address: u64) -> Self {
        self.raw(address)
    }

    pub(crate) fn read<T>(self, view: &CudaView<'_, T>) -> Self {
        let pointer = view.device_ptr(&self.functions.stream).0;
        self.raw(pointer)
    }

    pub(crate) fn write<T>(self, view: &mut CudaViewMut<'_, T>) -> Self {
        let pointer = view.device_ptr_mut(&self.functions.stream).0;
        self.raw(pointer)
    }

    pub(crate) fn read_optional<T>(self, view: Option<&CudaView<'_, T>>) -> Self {
        match view {
            Some(view) => self.read(view),
            None => self.raw(0),
        }
    }

    pub(crate) fn write_optional<T>(self, view: Option<&mut CudaViewMut<'_, T>>) -> Self {
        match view {
            Some(view) => self.write(view),
            None => self.raw(0),
        }
    }

    /// From value `first` on.
    pub(crate) fn write_at<T>(self, view: &mut CudaViewMut<'_, T>, first: usize) -> Self {
        let pointer = view.device_ptr_mut(&self.functions.stream).0;
        self.raw(pointer + (first * size_of::<T>()) as u64)
    }

    pub(crate) fn int(self, value: usize) -> Self {
        let value = i32::try_from(value).expect("sizes were checked to fit a launch");
        self.raw(u64::from(value.cast_unsigned()))
    }

    pub(crate) fn float(self, value: f32) -> Self {
        self.raw(u64::from(value.to_bits()))
    }

    pub(crate) fn map(self, map: &'a TensorMap) -> Self {
        self.argument(Argument::Map(map))
    }

    /// By value: the kernel's argument is a struct of so many pointers.
    pub(crate) fn addresses(self, addresses: &'a Addresses) -> Self {
        self.argument(Argument::Addresses(addresses))
    }

    fn raw(self, bits: u64) -> Self {
        self.argument(Argument::Word(bits))
    }

    fn argument(mut self, argument: Argument<'a>) -> Self {
        self.arguments[self.n_arguments] = argument;
        self.n_arguments += 1;
        self
    }

    pub(crate) fn start(mut self) -> Result<(), KernelError> {
        let LaunchConfig { entry, grid, threads, shared_bytes } = self.config;
        let mut pointers: [*mut c_void; ARGUMENTS_MAX] = [ptr::null_mut(); ARGUMENTS_MAX];
        for (pointer, argument) in pointers.iter_mut().zip(&mut self.arguments) {
            *pointer = argument.address();
        }
        let mut overlap = overlap_attribute();
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut overlap,
            // Only code for sm_90 and later waits for the kernel in front by itself.
            numAttrs: u32::from(self.functions.capability >= (9, 0)),
        };
        self.functions.stream.context().bind_to_thread().map_err(KernelError::driver("bind the context"))?;
        // SAFETY: the function was loaded in this context; the launcher pushed the arguments in the order and types of
        // the kernel's signature and checked every buffer against the shape. They are copied before the call returns.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.functions.by_entry[entry as usize],
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
        .result()
        .map_err(|source| {
            let shape = format!("{} grid {grid:?} of {threads} threads, {shared_bytes} B shared", entry.name());
            KernelError::Launch { op: self.op, shape, source }
        })
    }
}

/// Programmatic dependent launch: every kernel of ours waits for the earlier ones itself (`common.cuh`).
fn overlap_attribute() -> sys::CUlaunchAttribute {
    // SAFETY: a C struct of integers and a union of them; all zeros is a value of it.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_of_every_entry_is_embedded() {
        for entry in Entry::ALL {
            let module = entry.module();
            assert!(FATBINS.iter().any(|(name, _)| *name == module), "{module} of {entry:?}");
        }
    }
}
