//! What the machine or the container allows this process: memory and CPUs. Reads the kernel's files, decides nothing.

use std::{fs, thread};

/// Bytes the process may use: the container's limit, or the machine's memory.
pub(crate) fn memory_limit_bytes() -> u64 {
    let containers = CONTAINER_LIMITS.map(|file| fs::read_to_string(file).ok().and_then(|text| limit(&text)));
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_total(&text));
    containers.into_iter().chain([machine]).flatten().min().unwrap_or(FALLBACK_BYTES)
}

/// CPUs the process may use, the container's quota included.
pub(crate) fn n_cpus() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// CPUs that the container's quota is worth, which may be a part of one; `None` without a quota.
pub(crate) fn cpu_quota() -> Option<f64> {
    fs::read_to_string("/sys/fs/cgroup/cpu.max").ok().and_then(|text| quota(&text))
}

/// What is wrong with so many compute threads, if something is: threads meet at every product, so that one that does not run
/// stops all.
pub(crate) fn crowding(threads: usize, n_cpus: usize, quota: Option<f64>) -> Option<String> {
    match quota {
        Some(quota) if quota < threads as f64 => Some(format!(
            "{threads} compute threads have {quota:.2} CPUs by the container's limit: the kernel stops all of them for a part of \
             each tenth of a second; raise the limit to {threads}"
        )),
        _ if threads > n_cpus => Some(format!(
            "{threads} compute threads share {n_cpus} CPUs: they wait for each other at every product; set threads to {n_cpus}"
        )),
        _ => None,
    }
}

/// Where a container finds its memory limit: cgroup v2, then v1.
const CONTAINER_LIMITS: [&str; 2] = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];

/// A machine that does not say how much memory it has is taken for a small one.
const FALLBACK_BYTES: u64 = 2 << 30;

/// `None` without a limit: v2 says `max`, v1 a number beyond any machine.
fn limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// `max 100000` or `QUOTA PERIOD`, in microseconds, as cgroup v2 has it.
fn quota(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then_some(quota / period)
}

fn mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_containers_limit_is_a_number_or_none() {
        assert_eq!(limit("268435456\n"), Some(256 << 20));
        assert_eq!(limit("max\n"), None);
    }

    #[test]
    fn a_quota_may_be_a_part_of_a_cpu_and_nonsense_is_none() {
        assert_eq!(["50000 100000\n", "150000 100000"].map(quota), [Some(0.5), Some(1.5)]);
        assert_eq!(["max 100000\n", "", "1", "1 0", "x y"].map(quota), [None; 5]);
    }

    #[test]
    fn threads_that_cannot_all_run_are_named_with_what_would_help() {
        assert_eq!(crowding(2, 2, None), None);
        assert_eq!(crowding(1, 1, Some(1.5)), None);
        let below_one = crowding(1, 1, Some(0.5)).unwrap();
        assert!(below_one.contains("1 compute threads have 0.50 CPUs") && below_one.contains("to 1"), "{below_one}");
        let too_many = crowding(8, 2, None).unwrap();
        assert!(too_many.contains("8 compute threads share 2 CPUs") && too_many.ends_with("to 2"), "{too_many}");
    }

    #[test]
    fn the_machines_memory_is_read_in_bytes() {
        assert_eq!(mem_total("MemTotal:       24576 kB\nMemFree: 1 kB\n"), Some(24 << 20));
        assert_eq!(mem_total("nothing"), None);
    }
}
