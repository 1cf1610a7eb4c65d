//! The wall clock of one process, which a test sets: a library that is preloaded and reads a file.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result, ensure};

/// See the module. It is gone when it is dropped.
#[derive(Debug)]
pub struct WallClock {
    dir: tempfile::TempDir,
}

impl WallClock {
    /// One that is right.
    pub fn new() -> Result<Self> {
        let clock = Self { dir: tempfile::tempdir()? };
        let source = clock.dir.path().join("clock.c");
        fs::write(&source, include_str!("clock.c"))?;
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(clock.library()).arg(&source).arg("-ldl");
        ensure!(compiler.status().context("a C compiler")?.success(), "the clock is not compiled");
        clock.set(0)?;
        Ok(clock)
    }

    /// What a process is started with, to go by it.
    pub fn environment(&self) -> [(&'static str, String); 2] {
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        [("LD_PRELOAD", path(self.library())), ("STOKER_TEST_CLOCK", path(self.file()))]
    }

    /// From now on it is so many seconds ahead.
    pub fn set(&self, ahead: i64) -> Result<()> {
        let file = File::options().create(true).truncate(false).write(true).open(self.file())?;
        Ok(file.write_all_at(&ahead.to_ne_bytes(), 0)?)
    }

    fn library(&self) -> PathBuf {
        self.dir.path().join("clock.so")
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("ahead")
    }
}
