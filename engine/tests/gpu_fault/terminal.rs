//! A GPU's context fails, and what a request hears of it.

use std::{ffi::CString, sync::mpsc, thread, time::Duration};

use cudarc::driver::result;
use stoker_engine::{RequestEvent, RequestStream};
use stoker_kernels::Device;

/// A kernel that ends in a trap: every later call in the context fails, as after any fault of a kernel or of the chip.
const TRAP: &str = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry stop() { trap; }";
/// A hang would be the worst outcome of all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn trap(device: &Device) {
    device.context().bind_to_thread().expect("the context is there");
    let stream = device.context().new_stream().expect("a stream");
    let [image, name] = [TRAP, "stop"].map(|text| CString::new(text).expect("no NUL in it"));
    // SAFETY: the image is PTX that ends with a NUL; the kernel takes no arguments and touches no memory.
    let launched = unsafe {
        result::module::load_data(image.as_ptr().cast())
            .and_then(|module| result::module::get_function(module, name))
            .and_then(|stop| result::launch_kernel(stop, (1, 1, 1), (1, 1, 1), 0, stream.cu_stream(), &mut []))
    };
    launched.expect("it starts");
}

/// The stream's last event, or nothing if it does not end in time.
pub(crate) fn terminal(mut stream: RequestStream) -> Option<RequestEvent> {
    let (send, received) = mpsc::channel();
    thread::spawn(move || {
        while let Some(event) = stream.blocking_next() {
            if matches!(event, RequestEvent::Finished { .. }) {
                let _ = send.send(event);
            }
        }
    });
    received.recv_timeout(PATIENCE).ok()
}
