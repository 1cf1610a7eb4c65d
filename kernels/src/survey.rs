//! What this machine and this program have for computing on a GPU, and what is missing: for a person who asks. Opens the
//! devices; launches nothing.

use std::fmt;

use cudarc::driver::CudaContext;

use crate::{
    Device, KernelError, Kernels,
    blas::{self, Blas},
    built_for, built_with_kernels,
    device::driver_version,
    error::cuda_version,
};

/// One line of the survey.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// What was looked for.
    pub part: &'static str,
    /// What was found, or why nothing was.
    pub found: Result<String, String>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.found {
            Ok(found) => write!(f, "ok       {:<10} {found}", self.part),
            Err(reason) => write!(f, "missing  {:<10} {reason}", self.part),
        }
    }
}

/// Looks at everything that a GPU needs, in the order in which it is needed; what is missing keeps it from nothing but what
/// cannot be asked without it. All found: the first GPU can be used.
pub fn survey() -> Vec<Finding> {
    let kernels = match built_with_kernels() {
        true => Ok(format!("compiled for sm_{}", built_for().replace(',', ", sm_"))),
        false => Err(KernelError::NotBuilt.to_string()),
    };
    let driver = driver_version().map(|version| format!("for CUDA {}", cuda_version(version)));
    let has_driver = driver.is_ok();
    let blas = blas::find_library().map(|()| "the library loads".to_owned());
    let mut findings = vec![
        Finding { part: "kernels", found: kernels },
        Finding { part: "driver", found: driver.map_err(|error| error.to_string()) },
        Finding { part: "cuBLASLt", found: blas.map_err(|error| error.to_string()) },
    ];
    findings.extend(if has_driver { asked_of_driver() } else { not_asked() });
    findings
}

fn asked_of_driver() -> Vec<Finding> {
    let usable = Finding { part: "use", found: usable().map_err(|error| error.to_string()) };
    gpus().into_iter().chain([usable]).collect()
}

fn not_asked() -> Vec<Finding> {
    let finding = |part| Finding { part, found: Err("not known: it takes a driver to ask".into()) };
    vec![finding("GPU"), finding("use")]
}

fn gpus() -> Vec<Finding> {
    let finding = |found| Finding { part: "GPU", found };
    match CudaContext::device_count() {
        Ok(0) => vec![finding(Err("the driver finds none".into()))],
        Ok(n) => (0..n.unsigned_abs() as usize).map(|ordinal| finding(gpu(ordinal))).collect(),
        Err(error) => vec![finding(Err(error.to_string()))],
    }
}

fn gpu(ordinal: usize) -> Result<String, String> {
    let device = Device::open(ordinal).map_err(|error| error.to_string())?;
    let (free, total) = device.memory().map_err(|error| error.to_string())?;
    let name = device.name().map_err(|error| error.to_string())?;
    let (major, minor) = device.properties().capability;
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    Ok(format!("{ordinal}: {name}, compute capability {major}.{minor}, {:.1} of {:.1} GiB free", gib(free), gib(total)))
}

/// Kernels and cuBLASLt on the first GPU.
fn usable() -> Result<String, KernelError> {
    let device = Device::open(0)?;
    let kernels = Kernels::load(&device)?;
    Blas::new(&device)?;
    let (major, minor) = kernels.properties().capability;
    Ok(format!("GPU 0 runs kernels for compute capability {major}.{minor} and cuBLASLt"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_listed_whatever_is_missing_and_nothing_panics() {
        let findings = survey();
        let mut parts: Vec<_> = findings.iter().map(|finding| finding.part).collect();
        // One line for each GPU.
        parts.dedup();
        assert_eq!(parts, ["kernels", "driver", "cuBLASLt", "GPU", "use"]);
        let all_found = findings.iter().all(|finding| finding.found.is_ok());
        let all_there = built_with_kernels() && blas::find_library().is_ok() && Device::open(0).is_ok();
        assert_eq!(all_found, all_there);
    }
}
