//! The one way a test says that it cannot run here. Never silent: the reason is printed and counted by `make test`.

use std::{fs::OpenOptions, io::Write};

/// Prints `skipped: TEST: REASON` and appends it to `$SKIP_LOG`, which `make test` shows with a count at its end.
/// The caller returns right after.
pub fn skip(test: &str, reason: &str) {
    let line = format!("skipped: {test}: {reason}");
    println!("{line}");
    let Some(path) = std::env::var_os("SKIP_LOG") else { return };
    let written = OpenOptions::new().create(true).append(true).open(&path).and_then(|mut log| writeln!(log, "{line}"));
    assert!(written.is_ok(), "cannot record a skipped test in {}", path.display());
}
