//! The GPUs of the node and who has which: what a device plugin and a container runtime do on a real one. A container sees
//! the GPUs that its pod was given and no other; the CUDA driver keeps to what `CUDA_VISIBLE_DEVICES` says.

use std::{
    env,
    process::Command,
    str::FromStr,
    sync::{Arc, Mutex},
};

use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ClusterError;

/// The resource by which pods ask for them.
pub(crate) const GPU_RESOURCE: &str = "nvidia.com/gpu";

/// What the node says it has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Gpus {
    /// So many that exist only in the scheduler's books.
    Pretended(u32),
    /// Those of this machine.
    Present {
        /// By UUID.
        uuids: Vec<String>,
        /// How often each is offered: above 1, pods share it by time, as a device plugin can be told to let them.
        shares: usize,
    },
}

impl Gpus {
    /// All GPUs that the driver of this machine lists, each offered so often.
    ///
    /// # Errors
    /// There is no `nvidia-smi`, or it fails: without a driver there are none to offer.
    pub fn of_this_machine(shares: usize) -> Result<Self, ClusterError> {
        let asked = Command::new("nvidia-smi").args(["--query-gpu=uuid", "--format=csv,noheader"]).output();
        let output = asked.map_err(ClusterError::process("run", "nvidia-smi"))?;
        if !output.status.success() {
            return Err(ClusterError::NoGpus(String::from_utf8_lossy(&output.stdout).trim().to_owned()));
        }
        let listed = String::from_utf8_lossy(&output.stdout);
        let uuids = listed.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
        Ok(Self::Present { uuids, shares })
    }

    /// How many the node offers.
    pub fn count(&self) -> usize {
        match self {
            Self::Pretended(count) => *count as usize,
            Self::Present { uuids, shares } => uuids.len() * shares,
        }
    }
}

impl FromStr for Gpus {
    type Err = String;

    /// `here`, `here:SHARES`, or a number to pretend.
    fn from_str(text: &str) -> Result<Self, String> {
        let known = "give a number, here for the GPUs of this machine, or here:2 to offer each twice";
        let Some(shares) = text.strip_prefix("here") else {
            return text.parse().map(Self::Pretended).map_err(|_not| known.to_owned());
        };
        let shares = if shares.is_empty() { Some(1) } else { shares.strip_prefix(':').and_then(|n| n.parse().ok()) };
        let shares = shares.filter(|shares| *shares > 0).ok_or_else(|| known.to_owned())?;
        Self::of_this_machine(shares).map_err(|error| error.to_string())
    }
}

impl std::fmt::Display for Gpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pretended(count) => write!(f, "{count}"),
            Self::Present { shares, .. } => write!(f, "here:{shares}"),
        }
    }
}

/// The GPUs that no pod has.
#[derive(Debug)]
pub(crate) enum GpuPool {
    Pretended,
    Present { n_free: Arc<Semaphore>, free: Arc<Mutex<Vec<String>>> },
}

impl GpuPool {
    pub(crate) fn new(gpus: &Gpus) -> Self {
        match gpus {
            Gpus::Pretended(_) => Self::Pretended,
            Gpus::Present { uuids, .. } => Self::Present {
                n_free: Arc::new(Semaphore::new(gpus.count())),
                free: Arc::new(Mutex::new(uuids.iter().cycle().take(gpus.count()).cloned().collect())),
            },
        }
    }

    /// As many as the pod asks for. The scheduler binds only what fits, but may do so a moment before the pod that had them
    /// has given them back; then this waits for that.
    pub(crate) async fn take(&self, pod: &Pod) -> GpusOfPod {
        let Self::Present { n_free, free } = self else { return GpusOfPod::Pretended };
        let wanted = pod.spec.iter().flat_map(|spec| &spec.containers).map(asked_for).sum();
        let permit = Arc::clone(n_free).acquire_many_owned(wanted).await.expect("the pool is never closed");
        let mut held = free.lock().expect("no holder panics");
        let uuids = held.drain(..wanted as usize).collect();
        GpusOfPod::Present { uuids, free: Arc::clone(free), _permit: permit }
    }
}

