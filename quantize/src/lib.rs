//! `stoker-quantize`: a bf16 checkpoint in, one whose projections have eight or four bits out, in the form of compressed-tensors that
//! vLLM, transformers and our engine load. Layer by layer: no more than one layer's weights are in memory as numbers.
//!
//! ```text
//! texts -> calibration -> what enters each projection -> fold (AWQ, SmoothQuant) -> round (nearest, GPTQ) -> shard
//! ```

mod calibration;
mod evaluate;
mod fold;
mod gptq;
mod layers;
mod matrix;
mod output;
mod report;
mod round;
mod run;
mod scheme;

pub use evaluate::{Comparison, compare};
pub use matrix::Matrix;
pub use report::{LayerErrors, Report, html};
pub use round::{Rounded, round};
pub use run::{Progress, Request, run};
pub use scheme::{Format, Method, Scheme};
