//! Official client libraries against a real agent, and against a gateway before one.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
    python::python_with,
    skip::skip,
    thinking::thinking_ember,
};

const REQUIREMENTS: &str = include_str!("../clients/requirements.txt");
const LIBRARIES: &str = include_str!("../clients/libraries-requirements.txt");
const OPEN_RESPONSES: &str = include_str!("../clients/open-responses-requirements.txt");
const LOAD_TOOL: &str = include_str!("../clients/load-requirements.txt");

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

#[tokio::test]
async fn the_open_responses_specification_is_kept() -> Result<()> {
    let script = ["clients/test_open_responses.py"];
    run_with("the_open_responses_specification_is_kept", OPEN_RESPONSES, &script, Before::Nothing).await
}

#[tokio::test]
async fn reasoning_is_told_and_taken_back_as_open_responses_has_it() -> Result<()> {
    let model = tempfile::tempdir()?;
    thinking_ember(model.path()).context("a model that thinks")?;
    let model = model.path().to_str().context("its path")?;
    let (test, script) =
        ("reasoning_is_told_and_taken_back_as_open_responses_has_it", "clients/test_open_responses_reasoning.py");
    run_on(&["--model", model, "--served-name", "ember"], test, OPEN_RESPONSES, &[script], Before::Nothing).await
}

#[tokio::test]
async fn litellm_and_langchain_work_through_the_gateway() -> Result<()> {
    let script = ["clients/test_libraries.py"];
    run_with("litellm_and_langchain_work_through_the_gateway", LIBRARIES, &script, Before::Gateway).await
}

#[tokio::test]
async fn locust_loads_the_gateway_and_sees_no_failure() -> Result<()> {
    // It ends with 1 if any request failed.
    let arguments =
        "-m locust --headless --only-summary --users 8 --spawn-rate 8 --run-time 8s --stop-timeout 60s --locustfile";
    let arguments: Vec<&str> = arguments.split(' ').chain(["clients/locustfile.py"]).collect();
    run_with("locust_loads_the_gateway_and_sees_no_failure", LOAD_TOOL, &arguments, Before::Gateway).await
}

/// What stands before the agent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Before {
    Nothing,
    Gateway,
}

async fn run_script(test: &str, script: &str, before: Before) -> Result<()> {
    run_with(test, REQUIREMENTS, &[script], before).await
}

/// Runs Python with these packages and arguments, of which the last is a file.
async fn run_with(test: &str, requirements: &'static str, arguments: &[&str], before: Before) -> Result<()> {
    run_on(&[], test, requirements, arguments, before).await
}

/// The same against an agent that is started with `flags`.
async fn run_on(
    flags: &[&str],
    test: &str,
    requirements: &'static str,
    arguments: &[&str],
    before: Before,
) -> Result<()> {
    let python = match tokio::task::spawn_blocking(move || python_with(requirements)).await? {
        Ok(python) => python,
        Err(error) => {
            skip(test, &format!("{error:#}"));
            return Ok(());
        }
    };
    let agent = AgentProcess::ready(flags).await?;
    let teller = Teller::start().await?;
    teller.tell(vec![deployment("chat", &["ember"], vec![replica("pod-0", &agent).await?])]);
    let gateway = GatewayProcess::start(teller.url(), &[])?;
    gateway.knows("chat", EndpointState::Serving, 1).await?;
    let base = if before == Before::Gateway { gateway.base() } else { agent.base() };
    let (script, options) = arguments.split_last().context("a file to run")?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let mut tests = Command::new(python);
    // Bytecode beside the script would be litter in the checkout.
    tests.arg("-B").args(options).arg(script).env("STOKER_BASE_URL", base).env("STOKER_ADMIN_URL", agent.admin_url(""));
    tests.env("LOCUST_HOST", base);
    let output = tokio::task::spawn_blocking(move || tests.output()).await??;
    let [said, complained] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    ensure!(output.status.success(), "{said}\n{complained}\n{}", agent.log());
    Ok(())
}
