//! Other systems on the same model, the same machine and the same samples' turn. Each says how it is installed when it is
//! not; none is ever downloaded by a measurement.

mod llama_cpp;
mod transformers;

pub use llama_cpp::LlamaCpp;
pub use transformers::Transformers;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use stoker_engine::ops::Isa;

use crate::{
    case::Case,
    reading::{Phases, Reading},
};

/// Which peers there are on a machine without a GPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Peer {
    /// llama.cpp, built by `tools/bench/llama-cpp.sh`.
    #[value(name = "llama.cpp")]
    LlamaCpp,
    /// transformers on PyTorch, from the environment that makes the engine's goldens.
    Transformers,
}

/// What a peer measures.
#[derive(Clone, Debug)]
pub struct PeerSetup {
    /// Where peers and converted models are kept.
    pub cache: PathBuf,
    /// The model: a directory in Hugging Face's layout, or a GGUF file.
    pub model: PathBuf,
    /// Compute threads.
    pub threads: usize,
    /// Instructions that it is built for, where those are not the machine's best.
    pub isa: Option<Isa>,
}

fn readings(case: Case, phases: Phases, peer: &str) -> Result<Vec<Reading>> {
    let readings = phases.readings(case);
    ensure!(!readings.is_empty(), "{peer} has no {case}");
    Ok(readings)
}

/// A peer would have to be taught the cases that are about our process or about a prefix cache.
fn refuse(case: Case, peer: &str) -> Result<()> {
    let known =
        matches!(case, Case::Prefill(_) | Case::Decode(_) | Case::SingleStream | Case::Ttft(_) | Case::Concurrent(_));
    ensure!(known, "{peer} is not asked {case}");
    Ok(())
}
