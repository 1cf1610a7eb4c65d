//! transformers: one Python process for the whole run, asked line by line.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use stoker_figures::System;

use super::{PeerSetup, readings, refuse};
use crate::{
    case::{Case, Size},
    reading::{Phases, Reading},
    session::Contender,
};

const NAME: &str = "transformers";
const PROGRAM: &str = include_str!("../../../tools/bench/transformers-peer.py");

/// A Python process that holds the model; ended when dropped.
#[derive(Debug)]
pub struct Transformers {
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
    version: String,
}

impl Transformers {
    /// Starts Python and waits until the model is loaded.
    pub fn open(setup: &PeerSetup) -> Result<Self> {
        let python = setup.cache.join("venv-goldens/bin/python");
        let mut child = start(&python, setup)
            .with_context(|| format!("not installed: {} needs torch and transformers", python.display()))?;
        let asks = child.stdin.take().context("its input")?;
        let answers = BufReader::new(child.stdout.take().context("its output")?);
        let mut peer = Self { child, asks, answers, version: String::new() };
        peer.version = peer.answer()?["version"].as_str().context("its version")?.to_owned();
        Ok(peer)
    }

    fn measure(&mut self, size: Size) -> Result<Phases> {
        let Size { requests, prompt_tokens, completion_tokens } = size;
        let ask = json!({"requests": requests, "prompt": prompt_tokens, "completion": completion_tokens});
        writeln!(self.asks, "{ask}").context("ask it")?;
        let answer = self.answer()?;
        let seconds = |field: &str| answer[field].as_f64().with_context(|| format!("no {field} in {answer}"));
        Ok(Phases { first: seconds("first")?, last: seconds("last")? })
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.answers.read_line(&mut line).context("hear it")?;
        serde_json::from_str(&line).with_context(|| format!("it answered {line:?}"))
    }
}

fn start(python: &Path, setup: &PeerSetup) -> std::io::Result<Child> {
    Command::new(python)
        .args(["-c", PROGRAM])
        .arg(&setup.model)
        .arg(setup.threads.to_string())
        .envs([("HF_HUB_OFFLINE", "1"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
}

impl Drop for Transformers {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Contender for Transformers {
    fn system(&self) -> System {
        System { name: NAME.to_owned(), version: self.version.clone() }
    }

    fn warm_up(&mut self, case: Case) -> Result<()> {
        refuse(case, NAME)?;
        let size = case.size();
        self.measure(Size { completion_tokens: size.completion_tokens.min(4), ..size }).map(drop)
    }

    fn sample(&mut self, case: Case) -> Result<Vec<Reading>> {
        readings(case, self.measure(case.size())?, NAME)
    }
}
