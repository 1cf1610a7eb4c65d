//! A new user's walk: `make demo`, and from there only what the screen says. No address is known but those it printed, and nothing is
//! opened but what can be clicked. docs/pages-walk.md shows it; `make pages-check PICTURES=docs/pages` draws its pictures again.

use anyhow::{Result, ensure};
use serde_json::json;
use stoker_tests::{
    browser::{Browser, Key},
    demo::Demo,
    looks::draw_one,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_user_finds_what_runs_why_and_how_to_talk_to_it() -> Result<()> {
    let Some(browser) = Browser::start("a_new_user_finds_what_runs_why_and_how_to_talk_to_it").await? else {
        return Ok(());
    };
    let demo = tokio::task::block_in_place(Demo::start)?;

    // What runs.
    browser.open(demo.address("what runs, and why")?).await?;
    browser.shows("#fleet", "Serving").await?;
    draw_one(&browser, "walk-1-what-runs").await?;

    // Why.
    browser.click("#fleet a[href^='/ns/']").await?;
    browser.shows("#why", "Why 1 replica?").await?;
    let why = browser.text("#why").await?;
    ensure!(why.contains("spec.replicas is 1, and there is no spec.scaling"), "{why}");
    let head = browser.text("#head").await?;
    ensure!(head.contains("Talk to it at http://chat.default.svc:8000"), "{head}");
    draw_one(&browser, "walk-2-why").await?;

    // How to talk to it.
    browser.open(demo.address("talk to it")?).await?;
    browser.wait_until("a model", "document.querySelector('[data-option=model]').options.length > 0").await?;
    browser.fill("#draft", "Who are you?").await?;
    browser.press(Key::Enter).await?;
    let answered = "!!document.querySelector('.answer .text')?.textContent && document.querySelector('#stop').hidden";
    browser.wait_until("an answer", answered).await?;
    draw_one(&browser, "walk-3-talk").await?;

    // What was asked is seen where it is said what runs.
    browser.open(demo.address("what runs, and why")?).await?;
    browser.click("#fleet a[href^='/ns/']").await?;
    let measured = format!("!document.querySelector('#head').innerText.includes({})", json!("TTFT p50 / p95\n–"));
    browser.wait_until("the time to the first token", &measured).await?;
    // A line, not a point: half a minute of it.
    let line = "(document.querySelector('#load .line')?.getBBox().width || 0) > 50";
    browser.wait_until("a line", line).await?;
    draw_one(&browser, "walk-4-seen").await?;
    ensure!(browser.complaints().is_empty(), "no page complains");
    Ok(())
}