/// What one pod was given; goes back when this is dropped.
#[derive(Debug)]
pub(crate) enum GpusOfPod {
    Pretended,
    Present {
        uuids: Vec<String>,
        free: Arc<Mutex<Vec<String>>>,
        /// Dropped after the GPUs went back, because [`Drop`] comes before the fields.
        _permit: OwnedSemaphorePermit,
    },
}

impl GpusOfPod {
    /// Their UUIDs, if there are any.
    pub(crate) fn uuids(&self) -> &[String] {
        match self {
            Self::Pretended => &[],
            Self::Present { uuids, .. } => uuids,
        }
    }

    /// The environment that a container runtime would add: only containers that ask for GPUs see any.
    pub(crate) fn variables(&self, container: &Container) -> Vec<(String, String)> {
        let Self::Present { uuids, .. } = self else { return Vec::new() };
        let seen = if asked_for(container) > 0 { uuids.join(",") } else { String::new() };
        let driver = env::var("LD_LIBRARY_PATH").ok().map(|path| ("LD_LIBRARY_PATH".to_owned(), path));
        [("CUDA_VISIBLE_DEVICES".to_owned(), seen)].into_iter().chain(driver).collect()
    }
}

impl Drop for GpusOfPod {
    fn drop(&mut self) {
        if let Self::Present { uuids, free, .. } = self {
            free.lock().expect("no holder panics").append(uuids);
        }
    }
}

fn asked_for(container: &Container) -> u32 {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    limits.and_then(|limits| limits.get(GPU_RESOURCE)?.0.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use tokio::time::timeout;

    use super::*;

    fn pod(n_gpus: u32) -> Pod {
        let limits = json!({GPU_RESOURCE: n_gpus.to_string()});
        let containers = json!([{"name": "agent", "resources": {"limits": limits}}, {"name": "beside"}]);
        serde_json::from_value(json!({"spec": {"containers": containers}})).unwrap()
    }

    fn two() -> GpuPool {
        GpuPool::new(&Gpus::Present { uuids: vec!["GPU-a".to_owned(), "GPU-b".to_owned()], shares: 1 })
    }

    #[tokio::test]
    async fn no_two_pods_have_the_same_and_one_that_comes_too_early_waits() {
        let pool = two();
        let (one, other) = (pool.take(&pod(1)).await, pool.take(&pod(1)).await);
        assert_ne!(one.uuids(), other.uuids());
        let both = pod(2);
        let mut early = Box::pin(pool.take(&both));
        assert!(timeout(Duration::from_millis(1), &mut early).await.is_err());
        drop(one);
        assert!(timeout(Duration::from_millis(1), &mut early).await.is_err());
        drop(other);
        assert_eq!(early.await.uuids().len(), 2);
        assert_eq!(pool.take(&both).await.uuids().len(), 2, "all came back");
    }

    #[tokio::test]
    async fn a_container_that_asked_for_none_sees_none() {
        let pod = pod(1);
        let held = two().take(&pod).await;
        let containers = pod.spec.unwrap().containers;
        let seen = |idx: usize| held.variables(&containers[idx]).remove(0);
        assert_eq!(seen(0), ("CUDA_VISIBLE_DEVICES".to_owned(), "GPU-a".to_owned()));
        assert_eq!(seen(1), ("CUDA_VISIBLE_DEVICES".to_owned(), String::new()));
    }

    #[tokio::test]
    async fn a_gpu_that_is_offered_twice_has_two_pods() {
        let pool = GpuPool::new(&Gpus::Present { uuids: vec!["GPU-a".to_owned()], shares: 2 });
        let (one, other) = (pool.take(&pod(1)).await, pool.take(&pod(1)).await);
        assert_eq!(one.uuids(), other.uuids());
    }

    #[test]
    fn words_that_are_no_gpus_are_refused_with_what_is_known() {
        assert_eq!("3".parse(), Ok(Gpus::Pretended(3)));
        for wrong in ["there", "here:0", "here2", "-1"] {
            assert!(wrong.parse::<Gpus>().unwrap_err().starts_with("give a number"), "{wrong}");
        }
    }

    #[tokio::test]
    async fn pretended_ones_change_nothing_for_a_pod() {
        let held = GpuPool::new(&Gpus::Pretended(2)).take(&pod(1)).await;
        assert!(held.uuids().is_empty() && held.variables(&pod(1).spec.unwrap().containers[0]).is_empty());
    }
}
