//! A GPU that fails on demand, or stalls. What fails is the context that a process has on one GPU, as after a fault of a kernel or of the
//! chip: every later call in it returns an error. One that stalls computes nothing else for a while, and no call says so.
//!
//! Tests call [`fail`] and [`stall`] in their own process. A program that knows nothing of this is made to fail from outside: start it with
//! `LD_PRELOAD=libstoker_gpu_fault.so STOKER_GPU_FAULT=FILE`; as soon as FILE is there, the GPU whose number it holds fails.

use std::{
    env,
    ffi::{CString, c_void},
    fs,
    path::Path,
    thread,
    time::Duration,
};

use cudarc::driver::{DriverError, result, sys};

/// The file whose appearance is the order to fail.
const FILE_VARIABLE: &str = "STOKER_GPU_FAULT";
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A kernel that ends in a trap.
const TRAP: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry stop() { trap; }";

/// A kernel whose threads look at the clock for so many nanoseconds.
const SPIN: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry spin(.param .u64 ns) {
    .reg .u64 %now, %end, %ns;
    .reg .pred %early;
    ld.param.u64 %ns, [ns];
    mov.u64 %now, %globaltimer;
    add.u64 %end, %now, %ns;
    again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra again;
    ret;
}";
/// Blocks of as many threads fill a multiprocessor, so that nobody else's are placed there.
const FILLING: (u32, u32) = (2, 1024);

/// Makes this process's context on a GPU fail. Returns when the kernel that does it was launched.
///
/// # Errors
/// There is no such GPU, or nothing can be launched on it.
pub fn fail(gpu: i32) -> Result<(), DriverError> {
    launch(gpu, [TRAP, "stop"], (1, 1), &mut [])
}

/// Keeps a GPU so busy that nothing else is computed there, from now on for as long. Returns when the kernel that does it was launched.
///
/// # Errors
/// There is no such GPU, or nothing can be launched on it.
pub fn stall(gpu: i32, duration: Duration) -> Result<(), DriverError> {
    result::init()?;
    let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    // SAFETY: the handle is a device's.
    let n_multiprocessors = unsafe { result::device::get_attribute(result::device::get(gpu)?, count)? };
    let mut ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let (blocks, threads) = FILLING;
    launch(gpu, [SPIN, "spin"], (n_multiprocessors.unsigned_abs() * blocks, threads), &mut [(&raw mut ns).cast()])
}

/// Launches a kernel of so many blocks and threads in this process's context on a GPU.
fn launch(
    gpu: i32,
    [image, name]: [&str; 2],
    (blocks, threads): (u32, u32),
    arguments: &mut [*mut c_void],
) -> Result<(), DriverError> {
    result::init()?;
    let device = result::device::get(gpu)?;
    let [image, name] = [image, name].map(|text| CString::new(text).expect("no NUL in it"));
    // SAFETY: the context is the device's primary one, which is never released here; the image is PTX that ends with a NUL; the
    // kernel takes the arguments that its caller gives, which are read before this returns, and touches no memory.
    unsafe {
        result::ctx::set_current(result::primary_ctx::retain(device)?)?;
        let module = result::module::load_data(image.as_ptr().cast())?;
        let function = result::module::get_function(module, name)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream, arguments)
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
