//! Embeds the models of `models/` that the agent carries, as one table of byte slices. Compiles nothing else.

use std::{
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

/// Models that travel inside the agent, and the files of each.
const EMBEDDED: [&str; 1] = ["ember"];
const FILES: [&str; 6] = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

fn main() {
    let models = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("../models");
    let mut table = String::from("&[\n");
    for name in EMBEDDED {
        embed(&mut table, name, &models.join(name));
    }
    table.push(']');
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it")).join("builtin_models.rs");
    fs::write(out, table).expect("the output directory is writable");
}

fn embed(table: &mut String, name: &str, directory: &Path) {
    println!("cargo::rerun-if-changed={}", directory.display());
    if !directory.join("model.safetensors").exists() {
        return;
    }
    writeln!(table, "({name:?}, &[").expect("writing to a string");
    for file in FILES {
        let path = directory.join(file);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
            let path = path.canonicalize().expect("the file exists");
            writeln!(table, "({file:?}, include_bytes!({path:?}) as &[u8]),").expect("writing to a string");
        }
    }
    table.push_str("] as &[(&str, &[u8])]),\n");
}
