//! One long-running process of the cluster and its log. Ends with the namespaces, so nothing here stops it.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::namespaces::STATE;

/// A process with a name.
#[derive(Debug)]
pub(crate) struct Daemon {
    name: &'static str,
    child: Child,
}

impl Daemon {
    /// Starts `command` with its output in the log of `name`.
    pub(crate) fn start(name: &'static str, command: &mut Command) -> Result<Self> {
        let log = File::create(log_path(name)).with_context(|| format!("create log of {name}"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share log")?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        Ok(Self { name, child })
    }

    /// An error with the end of the log when the process is gone.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.child.try_wait().with_context(|| format!("look at {}", self.name))? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}):\n{}", self.name, log_tail(&log_path(self.name), 15)),
        }
    }
}

/// Where the logs of all daemons are.
pub(crate) fn log_directory() -> PathBuf {
    Path::new(STATE).join("logs")
}

/// The last lines of a log.
pub(crate) fn log_tail(path: &Path, n_lines: usize) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(n_lines)..].join("\n")
}

fn log_path(name: &str) -> PathBuf {
    log_directory().join(format!("{name}.log"))
}
