//! A GPU that fails on demand. What fails is the context that a process has on one GPU, as after a fault of a kernel or of the
//! chip: every later call in it returns an error.
//!
//! Tests call [`fail`] in their own process. A program that knows nothing of this is made to fail from outside: start it with
//! `LD_PRELOAD=libstoker_gpu_fault.so STOKER_GPU_FAULT=FILE`; as soon as FILE is there, the GPU whose number it holds fails.

use std::{env, ffi::CString, fs, path::Path, thread, time::Duration};

use cudarc::driver::{DriverError, result};

/// The file whose appearance is the order to fail.
const FILE_VARIABLE: &str = "STOKER_GPU_FAULT";
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A kernel that ends in a trap.
const TRAP: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry stop() { trap; }";

/// Makes this process's context on a GPU fail. Returns when the kernel that does it was launched.
///
/// # Errors
/// There is no such GPU, or nothing can be launched on it.
pub fn fail(gpu: i32) -> Result<(), DriverError> {
    result::init()?;
    let device = result::device::get(gpu)?;
    let [image, name] = [TRAP, "stop"].map(|text| CString::new(text).expect("no NUL in it"));
    // SAFETY: the context is the device's primary one, which is never released here; the image is PTX that ends with a NUL; the
    // kernel takes no arguments and touches no memory.
    unsafe {
        result::ctx::set_current(result::primary_ctx::retain(device)?)?;
        let module = result::module::load_data(image.as_ptr().cast())?;
        let stop = result::module::get_function(module, name)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        result::launch_kernel(stop, (1, 1, 1), (1, 1, 1), 0, stream, &mut [])
    }
}

/// Runs when the library is loaded; does nothing where nobody named a file.
#[used]
#[unsafe(link_section = ".init_array")]
static WATCH: extern "C" fn() = watch;

extern "C" fn watch() {
    let Some(order) = env::var_os(FILE_VARIABLE) else { return };
    thread::spawn(move || {
        loop {
            if let Some(gpu) = ordered(order.as_ref()) {
                eprintln!("gpu-fault: GPU {gpu} fails now: {:?}", fail(gpu));
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    });
}

/// The GPU that the file names; it is taken away, so that the next process lives.
fn ordered(file: &Path) -> Option<i32> {
    let gpu = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    fs::remove_file(file).ok()?;
    Some(gpu)
}
