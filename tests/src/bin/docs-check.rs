//! `docs-check ROOT`: fails when a link or file name in the docs is stale, or a benchmark table is not what its figures
//! render to.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use stoker_figures::render;
use stoker_tests::docs;

fn main() -> Result<()> {
    let root = PathBuf::from(std::env::args().nth(1).context("usage: docs-check ROOT")?);
    let broken = docs::broken(&root)?;
    broken.iter().for_each(|line| eprintln!("{line}"));
    let benchmarks = root.join("docs/benchmarks");
    ensure!(broken.is_empty(), "{} stale references in the docs", broken.len());
    for (name, text) in render(&benchmarks)? {
        let found = std::fs::read_to_string(benchmarks.join(&name)).unwrap_or_default();
        ensure!(found == text, "docs/benchmarks/{name} is stale: run `render-benchmarks docs/benchmarks`");
    }
    println!("docs are true: links, file names and benchmark tables");
    Ok(())
}
