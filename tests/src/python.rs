//! Python with other people's packages, for official clients: a virtual environment in the cache, made once for each set of
//! pinned versions.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    process::Command,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, ensure};
use stoker_cluster::cache_dir;

/// Python of the environment with these packages, which is made if it is not there. An error is a reason to skip.
pub fn python_with(requirements: &str) -> Result<PathBuf> {
    // One at a time makes an environment.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut versions = DefaultHasher::new();
    requirements.hash(&mut versions);
    let home = cache_dir().join(format!("python-clients-{:016x}", versions.finish()));
    let python = home.join("bin/python");
    let complete = home.join("complete");
    if complete.is_file() {
        return Ok(python);
    }
    fs::create_dir_all(&home)?;
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
