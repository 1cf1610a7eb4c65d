//! Python with other people's packages, for official clients: a virtual environment in the cache, made once for each set of
//! pinned versions.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use stoker_cluster::cache_dir;

/// Python of the environment with these packages, which is made if it is not there. An error is a reason to skip.
pub fn python_with(requirements: &str) -> Result<PathBuf> {
    let mut versions = DefaultHasher::new();
    requirements.hash(&mut versions);
    let home = cache_dir().join(format!("python-clients-{:016x}", versions.finish()));
    let python = home.join("bin/python");
    let complete = home.join("complete");
    if complete.is_file() {
        return Ok(python);
    }
    fs::create_dir_all(&home)?;
    // One of all tests on this machine makes it; the kernel gives the lock back when its process ends, however it ends.
    let lock = File::create(home.join("lock"))?;
    lock.lock()?;
    if complete.is_file() {
        return Ok(python);
    }
    let listed = home.join("requirements.txt");
    fs::write(&listed, requirements)?;
    run(Command::new("python3").args(["-m", "venv"]).arg(&home)).context("python3 -m venv")?;
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(&listed))
        .context("pip install of the pinned clients")?;
    fs::write(complete, "")?;
    Ok(python)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
