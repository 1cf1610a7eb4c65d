//! `stoker-image`: one recipe in, one image archive out. Owns the command line; the library does the work.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;
use stoker_image::{ImageReference, Recipe, RootFs, Variables, write_archive};

/// Write a container image archive from a recipe, without a container engine.
///
/// The archive is an OCI image layout and a docker archive in one tar. The same inputs give the same bytes.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
struct Args {
    /// The recipe: files, directories and how the image starts (see tools/image/recipes/)
    recipe: PathBuf,
    /// Full name of the image, REGISTRY/NAME:TAG; may be given more than once
    #[arg(long = "tag", value_name = "NAME", required = true)]
    tags: Vec<ImageReference>,
    /// Value of a ${NAME} in the recipe's paths; may be given more than once
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_variable)]
    variables: Vec<(String, String)>,
    /// A shared library that a program of the image opens by name while it runs; may be given more than once
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
    /// Where the archive goes
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  Build the agent and pack it:
    cargo build --release -p stoker-agent
    stoker-image tools/image/recipes/stoker-agent.yaml --set BIN_DIR=target/release \\
      --tag registry.example/stoker-agent:0.1.0 --out agent.tar
  Then one of:
    ctr -n k8s.io images import agent.tar                      onto a node that runs containerd
    docker load -i agent.tar                                   into docker
    skopeo copy docker-archive:agent.tar docker://registry.example/stoker-agent:0.1.0";

fn main() -> Result<()> {
    let args = Args::parse();
    let variables: Variables = args.variables.into_iter().collect();
    let recipe = Recipe::read(&args.recipe, &variables).context("read recipe")?;
    let recipe = args.libraries.iter().try_fold(recipe, |recipe, library| recipe.with_library(library))?;
    let tree = RootFs::collect(&recipe).context("collect files")?;
    let image = write_archive(&recipe, &tree, &args.tags, &args.out).context("write archive")?;
    let names: Vec<String> = args.tags.iter().map(ToString::to_string).collect();
    let megabytes = image.layer_bytes as f64 / 1e6;
    println!("{}: {} entries, {megabytes:.1} MB, {}", names.join(", "), image.n_entries, image.digest);
    Ok(())
}

fn parse_variable(text: &str) -> Result<(String, String)> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => bail!("write it as NAME=VALUE"),
    }
}
