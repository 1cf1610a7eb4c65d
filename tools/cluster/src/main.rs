//! `stoker-cluster`: the library's cluster in the background, and the demo. Arguments only; each word has a file.

mod cli;

use clap::Parser;

fn main() -> anyhow::Result<()> {
    cli::run(cli::Cli::parse())
}
