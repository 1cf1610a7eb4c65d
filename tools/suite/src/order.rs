//! In which order parts are begun, and how many seats a machine has for tests that wait. Plain functions over values.

use std::{collections::BTreeMap, fmt, fs, num::NonZero, thread};

use anyhow::{Context, Result};

use crate::part::{Lane, Part};

/// Of a test's cluster: etcd, API server, controllers, operator, agents.
const BYTES_PER_SEAT: u64 = 900 << 20;
/// A cluster takes 4 s of a core to start, and then waits most of the time. With four, all took 637 and 690 s on two cores, with three 860; but the load
/// was nine then, beside which tests of patience say more of the machine than of us.
const SEATS_PER_CORE: usize = 2;
/// Without the parts that keep cores busy. With two a core, a fifth of both cores waited.
const SEATS_PER_CORE_WITHOUT_DEAR: usize = 3;

/// What there is to run tests on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Machine {
    pub(crate) cores: usize,
    /// Memory that nobody needs.
    pub(crate) available_bytes: u64,
    pub(crate) seats_per_core: usize,
}

impl Machine {
    /// As it is now, for a run of all parts or of those that are not dear.
    pub(crate) fn this(runs_all: bool) -> Result<Self> {
        let said = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let available_bytes = available_bytes(&said).context("the kernel says how much memory is free")?;
        Ok(Self {
            cores,
            available_bytes,
            seats_per_core: if runs_all { SEATS_PER_CORE } else { SEATS_PER_CORE_WITHOUT_DEAR },
        })
    }

    /// Tests of the whole system at once.
    pub(crate) fn seats(self) -> usize {
        let by_memory = usize::try_from(self.available_bytes / BYTES_PER_SEAT).unwrap_or(usize::MAX);
        by_memory.min(self.cores * self.seats_per_core).max(1)
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.available_bytes as f64 / f64::from(1 << 30);
        write!(f, "{} tests at once that wait: {} cores, {gib:.1} GiB available", self.seats(), self.cores)
    }
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Seconds that parts took, by their titles, as a log of before says.
pub(crate) fn times(log: &str) -> BTreeMap<String, f64> {
    let (mut times, mut title) = (BTreeMap::new(), None);
    for line in log.lines() {
        if let Some(rest) = line.trim_start().strip_prefix("Running ") {
            title = rest.split(" (").next();
        } else if let Some((_, rest)) = line.split_once("; finished in ")
            && let (Some(title), Some(seconds)) = (title, rest.strip_suffix('s').and_then(|text| text.parse().ok()))
        {
            times.insert(title.to_owned(), seconds);
        }
    }
    times
}

/// What took longest is begun first, so that nothing long is left at the end; before it what nobody knows.
pub(crate) fn longest_first(parts: &mut [Part], took: &BTreeMap<String, f64>) {
    let took = |part: &Part| took.get(&part.title).copied().unwrap_or(f64::INFINITY);
    parts.sort_by(|one, other| took(other).total_cmp(&took(one)).then_with(|| one.title.cmp(&other.title)));
}

/// Those that took most, most first.
pub(crate) fn dearest(mut costs: Vec<(String, f64)>, n_most: usize) -> Vec<(String, f64)> {
    costs.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    costs.truncate(n_most);
    costs
}

/// Takes the parts of a lane out of all, in their order.
pub(crate) fn lane(parts: &[Part], lane: Lane) -> Vec<Part> {
    parts.iter().filter(|part| part.lane == lane).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(title: &str) -> Part {
        let (program, folder) = ("/t/program".into(), "/w".into());
        Part { title: title.into(), lane: Lane::Beside, program, arguments: Vec::new(), folder }
    }

    #[test]
    fn memory_or_cores_say_how_many_wait_at_once() {
        let seats = |cores, gib: u64| Machine { cores, available_bytes: gib << 30, seats_per_core: 2 }.seats();
        assert_eq!(seats(2, 22), 4, "cores");
        assert_eq!(seats(8, 6), 6, "memory of a laptop");
        assert_eq!(seats(64, 100), 113, "memory of a server");
        assert_eq!(seats(2, 0), 1, "never none");
    }

    #[test]
    fn the_kernel_says_how_much_memory_is_available() {
        assert_eq!(available_bytes("MemTotal: 9 kB\nMemFree: 7 kB\nMemAvailable:   24 kB\n"), Some(24 << 10));
        assert_eq!(available_bytes("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn what_took_longest_is_begun_first_and_what_is_new_before_it() {
        let log = "     Running tests/tests/a.rs (/t/a-1)\n\nrunning 1 test\ntest x ... ok\n\n\
            test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 2.50s\n\
                 Running tests/tests/b.rs waits (70.2 s, 9.1 of a core)\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 70.01s\n";
        let took = times(log);
        assert_eq!(took, BTreeMap::from([("tests/tests/a.rs".into(), 2.5), ("tests/tests/b.rs waits".into(), 70.01)]));
        let mut parts = ["tests/tests/a.rs", "tests/tests/b.rs waits", "tests/tests/new.rs"].map(part);
        longest_first(&mut parts, &took);
        assert_eq!(parts.map(|part| part.title), ["tests/tests/new.rs", "tests/tests/b.rs waits", "tests/tests/a.rs"]);
    }

    #[test]
    fn those_that_took_most_are_named_most_first() {
        let costs = [("a", 1.0), ("b", 7.5), ("c", 3.0)].map(|(title, seconds)| (title.to_owned(), seconds));
        assert_eq!(dearest(costs.to_vec(), 2), [("b".to_owned(), 7.5), ("c".to_owned(), 3.0)]);
    }
}
