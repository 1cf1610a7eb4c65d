//! Every operation on the device against its reference, over odd shapes, with poisoned outputs. `kernel-check` prints the
//! outcomes, `cargo test` asserts them. Measures no time.

mod attention;
mod fixture;
mod gated;
mod int4;
mod linear;
mod packed;
mod pointwise;
mod quantised;
mod ranks;
mod residual;
mod sampling;
mod skinny;
mod unpack;

pub use self::fixture::Gpu;
use crate::{Device, KernelError};

/// Both the output and one intermediate are rounded to bf16, by at most 2^-9 of their size each.
const TWO_ROUNDINGS: f64 = 1.0 / 256.0;

/// One comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The operation.
    pub op: &'static str,
    /// Its shape and options.
    pub case: String,
    /// Distance of the device's result from the reference, relative to the reference's size; infinite where something was
    /// not written, or written out of place.
    pub error: f64,
    /// What rounding explains.
    pub limit: f64,
}

impl Outcome {
    /// Whether rounding explains the difference. A NaN never passes.
    pub fn passes(&self) -> bool {
        self.error <= self.limit
    }
}

/// Comparisons that belong together.
type Group = fn(&mut Gpu) -> Result<Vec<Outcome>, KernelError>;

/// All groups by name.
const GROUPS: [(&str, Group); 17] = [
    ("packed", packed::run),
    ("pointwise", pointwise::run),
    ("linear", linear::run),
    ("linear-few", skinny::run),
    ("invariance", linear::run_invariance),
    ("gated", gated::run),
    ("residual", residual::run),
    ("quantised", quantised::run),
    ("int4", int4::run),
    ("ranks", ranks::run),
    ("attention-decode", attention::decodes),
    ("attention-prefill", attention::prefills),
    ("attention-other-decode", attention::other_decodes),
    ("attention-other-prefill", attention::other_prefills),
    ("sampling-small", sampling::run_small),
    ("sampling-large", sampling::run_large),
    ("unpack", unpack::run),
];

/// Runs the comparisons of every group whose name contains `only`, on one device.
pub fn run(device: &Device, only: &str) -> Result<Vec<Outcome>, KernelError> {
    let mut gpu = Gpu::new(device)?;
    let mut outcomes = Vec::new();
    for (_, group) in GROUPS.iter().filter(|(name, _)| name.contains(only)) {
        outcomes.extend(group(&mut gpu)?);
    }
    Ok(outcomes)
}

/// ‖found - wanted‖ / ‖wanted‖.
fn relative_error(found: &[f32], wanted: &[f32]) -> f64 {
    if found.len() != wanted.len() {
        return f64::INFINITY;
    }
    let square = |x: f64| x * x;
    let difference: f64 = found.iter().zip(wanted).map(|(f, w)| square(f64::from(*f) - f64::from(*w))).sum();
    let size: f64 = wanted.iter().map(|w| square(f64::from(*w))).sum();
    let error = (difference / size.max(f64::MIN_POSITIVE)).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_with_a_hole_is_infinitely_wrong() {
        assert_eq!(relative_error(&[1.0, f32::NAN], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[1.0], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
    }
}
