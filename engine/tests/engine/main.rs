//! The engine as its users see it: scripted, on tiny checkpoints, and on models that must be refused.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod bad_models;
mod batch_invariance;
mod common;
mod completions;
mod constraint;
mod cuda;
mod cuda_families;
mod cuda_gguf;
mod cuda_grammars;
mod cuda_invariance;
mod cuda_pipeline;
mod cuda_quantised;
mod cuda_ranks;
mod cuda_reads;
mod determinism;
mod embeddings;
mod families;
mod gguf;
mod goldens;
mod grammar_faults;
mod jump;
mod kernel_paths;
mod overlap;
mod pipeline;
mod prefix;
mod quantised;
mod ranks;
mod scores;
mod sim;
#[path = "../../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "one file for these tests and for the harness of the whole-system tests")]
mod skip;
mod specs;
mod tokenizers;

/// A file that no line names is not compiled, and its tests are gone without a word: that happened to two.
#[test]
fn every_file_beside_this_one_is_compiled() {
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/engine");
    let files = std::fs::read_dir(here).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    for module in files.filter_map(|file| Some(file.strip_suffix(".rs")?.to_owned())).filter(|name| name != "main") {
        assert!(include_str!("main.rs").contains(&format!("\nmod {module};\n")), "{module}.rs is not compiled");
    }
}
