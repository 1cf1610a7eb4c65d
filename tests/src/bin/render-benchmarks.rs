//! `render-benchmarks DIR`: writes DIR/README.md from DIR/results/*.jsonl.

use std::path::PathBuf;

use anyhow::{Context, Result};
use stoker_tests::figures;

fn main() -> Result<()> {
    let dir = PathBuf::from(std::env::args().nth(1).context("usage: render-benchmarks docs/benchmarks")?);
    std::fs::write(dir.join("README.md"), figures::render(&dir)?).context("write the rendered tables")
}
