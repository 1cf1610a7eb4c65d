//! Parts of the suite: what one process runs, and beside what it may run. Starts nothing.

use std::{collections::BTreeMap, path::PathBuf};

use crate::program::Program;

/// The program whose tests wait for more than they compute. Each test is a part, but those of a module that share a cluster are one.
const SYSTEM: &str = "system";
/// Tests at once that share a cluster. They wait for it and for each other: together they take as much of the cores as one with its own.
const SHARING_MAX: usize = 4;
/// Titles of programs that compare clocks: what they measure of a machine that does something else is not theirs.
const CLOCKS: [&str; 1] = ["loadgen/tests/known_delays.rs"];

/// Beside what a part may run.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Lane {
    /// It waits: beside others, as many as there is memory for.
    Beside,
    /// It computes: one after another, on what the others leave of the cores.
    Behind,
    /// It compares clocks: when all others are over, one after another.
    Alone,
}

/// What one process runs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Part {
    /// The file that holds its tests, and which of them if it is one.
    pub(crate) title: String,
    pub(crate) lane: Lane,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// Where it runs.
    pub(crate) folder: PathBuf,
}

/// The parts of a program that has these tests; those of modules that share a cluster stay together.
pub(crate) fn of(program: &Program, tests: &[String], shares: impl Fn(&str) -> bool) -> Vec<Part> {
    if program.name != SYSTEM {
        return vec![whole(program)];
    }
    let mut modules: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for test in tests {
        let module = test.split_once("::").map_or(SYSTEM, |(module, _)| module);
        modules.entry(module).or_default().push(test.clone());
    }
    let parts = modules.into_iter().flat_map(|(module, tests)| {
        if shares(module) { vec![together(program, module, tests)] } else { one_by_one(program, module, tests) }
    });
    parts.collect()
}

fn whole(program: &Program) -> Part {
    let folder = program.folder.file_name().unwrap_or_default().display().to_string();
    let title = format!("{folder}/{}", program.source);
    let lane = if CLOCKS.contains(&title.as_str()) { Lane::Alone } else { Lane::Behind };
    Part { title, lane, program: program.path.clone(), arguments: Vec::new(), folder: program.folder.clone() }
}

fn together(program: &Program, module: &str, tests: Vec<String>) -> Part {
    let mut arguments = vec!["--test-threads".to_owned(), tests.len().min(SHARING_MAX).to_string()];
    arguments.push("--exact".to_owned());
    arguments.extend(tests);
    waiting(program, format!("tests/tests/{module}.rs"), arguments)
}

fn one_by_one(program: &Program, module: &str, tests: Vec<String>) -> Vec<Part> {
    let part = |test: String| {
        let name = test.strip_prefix(&format!("{module}::")).unwrap_or(&test);
        waiting(program, format!("tests/tests/{module}.rs {name}"), vec!["--exact".to_owned(), test])
    };
    tests.into_iter().map(part).collect()
}

fn waiting(program: &Program, title: String, arguments: Vec<String>) -> Part {
    let (program, folder) = (program.path.clone(), program.folder.clone());
    Part { title, lane: Lane::Beside, program, arguments, folder }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str) -> Program {
        let (source, path, folder) = (format!("tests/{name}.rs"), "/t/program".into(), "/w/fit/".into());
        Program { name: name.into(), source, path, folder }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_program_that_computes_is_one_part() {
        let parts = of(&program("periods"), &names(&["a::b", "c"]), |_| true);
        let [part] = &parts[..] else { panic!("{parts:?}") };
        assert_eq!((part.title.as_str(), part.lane), ("fit/tests/periods.rs", Lane::Behind));
        assert!(part.arguments.is_empty(), "it runs all that it has");
    }

    #[test]
    fn a_program_that_compares_clocks_runs_when_nothing_else_does() {
        for title in CLOCKS {
            let (folder, source) = title.split_once('/').unwrap();
            // From where tests run: two checkouts may share what was built in one of them.
            let root = PathBuf::from("../..").join(folder);
            assert!(root.join(source).is_file(), "{title} is there");
            let program = Program { source: source.into(), folder: root, ..program("known_delays") };
            assert_eq!(of(&program, &[], |_| false)[0].lane, Lane::Alone);
        }
    }

    #[test]
    fn every_test_of_the_system_is_in_one_part_by_its_whole_name() {
        let tests = names(&["fetch::a", "repairs::a", "fetch::b", "repairs::c::d", "bare"]);
        let parts = of(&program("system"), &tests, |module| module == "repairs");
        let titles: Vec<_> = parts.iter().map(|part| part.title.as_str()).collect();
        let [fetch, repairs] = ["tests/tests/fetch.rs", "tests/tests/repairs.rs"];
        assert_eq!(titles, [&format!("{fetch} a"), &format!("{fetch} b"), repairs, "tests/tests/system.rs bare"]);
        assert_eq!(parts[0].arguments, names(&["--exact", "fetch::a"]));
        let shared = names(&["--test-threads", "2", "--exact", "repairs::a", "repairs::c::d"]);
        assert_eq!(parts[2].arguments, shared, "they share a cluster");
        assert!(parts.iter().all(|part| part.lane == Lane::Beside));
        let is_test = |argument: &&String| tests.contains(argument);
        let mut all: Vec<_> = parts.iter().flat_map(|part| part.arguments.iter().filter(is_test).cloned()).collect();
        all.sort();
        assert_eq!(all, names(&["bare", "fetch::a", "fetch::b", "repairs::a", "repairs::c::d"]));
    }

    #[test]
    fn of_many_tests_that_share_a_cluster_some_run_at_once() {
        let tests: Vec<String> = (0..20).map(|number| format!("lifecycle::t{number}")).collect();
        assert_eq!(of(&program("system"), &tests, |_| true)[0].arguments[1], SHARING_MAX.to_string());
    }
}
