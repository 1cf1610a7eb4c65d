//! `render-benchmarks DIR`: writes the tables of DIR from DIR/results/*.jsonl.

use std::path::PathBuf;

use anyhow::{Context, Result};

fn main() -> Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).context("usage: render-benchmarks docs/benchmarks")?);
    for (name, text) in stoker_figures::render(&dir)? {
        std::fs::write(dir.join(&name), text).with_context(|| format!("write {name}"))?;
    }
    Ok(())
}
