//! Every kernel against its reference on this machine's GPU, if it has one.

use std::{fs::OpenOptions, io::Write};

use stoker_kernels::{Device, checks};

#[test]
fn kernels_agree_with_their_references() {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => return skip("kernels_agree_with_their_references", &reason.to_string()),
    };
    if !stoker_kernels::built_with_kernels() {
        return skip("kernels_agree_with_their_references", "built without GPU kernels");
    }
    let outcomes = checks::run(&device, "").unwrap();
    let wrong: Vec<_> = outcomes.iter().filter(|outcome| !outcome.passes()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// As the harness' `skip`: printed, and counted by `make test` through `$SKIP_LOG`.
fn skip(test: &str, reason: &str) {
    let line = format!("skipped: {test}: {reason}");
    println!("{line}");
    let Some(path) = std::env::var_os("SKIP_LOG") else { return };
    let mut log = OpenOptions::new().create(true).append(true).open(path).expect("open $SKIP_LOG");
    writeln!(log, "{line}").expect("record a skipped test");
}
