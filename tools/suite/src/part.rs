//! Parts of the suite: what one process runs, and beside what it may run. Starts nothing.

use std::{collections::BTreeMap, path::PathBuf};

use crate::program::Program;

/// The program whose tests wait for more than they compute. Each of its modules is a part: the tests of one share a cluster.
const SYSTEM: &str = "system";
/// Tests of a part at once: beyond that a cluster of its own is what they wait for.
const SEATS_MAX: usize = 4;

/// Beside what a part may run.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Lane {
    /// It waits: beside others, as many as there is memory for.
    Beside,
    /// It computes: one after another, on what the others leave of the cores.
    Behind,
}

/// What one process runs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Part {
    /// The file that holds its tests.
    pub(crate) title: String,
    pub(crate) lane: Lane,
    /// Of its tests at once; none to leave it to the program.
    pub(crate) seats: Option<usize>,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// Where it runs.
    pub(crate) folder: PathBuf,
}

/// The parts of a program that has these tests.
pub(crate) fn of(program: &Program, tests: &[String]) -> Vec<Part> {
    if program.name != SYSTEM {
        return vec![whole(program)];
    }
    let mut modules: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for test in tests {
        let module = test.split_once("::").map_or(SYSTEM, |(module, _)| module);
        modules.entry(module).or_default().push(test.clone());
    }
    modules.into_iter().map(|(module, tests)| module_of(program, module, tests)).collect()
}

fn whole(program: &Program) -> Part {
    let folder = program.folder.file_name().unwrap_or_default().display().to_string();
    Part {
        title: format!("{folder}/{}", program.source),
        lane: Lane::Behind,
        seats: None,
        program: program.path.clone(),
        arguments: Vec::new(),
        folder: program.folder.clone(),
    }
}

fn module_of(program: &Program, module: &str, tests: Vec<String>) -> Part {
    let seats = tests.len().min(SEATS_MAX);
    let mut arguments = vec!["--test-threads".to_owned(), seats.to_string(), "--exact".to_owned()];
    arguments.extend(tests);
    let (path, folder) = (program.path.clone(), program.folder.clone());
    let title = format!("tests/tests/{module}.rs");
    Part { title, lane: Lane::Beside, seats: Some(seats), program: path, arguments, folder }
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
        let parts = of(&program("periods"), &names(&["a::b", "c"]));
        let [part] = &parts[..] else { panic!("{parts:?}") };
        assert_eq!((part.title.as_str(), part.lane), ("fit/tests/periods.rs", Lane::Behind));
        assert!(part.arguments.is_empty(), "it runs all that it has");
    }

    #[test]
    fn every_test_of_the_system_is_in_one_part_by_its_whole_name() {
        let tests = names(&["fetch::a", "fetch_web::a", "fetch::b", "fetch_web::c::d", "bare"]);
        let parts = of(&program("system"), &tests);
        let titles: Vec<_> = parts.iter().map(|part| (part.title.as_str(), part.seats)).collect();
        let two = Some(2);
        assert_eq!(
            titles,
            [("tests/tests/fetch.rs", two), ("tests/tests/fetch_web.rs", two), ("tests/tests/system.rs", Some(1))]
        );
        assert_eq!(parts[0].arguments, names(&["--test-threads", "2", "--exact", "fetch::a", "fetch::b"]));
        let mut all: Vec<_> = parts.iter().flat_map(|part| part.arguments[3..].to_vec()).collect();
        all.sort();
        assert_eq!(all, names(&["bare", "fetch::a", "fetch::b", "fetch_web::a", "fetch_web::c::d"]));
    }

    #[test]
    fn a_part_with_many_tests_runs_some_of_them_at_once() {
        let tests: Vec<String> = (0..20).map(|number| format!("chart::t{number}")).collect();
        assert_eq!(of(&program("system"), &tests)[0].seats, Some(SEATS_MAX));
    }
}
