//! Official client libraries against a real agent, and against a gateway before one. They run in a virtual environment in the cache, made once for each
//! set of pinned versions.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use stoker_cluster::cache_dir;
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
    skip::skip,
};
use tokio::sync::Mutex;

const REQUIREMENTS: &str = include_str!("../clients/requirements.txt");

#[tokio::test]
async fn the_official_openai_client_works_unchanged() -> Result<()> {
    run_script("the_official_openai_client_works_unchanged", "clients/test_openai.py", Before::Nothing).await
}

#[tokio::test]
async fn the_official_anthropic_client_works_unchanged() -> Result<()> {
    run_script("the_official_anthropic_client_works_unchanged", "clients/test_anthropic.py", Before::Nothing).await
}

#[tokio::test]
async fn the_official_openai_client_works_through_the_gateway() -> Result<()> {
    let test = "the_official_openai_client_works_through_the_gateway";
    run_script(test, "clients/test_openai.py", Before::Gateway).await
}

#[tokio::test]
async fn the_official_anthropic_client_works_through_the_gateway() -> Result<()> {
    let test = "the_official_anthropic_client_works_through_the_gateway";
    run_script(test, "clients/test_anthropic.py", Before::Gateway).await
}

/// What stands before the agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Before {
    Nothing,
    Gateway,
}

async fn run_script(test: &str, script: &str, before: Before) -> Result<()> {
    let python = match python_with_clients().await {
        Ok(python) => python,
        Err(error) => {
            skip(test, &format!("{error:#}"));
            return Ok(());
        }
    };
    let agent = AgentProcess::ready(&[]).await?;
    let teller = Teller::start().await?;
    teller.tell(vec![deployment("chat", &["ember"], vec![replica("pod-0", &agent).await?])]);
    let gateway = GatewayProcess::start(teller.url(), &[])?;
    gateway.knows("chat", EndpointState::Serving, 1).await?;
    let base = if before == Before::Gateway { gateway.base() } else { agent.base() };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let mut tests = Command::new(python);
    // Bytecode beside the script would be litter in the checkout.
    tests.arg("-B").arg(script).env("STOKER_BASE_URL", base).env("STOKER_ADMIN_URL", agent.admin_url(""));
    let output = tokio::task::spawn_blocking(move || tests.output()).await??;
    ensure!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), agent.log());
    Ok(())
}

/// One at a time makes the environment.
async fn python_with_clients() -> Result<PathBuf> {
    static MAKING: Mutex<()> = Mutex::const_new(());
    let _making = MAKING.lock().await;
    tokio::task::spawn_blocking(make_python).await?
}

/// Python of the virtual environment, which is made if it is not there. An error is a reason to skip.
fn make_python() -> Result<PathBuf> {
    let mut versions = DefaultHasher::new();
    REQUIREMENTS.hash(&mut versions);
    let home = cache_dir().join(format!("python-clients-{:016x}", versions.finish()));
    let python = home.join("bin/python");
    let complete = home.join("complete");
    if complete.is_file() {
        return Ok(python);
    }
    fs::create_dir_all(&home)?;
    let requirements = home.join("requirements.txt");
    fs::write(&requirements, REQUIREMENTS)?;
    run(Command::new("python3").args(["-m", "venv"]).arg(&home)).context("python3 -m venv")?;
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(&requirements))
        .context("pip install of the pinned clients")?;
    fs::write(complete, "")?;
    Ok(python)
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
