//! Machines whose NVIDIA driver is of no use, played by a libcuda of a few lines: the program says what is wrong, and never
//! crashes. Needs a C compiler, as the linker does.

use std::{
    fs,
    process::{Command, Output},
};

/// What every driver can do: tell its version and its errors.
const COMMON: &str = r#"
int cuGetErrorString(int error, const char **text) { *text = "as the driver says"; return 0; }
"#;

/// A device that opens, and nothing more.
const DEVICE: &str = r#"
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { name[0] = 'T'; name[1] = '4'; name[2] = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 7 : attribute == 76 ? 5 : 40;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &cuInit; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetCurrent(void **context) { *context = &cuInit; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = &cuInit; return 0; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuCtxSynchronize(void) { return 0; }
"#;

/// What `kernel-check` says under a driver of this version that can do this.
fn check(version: u32, abilities: &str) -> Output {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let source = directory.path().join("driver.c");
    let answer = format!("int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}");
    fs::write(&source, [COMMON, &answer, abilities].concat()).expect("write the driver");
    let library = directory.path().join("libcuda.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(&library)
        .arg(&source)
        .status()
        .expect("a C compiler");
    assert!(compiled.success());
    fs::copy(&library, directory.path().join("libcuda.so.1")).expect("copy the driver");
    let program = env!("CARGO_BIN_EXE_kernel-check");
    Command::new(program).env("LD_LIBRARY_PATH", directory.path()).output().expect("run kernel-check")
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr[..]].concat().iter().map(|byte| char::from(*byte)).collect()
}

#[test]
fn a_driver_that_is_too_old_says_which_one_would_do() {
    let output = check(12_040, "");
    let expected =
        "the NVIDIA driver is too old: it is for CUDA 12.4, this program needs one for CUDA 13.0 (580 or later)";
    assert!(text(&output).contains(expected), "{}", text(&output));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_driver_without_a_device_is_a_machine_without_a_gpu() {
    let output = check(13_000, "int cuInit(unsigned flags) { return 100; }");
    assert!(text(&output).contains("skipped: kernel-check: no CUDA device 0"), "{}", text(&output));
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_chip_that_the_kernels_are_not_compiled_for_is_named_with_those_they_are() {
    if !stoker_kernels::built_with_kernels() {
        return println!("skipped: a_chip_that_the_kernels_are_not_compiled_for: built without GPU kernels");
    }
    let output =
        check(13_000, &format!("{DEVICE} int cuModuleLoadData(void **module, const void *image) {{ return 209; }}"));
    let said = text(&output);
    let expected =
        format!("compiled for sm_{}, do not load on T4 (compute capability 7.5)", stoker_kernels::built_for());
    assert!(said.replace(", sm_", ",").contains(&expected), "{said}");
    assert_eq!(output.status.code(), Some(1));
}
