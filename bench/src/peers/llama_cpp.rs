//! llama.cpp: its own batched bench, one process a sample, on the same weights as GGUF.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stoker_figures::System;

use super::{PeerSetup, readings, refuse};
use crate::{
    case::{Case, Size},
    gguf::{Toolbox, last_lines},
    reading::{Phases, Reading},
    session::Contender,
};

const NAME: &str = "llama.cpp";
/// Room beside the tokens of a case: llama.cpp rounds each sequence up to its own blocks.
const SPARE_TOKENS: u32 = 256;

/// A built llama.cpp and the model as it reads it.
#[derive(Debug)]
pub struct LlamaCpp {
    bench: PathBuf,
    version: String,
    model: PathBuf,
    threads: usize,
}

impl LlamaCpp {
    /// Finds the build in the cache; a model that is no GGUF file is converted, once.
    pub fn open(setup: &PeerSetup) -> Result<Self> {
        let toolbox = Toolbox::open(&setup.cache, setup.isa)?;
        let model = if setup.model.is_dir() { toolbox.convert(&setup.model)? } else { setup.model.clone() };
        let bench = toolbox.program("llama-batched-bench");
        Ok(Self { bench, version: toolbox.version, model, threads: setup.threads })
    }

    fn measure(&self, size: Size) -> Result<Phases> {
        let Size { requests, prompt_tokens, completion_tokens } = size;
        // The first completion token comes with the prompt; a decode of none is not in its tables.
        let decoded = (completion_tokens - 1).max(1);
        let context = requests * (prompt_tokens + decoded + SPARE_TOKENS);
        let output = Command::new(&self.bench)
            .arg("--model")
            .arg(&self.model)
            .args(flag("--threads", self.threads))
            .args(flag("--threads-batch", self.threads))
            .args(flag("--ctx-size", context))
            .args(flag("-npp", prompt_tokens))
            .args(flag("-ntg", decoded))
            // It loses the last line of its log at exit as often as not: the second result is there to be lost.
            .args(flag("-npl", format!("{requests},1")))
            .args(["--batch-size", "2048", "--ubatch-size", "512", "--output-format", "jsonl"])
            .output()
            .with_context(|| format!("start {}", self.bench.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ended with {}: {}", output.status, last_lines(&said));
        phases(&String::from_utf8_lossy(&output.stdout))
    }
}

fn flag(name: &str, value: impl ToString) -> [String; 2] {
    [name.to_owned(), value.to_string()]
}

/// The first result it printed.
fn phases(stdout: &str) -> Result<Phases> {
    let line = stdout.lines().find(|line| line.starts_with('{')).context("it printed no result")?;
    let result: Value = serde_json::from_str(line).with_context(|| format!("not a result: {line}"))?;
    let seconds = |field: &str| result[field].as_f64().with_context(|| format!("no {field} in {line}"));
    let first = seconds("t_pp")?;
    Ok(Phases { first, last: first + seconds("t_tg")? })
}

impl Contender for LlamaCpp {
    fn system(&self) -> System {
        System { name: NAME.to_owned(), version: self.version.clone() }
    }

    /// It warms up by itself, in every process; the first one also reads the model into the page cache.
    fn warm_up(&mut self, case: Case) -> Result<()> {
        refuse(case, NAME)?;
        let short = Size { requests: 1, prompt_tokens: 16, completion_tokens: 2 };
        self.measure(short).map(drop)
    }

    fn sample(&mut self, case: Case) -> Result<Vec<Reading>> {
        readings(case, self.measure(case.size())?, NAME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_result_is_the_first_line_in_braces() {
        let printed =
            "build: x\n{\"pp\": 512, \"t_pp\": 0.5, \"t_tg\": 1.25, \"t\": 1.75}\n{\"t_pp\": 9, \"t_tg\": 9}\n";
        assert_eq!(phases(printed).unwrap(), Phases { first: 0.5, last: 1.75 });
    }

    #[test]
    fn a_run_that_printed_nothing_is_an_error() {
        assert_eq!(phases("\n").unwrap_err().to_string(), "it printed no result");
        assert!(phases("{\"t_pp\": 1}").unwrap_err().to_string().contains("no t_tg"));
    }
}
