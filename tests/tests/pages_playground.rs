//! The playground in a real browser, served by a real agent.

use anyhow::Result;
use stoker_tests::{
    agent::AgentProcess,
    browser::{Browser, Theme},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_shows_what_the_agent_serves() -> Result<()> {
    let test = "a_browser_shows_what_the_agent_serves";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    let agent = AgentProcess::ready(&[]).await?;
    browser.open(&agent.url("/version")).await?;
    assert_eq!(browser.text("body").await?, format!(r#"{{"version":"{}"}}"#, env!("CARGO_PKG_VERSION")));
    let found = browser.axe(test).await?;
    assert!(found.is_empty() || found.iter().any(|rule| rule.contains("document-title")), "{found:?}");
    assert!(browser.screenshot(Theme::Dark, 320).await?.starts_with(b"\x89PNG"));
    Ok(())
}
