//! Compiles `csrc/*.cu` into one fatbin each, when nvcc is there; else leaves them empty and the crate says at run time
//! that it was built without GPU kernels. `cargo build` never needs CUDA.

#[path = "src/toolchain.rs"]
mod toolchain;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    let env = toolchain::BuildEnv {
        nvcc: variable("NVCC"),
        stoker_cache: variable("STOKER_CACHE"),
        xdg_cache_home: variable("XDG_CACHE_HOME"),
        home: env::var("HOME").ok(),
        archs: variable("STOKER_CUDA_ARCHS"),
        profile: env::var("PROFILE").expect("cargo sets PROFILE"),
    };
    println!("cargo::rerun-if-changed=csrc");
    // Watched only where it is: cargo would build anew each time for a path that is missing. `tools/cuda.sh` touches this
    // file when it has installed one.
    let nvcc = toolchain::nvcc_path(&env).filter(|nvcc| nvcc.is_file());
    if let Some(nvcc) = &nvcc {
        println!("cargo::rerun-if-changed={}", nvcc.display());
    }
    if let (None, Some(missing)) = (&nvcc, &env.nvcc) {
        println!("cargo::warning=NVCC={missing} is not a file: building without GPU kernels");
    }
    let chips = if nvcc.is_some() { toolchain::chips(&env) } else { Vec::new() };
    println!("cargo::rustc-env=STOKER_CUDA_CHIPS={}", chips.join(","));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let headers = read_all("cuh");
    for (source, text) in read_all("cu") {
        let fatbin = out.join(source.file_name().expect("a file of csrc")).with_extension("fatbin");
        let inputs = [&headers[..], &[(source.clone(), text)]].concat();
        match &nvcc {
            Some(nvcc) => compile(nvcc, &source, &fatbin, &chips, &inputs),
            None => leave_empty(&fatbin),
        }
    }
}

/// Without its key, so that a compiler that appears later is used.
fn leave_empty(fatbin: &Path) {
    fs::write(fatbin, []).expect("write an empty fatbin");
    let _ = fs::remove_file(fatbin.with_extension("key"));
}

fn variable(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn read_all(extension: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir("csrc").expect("list csrc");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("read csrc").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == extension));
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(path).expect("read a kernel source"))).collect()
}

fn compile(nvcc: &Path, source: &Path, fatbin: &Path, chips: &[String], inputs: &[(PathBuf, Vec<u8>)]) {
    let arguments = toolchain::arguments(source, fatbin, chips);
    let texts: Vec<&[u8]> = inputs.iter().map(|(_, text)| &text[..]).collect();
    let key = toolchain::build_key(nvcc, &arguments, &texts);
    let key_file = fatbin.with_extension("key");
    if fatbin.is_file() && fs::read_to_string(&key_file).is_ok_and(|found| found == key) {
        return;
    }
    let output = Command::new(nvcc).args(&arguments).output();
    let output = output.unwrap_or_else(|error| panic!("run {}: {error}", nvcc.display()));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} {}:\n{log}", nvcc.display(), arguments.join(" "));
    fs::write(key_file, key).expect("write the key of a fatbin");
}
