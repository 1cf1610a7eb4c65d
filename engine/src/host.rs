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

/// Where a container finds its memory limit: cgroup v2, then v1.
const CONTAINER_LIMITS: [&str; 2] = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];

/// A machine that does not say how much memory it has is taken for a small one.
const FALLBACK_BYTES: u64 = 2 << 30;

/// `None` without a limit: v2 says `max`, v1 a number beyond any machine.
fn limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
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
    fn the_machines_memory_is_read_in_bytes() {
        assert_eq!(mem_total("MemTotal:       24576 kB\nMemFree: 1 kB\n"), Some(24 << 20));
        assert_eq!(mem_total("nothing"), None);
    }
}
