//! A new user's walk: `make demo`, and from there only what the screen says. No address is known but those it printed, and nothing is
//! opened but what can be clicked. docs/pages-walk.md shows it; `make pages-check PICTURES=docs/pages` draws its pictures again.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stoker_tests::{
    browser::{Browser, Key, Theme},
    cluster::built,
};

/// The demo, until the test ends.
struct Demo {
    dir: tempfile::TempDir,
    said: String,
}

impl Demo {
    fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let output = Command::new(built("stoker-cluster"))
            .arg("demo")
            .arg("--dir")
            .arg(dir.path().join("demo"))
            .args(["--agent".into(), built("stoker-agent"), "--operator".into(), built("stoker-operator")])
            .args(["--source".into(), source])
            .args(["--owner", &std::process::id().to_string()])
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(Self { dir, said: String::from_utf8(output.stdout)? })
    }

    /// The address in front of these words.
    fn address(&self, words: &str) -> Result<&str> {
        let line = self.said.lines().find(|line| line.trim_end().ends_with(words));
        let line = line.with_context(|| format!("no {words:?} in:\n{}", self.said))?;
        line.split_whitespace().next().context("an address")
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let down =
            Command::new(built("stoker-cluster")).arg("down").arg("--dir").arg(self.dir.path().join("demo")).output();
        assert!(down.unwrap().status.success());
    }
}

/// Keeps a picture of what is seen, where they are wanted.
async fn picture(browser: &Browser, name: &str) -> Result<()> {
    let Some(folder) = std::env::var_os("STOKER_PICTURES").filter(|folder| !folder.is_empty()) else { return Ok(()) };
    let png = browser.screenshot(Theme::Light, 1280).await?;
    fs::write(PathBuf::from(folder).join(format!("walk-{name}.png")), png)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_user_finds_what_runs_why_and_how_to_talk_to_it() -> Result<()> {
    let Some(browser) = Browser::start("a_new_user_finds_what_runs_why_and_how_to_talk_to_it").await? else {
        return Ok(());
    };
    let demo = tokio::task::block_in_place(Demo::start)?;

    // What runs.
    browser.open(demo.address("what runs, and why")?).await?;
    browser.wait_until("what runs", "document.querySelector('#fleet').innerText.includes('Serving')").await?;
    picture(&browser, "1-what-runs").await?;

    // Why.
    browser.click("#fleet a[href^='/ns/']").await?;
    browser.wait_until("why", "document.querySelector('#why').innerText.includes('Why 1 replica?')").await?;
    let why = browser.text("#why").await?;
    ensure!(why.contains("spec.replicas is 1, and there is no spec.scaling"), "{why}");
    let head = browser.text("#head").await?;
    ensure!(head.contains("Talk to it at http://chat.default.svc:8000"), "{head}");
    picture(&browser, "2-why").await?;

    // How to talk to it.
    browser.open(demo.address("talk to it")?).await?;
    browser.wait_until("a model", "document.querySelector('[data-option=model]').options.length > 0").await?;
    browser.fill("#draft", "Who are you?").await?;
    browser.press(Key::Enter).await?;
    let answered = "!!document.querySelector('.answer .text')?.textContent && document.querySelector('#stop').hidden";
    browser.wait_until("an answer", answered).await?;
    picture(&browser, "3-talk").await?;

    // What was asked is seen where it is said what runs.
    browser.open(demo.address("what runs, and why")?).await?;
    browser.click("#fleet a[href^='/ns/']").await?;
    let measured = format!("!document.querySelector('#head').innerText.includes({})", json!("TTFT p50 / p95\n–"));
    browser.wait_until("the time to the first token", &measured).await?;
    picture(&browser, "4-seen").await?;
    ensure!(browser.complaints().is_empty(), "no page complains");
    Ok(())
}
