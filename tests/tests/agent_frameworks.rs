//! Libraries that applications are built with, against a real agent: each in its newest version, pinned by a lock of its own. What
//! passes is listed in `docs/clients.md`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};
use stoker_tests::{agent::AgentProcess, node::node_with, python::python_with, skip::skip};

#[tokio::test]
async fn langchain_gets_classes_tools_and_vectors() -> Result<()> {
    let lock = include_str!("../clients/langchain-requirements.txt");
    in_python("langchain_gets_classes_tools_and_vectors", lock, "test_langchain.py").await
}

#[tokio::test]
async fn pydantic_ai_gets_its_output_types() -> Result<()> {
    let lock = include_str!("../clients/pydantic-ai-requirements.txt");
    in_python("pydantic_ai_gets_its_output_types", lock, "test_pydantic_ai.py").await
}

#[tokio::test]
async fn instructor_gets_its_classes_in_every_mode() -> Result<()> {
    let lock = include_str!("../clients/instructor-requirements.txt");
    in_python("instructor_gets_its_classes_in_every_mode", lock, "test_instructor.py").await
}

#[tokio::test]
async fn litellm_goes_round_its_tool_loop() -> Result<()> {
    let lock = include_str!("../clients/litellm-requirements.txt");
    in_python("litellm_goes_round_its_tool_loop", lock, "test_litellm.py").await
}

#[tokio::test]
async fn openai_and_vercel_work_in_javascript() -> Result<()> {
    let test = "openai_and_vercel_work_in_javascript";
    let (package, lock) = (include_str!("../clients/js/package.json"), include_str!("../clients/js/package-lock.json"));
    let Some(home) = made(test, || node_with(package, lock)).await? else { return Ok(()) };
    // Node looks for packages beside the script.
    let scripts = ["openai.test.mjs", "vercel.test.mjs"];
    for script in scripts {
        fs::copy(clients().join("js").join(script), home.join(script))?;
    }
    let mut tests = Command::new("node");
    tests.arg("--test").args(scripts).current_dir(home);
    run(tests).await
}

async fn in_python(test: &'static str, lock: &'static str, script: &str) -> Result<()> {
    let Some(python) = made(test, || python_with(lock)).await? else { return Ok(()) };
    let mut tests = Command::new(python);
    // Bytecode beside the script would be litter in the checkout.
    tests.arg("-B").arg(clients().join(script));
    run(tests).await
}

/// What a test needs, or nothing where it cannot be had.
async fn made(test: &'static str, make: impl FnOnce() -> Result<PathBuf> + Send + 'static) -> Result<Option<PathBuf>> {
    match tokio::task::spawn_blocking(make).await? {
        Ok(made) => Ok(Some(made)),
        Err(error) => {
            skip(test, &format!("{error:#}"));
            Ok(None)
        }
    }
}

async fn run(mut tests: Command) -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    tests.env("STOKER_BASE_URL", agent.base());
    let output = tokio::task::spawn_blocking(move || tests.output()).await??;
    let said = |bytes| String::from_utf8_lossy(bytes).into_owned();
    ensure!(output.status.success(), "{}{}\n{}", said(&output.stdout), said(&output.stderr), agent.log());
    Ok(())
}

fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}
