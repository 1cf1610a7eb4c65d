//! What the machine or the container allows this process: memory and CPUs. Reads the kernel's files, decides nothing.

use std::{collections::BTreeSet, fs, ops::RangeInclusive, thread};

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

/// Cores of those CPUs: two that share a core share its multipliers too, which one thread keeps busy.
pub(crate) fn n_cores() -> usize {
    let siblings = |cpu: usize| fs::read_to_string(format!("{CPUS}/cpu{cpu}/topology/thread_siblings_list")).ok();
    cores(&allowed_cpus(), siblings).clamp(1, n_cpus())
}

/// What is wrong with CPUs on so many NUMA nodes, if something is: weights lie on the node of the thread that read them first, or of
/// whatever process read the file before.
pub(crate) fn far_memory() -> Option<String> {
    let (allowed, nodes) = (allowed_cpus(), fs::read_dir(NODES).into_iter().flatten().flatten());
    let lists = nodes.filter_map(|node| fs::read_to_string(node.path().join("cpulist")).ok());
    spread(lists.filter(|list| touches(list, &allowed)).count())
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

/// Where the kernel describes CPUs and nodes of memory.
const CPUS: &str = "/sys/devices/system/cpu";
const NODES: &str = "/sys/devices/system/node";

/// CPUs that the process may run on; none where the kernel does not say.
fn allowed_cpus() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.map_or_else(Vec::new, |list| ranges(list).flatten().collect())
}

/// `0-3,8,10-11`, as the kernel lists CPUs; what is no number is left out.
fn ranges(list: &str) -> impl Iterator<Item = RangeInclusive<usize>> {
    list.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    })
}

/// Different cores of these CPUs. One whose siblings nobody knows has a core of its own.
fn cores(allowed: &[usize], siblings: impl Fn(usize) -> Option<String>) -> usize {
    let core = |cpu: &usize| siblings(*cpu).unwrap_or_else(|| cpu.to_string()).trim().to_owned();
    allowed.iter().map(core).collect::<BTreeSet<_>>().len()
}

fn touches(list: &str, allowed: &[usize]) -> bool {
    ranges(list).any(|range| allowed.iter().any(|cpu| range.contains(cpu)))
}

fn spread(n_nodes: usize) -> Option<String> {
    (n_nodes > 1).then(|| {
        format!(
            "the process may run on CPUs of {n_nodes} NUMA nodes, whose threads read weights from each other's memory: run one agent a \
             node (numactl --cpunodebind=0 --membind=0; in Kubernetes the kubelet's topologyManagerPolicy single-numa-node)"
        )
    })
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
    fn cpus_of_one_core_are_counted_once() {
        let of_two = |cpu: usize| Some(format!("{},{}\n", cpu % 4, cpu % 4 + 4));
        assert_eq!(cores(&[0, 1, 2, 3, 4, 5, 6, 7], of_two), 4);
        // A container that has one of each core, or both of two.
        assert_eq!(cores(&[0, 1, 2, 3], of_two), 4);
        assert_eq!(cores(&[1, 2, 5, 6], of_two), 2);
        assert_eq!(cores(&[0, 1, 2], |_| None), 3);
        assert_eq!(cores(&[], of_two), 0);
        let here = n_cores();
        assert!((1..=n_cpus()).contains(&here), "{here} of {}", n_cpus());
    }

    #[test]
    fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
        let read = |list| ranges(list).flatten().collect::<Vec<_>>();
        assert_eq!(read("\t0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert!(read("").is_empty() && read("a-b,-,7-").is_empty());
        assert!(touches("0-15,32-47", &[40]) && !touches("0-15", &[16, 17]));
    }

    #[test]
    fn more_than_one_node_is_named_with_what_would_help() {
        assert_eq!([spread(0), spread(1)], [None, None]);
        let two = spread(2).unwrap();
        assert!(two.contains("CPUs of 2 NUMA nodes") && two.contains("numactl"), "{two}");
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
