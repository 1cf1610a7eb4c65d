//! Writes the CustomResourceDefinitions as YAML into a directory; `make generate` into the chart's.

use std::{env, fs, path::PathBuf};

fn main() -> std::io::Result<()> {
    let dir = PathBuf::from(env::args_os().nth(1).expect("usage: crdgen DIRECTORY"));
    stoker_crds::crd::files().into_iter().try_for_each(|(name, text)| fs::write(dir.join(name), text))
}
