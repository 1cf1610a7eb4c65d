//! A control plane that parts use one after another, each as if it were new: starting one takes as much of a core as half of the parts that use
//! it. A program of the tests keeps it, which also knows what to forget.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, ensure};

/// Its program, among those that cargo builds.
pub(crate) const PROGRAM: &str = "lend-control-plane";
/// What tells a test which one it may borrow.
pub(crate) const LEASE: &str = "STOKER_TEST_CONTROL_PLANE";
/// Of Go's heaps, beside what is in use, until it is collected. Starting an API server is a fifth cheaper than with 100.
const GARBAGE_PERCENT: &str = "400";

/// One that runs. It ends with this value.
pub(crate) struct Plane {
    program: Child,
    words: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    lease: String,
}

impl Plane {
    /// Starts one and waits until it is ready.
    pub(crate) fn start(program: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        tune(&mut command).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = command.spawn().with_context(|| format!("start {PROGRAM}"))?;
        let words = program.stdin.take();
        let answers = BufReader::new(program.stdout.take().context("its output is a pipe")?);
        let mut plane = Self { program, words, answers, lease: String::new() };
        plane.read_lease()?;
        Ok(plane)
    }

    /// Which one it is.
    pub(crate) fn lease(&self) -> &str {
        &self.lease
    }

    /// Makes it as new.
    pub(crate) fn renew(&mut self) -> Result<()> {
        self.words.as_mut().context("its input is a pipe")?.write_all(b"\n")?;
        self.read_lease()
    }

    fn read_lease(&mut self) -> Result<()> {
        self.lease.clear();
        self.answers.read_line(&mut self.lease)?;
        ensure!(self.lease.ends_with('\n'), "{PROGRAM} ended; what it met stands above");
        self.lease.pop();
        Ok(())
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.words = None;
        if let Err(error) = self.program.wait() {
            eprintln!("wait for {PROGRAM}: {error}");
        }
    }
}

/// Of a program that starts servers, where nobody said otherwise.
pub(crate) fn tune(command: &mut Command) -> &mut Command {
    match env::var_os("GOGC") {
        Some(_) => command,
        None => command.env("GOGC", GARBAGE_PERCENT),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

    use tempfile::{TempDir, tempdir};

    use super::*;

    /// A program that does this.
    fn program(script: &str) -> (TempDir, PathBuf) {
        let dir = tempdir().unwrap();
        let path = dir.path().join("lender");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        (dir, path)
    }

    #[test]
    fn a_lease_is_read_at_the_start_and_each_time_that_it_is_renewed() {
        let (_dir, path) = program("echo first; while read word; do echo again; done");
        let mut plane = Plane::start(&path).unwrap();
        assert_eq!(plane.lease(), "first");
        for _ in 0..2 {
            plane.renew().unwrap();
            assert_eq!(plane.lease(), "again");
        }
    }

    #[test]
    fn one_that_does_not_start_or_cannot_be_renewed_is_an_error() {
        let (_dir, path) = program("exit 1");
        assert!(Plane::start(&path).is_err());
        let (_dir, path) = program("echo first; read word");
        let mut plane = Plane::start(&path).unwrap();
        assert!(plane.renew().is_err() && plane.renew().is_err());
    }
}
