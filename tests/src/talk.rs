//! A Python program of `clients` that takes orders: a line of JSON each, and a line of JSON back. It ends when its standard input
//! does, also when the test is killed.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::python::python_with;

/// See the module.
pub struct Talk {
    child: Child,
    pipes: Mutex<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Talk {
    /// Starts a program; what it says first. An error is a reason to skip.
    pub fn start(script: &str, requirements: &str) -> Result<(Self, Value)> {
        let script = format!("{}/clients/{script}", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new(python_with(requirements)?);
        command.args(["-B", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("start {script}"))?;
        let (stdin, stdout) = (child.stdin.take().context("a pipe")?, child.stdout.take().context("a pipe")?);
        let mut lines = BufReader::new(stdout);
        let said = answer(&mut lines)?;
        Ok((Self { child, pipes: Mutex::new((stdin, lines)) }, said))
    }

    /// Gives an order and waits for what comes of it.
    pub fn order(&self, order: &Value) -> Result<Value> {
        let mut pipes = self.pipes.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(pipes.0, "{order}").with_context(|| format!("order {order}"))?;
        answer(&mut pipes.1).with_context(|| format!("order {order}"))
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn answer(lines: &mut impl BufRead) -> Result<Value> {
    let mut line = String::new();
    lines.read_line(&mut line)?;
    serde_json::from_str(&line).with_context(|| format!("it answers \"{}\"", line.trim()))
}
