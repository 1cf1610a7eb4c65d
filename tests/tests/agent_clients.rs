//! Official client libraries against a real agent, and against a gateway before one.

use std::{path::Path, process::Command};

use anyhow::{Result, ensure};
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
    python::python_with,
    skip::skip,
};

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
    let python = match tokio::task::spawn_blocking(|| python_with(REQUIREMENTS)).await? {
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
