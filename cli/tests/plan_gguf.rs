//! `kubectl stoker plan` of GGUF files: by the beginning of one, with the bytes that the `gguf` package wrote for its tensors.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/gguf")
}

/// What comes before the data of a golden file.
fn header(name: &str) -> PathBuf {
    goldens().join(format!("{name}.header"))
}

/// Bytes of its tensors, by the package that wrote them.
fn written_bytes(name: &str) -> u64 {
    let golden: Value = serde_json::from_slice(&fs::read(goldens().join(format!("{name}.json"))).unwrap()).unwrap();
    golden["tensors"].as_array().unwrap().iter().map(|tensor| tensor[4].as_u64().unwrap()).sum()
}

/// Plans a deployment of this source, with more arguments.
fn plan(source: &str, more: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let object = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"},
        "spec": {"model": {"source": source}, "resources": {"memory": "1Gi"}}});
    let file = dir.path().join("chat.yaml");
    fs::write(&file, object.to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-stoker"));
    command.arg("plan").arg("-f").arg(file).args(["--output", "json"]).args(more);
    command.env("KUBECONFIG", "/dev/null").env_remove("HOME").output().unwrap()
}

fn said(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{stderr}"))
}

fn refused(output: &Output, words: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains(words), "{stderr}");
}

#[test]
fn the_beginning_of_a_file_says_what_its_blocks_take_on_cpus() {
    for name in ["llama-q8_0", "llama-q4_0", "qwen2", "phi3"] {
        let config = header(name).display().to_string();
        let planned = said(&plan(&format!("hf://org/model/{name}.gguf"), &["--config", &config]));
        assert_eq!(planned[0]["fits"], true, "{name}: {planned}");
        assert_eq!(planned[0]["plan"]["weightsBytes"], written_bytes(name), "{name}");
    }
}

#[test]
fn on_a_gpu_blocks_count_as_bf16() {
    let config = header("llama-q4_0").display().to_string();
    let planned = said(&plan("hf://org/model/llama-q4_0.gguf", &["--config", &config, "--gpu", "L4"]));
    let numbers = &planned[0]["plan"];
    assert!(numbers["weightsBytes"].as_u64() >= Some(2 * numbers["parameters"].as_u64().unwrap()), "{planned}");
}

#[test]
fn a_file_of_this_machine_needs_no_config() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.gguf");
    fs::copy(header("llama-q8_0"), &file).unwrap();
    for source in [&file, dir.path()] {
        let planned = said(&plan(&format!("file://{}", source.display()), &[]));
        assert_eq!(planned[0]["plan"]["weightsBytes"], written_bytes("llama-q8_0"));
    }
}

#[test]
fn what_is_missing_is_asked_for_by_name() {
    refused(&plan("hf://org/model/chat-q8_0.gguf@main", &[]), "that file or its first megabytes");
    refused(&plan("hf://org/model", &[]), "its config.json");
    let whole = fs::read(header("llama-q8_0")).unwrap();
    let cut = tempfile::NamedTempFile::new().unwrap();
    fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    refused(&plan("hf://org/model/a.gguf", &["--config", &cut.path().display().to_string()]), "its header ends early");
    // Its angles are numbers in the data, which is not here.
    let config = header("llama3").display().to_string();
    refused(&plan("hf://org/model/llama3.gguf", &["--config", &config]), "rope_freqs.weight` is not in what is here");
}
