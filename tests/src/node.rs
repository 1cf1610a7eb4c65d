//! Node with other people's packages, for official clients: a folder in the cache, made once for each lock. What is made for tests in
//! Python is in [`crate::python`].

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use stoker_cluster::cache_dir;

/// A folder with the packages of this lock, where scripts find them. An error is a reason to skip.
pub fn node_with(package: &str, lock: &str) -> Result<PathBuf> {
    let mut versions = DefaultHasher::new();
    (package, lock).hash(&mut versions);
    let home = cache_dir().join(format!("node-clients-{:016x}", versions.finish()));
    let complete = home.join("complete");
    if complete.is_file() {
        return Ok(home);
    }
    fs::create_dir_all(&home)?;
    // One of all tests on this machine makes it; the kernel gives the lock back when its process ends, however it ends.
    let held = File::create(home.join("lock"))?;
    held.lock()?;
    if complete.is_file() {
        return Ok(home);
    }
    fs::write(home.join("package.json"), package)?;
    fs::write(home.join("package-lock.json"), lock)?;
    // Packages run nothing when they are installed.
    let options = ["ci", "--ignore-scripts", "--no-audit", "--no-fund"];
    let output = Command::new("npm").args(options).current_dir(&home).output().context("npm")?;
    ensure!(output.status.success(), "npm ci: {}", String::from_utf8_lossy(&output.stderr).trim());
    fs::write(complete, "")?;
    Ok(home)
}
