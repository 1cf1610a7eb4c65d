//! Launches recorded once and replayed as one: a CUDA graph. Owns the recording; decides nothing about what is launched.

use std::fmt;

use cudarc::driver::{CudaGraph, sys};

use crate::{Device, KernelError};

/// Recorded launches. What they point to must live as long as the graph is replayed.
pub struct Graph {
    inner: CudaGraph,
}

// SAFETY: a graph may be used from any thread, one at a time; it is owned and launching it takes `&mut self`.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

impl Device {
    /// Records what `launch` launches on the device's stream; nothing runs yet. `launch` may neither allocate nor wait, and
    /// products must have chosen their algorithms: launch the same once before.
    pub fn capture(&self, launch: impl FnOnce() -> Result<(), KernelError>) -> Result<Graph, KernelError> {
        let failed = KernelError::driver("capture a graph");
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream().begin_capture(mode).map_err(&failed)?;
        let launched = launch();
        // Ended on the way out of a failure too: a stream that keeps capturing is of no use to anyone.
        let graph = self.stream().end_capture(sys::CUgraphInstantiate_flags_enum(0));
        launched?;
        let inner = graph.map_err(&failed)?.expect("a stream that was capturing ends with a graph");
        inner.upload().map_err(&failed)?;
        Ok(Graph { inner })
    }
}

impl Graph {
    /// Replays the launches on the stream they were recorded on.
    pub fn launch(&mut self) -> Result<(), KernelError> {
        self.inner.launch().map_err(KernelError::driver("replay a graph"))
    }
}
