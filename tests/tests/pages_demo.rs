//! The demo's own cluster in a browser, as those who have run `make demo` and send it load see it: real agents behind the gateway. A
//! step of load is watched from one replica to three and back, its decision is read, a process killed, a roll followed, and the
//! playground used. docs/pages.md shows it; `make pages-check PICTURES=docs/pages` draws its pictures again.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stoker_tests::{
    browser::Browser,
    clients::{Clients, Service},
    cluster::built,
    demo::{Demo, source},
    looks::{draw, pictures},
    playground::{a_schema_is_used, a_stream_is_stopped, a_tool_is_used, ask, open},
};

const NAME: &str = "chat-load";
const PAGE: &str = "a[href='/ns/default/chat-load']";
/// Scaling waits for its windows and for drains, and the machine has others to serve.
const PATIENCE: Duration = Duration::from_secs(180);
/// Clients that ask again as soon as they are answered, and the tokens of an answer: they fill the cache of three replicas on any
/// machine. Requests a second would be load for one replica here and for five there.
const CROWD: (usize, u32) = (24, 200);
/// Load to look at, for pictures only.
const WAVES: &str = "60s:1,90s:6,60s:2,60s:4,90s:0.5";

/// The example that `make demo-load` scales, to three replicas at most.
fn example() -> Result<Value> {
    let text = fs::read_to_string(source().join("examples/chat-load.yaml"))?;
    let mut object: Value = serde_norway::from_str(&text)?;
    object["spec"]["scaling"]["max"] = json!(3);
    Ok(object)
}

/// The load generator, until this is dropped.
struct Load(Child);

impl Load {
    fn start(demo: &Demo, steps: &str) -> Result<Self> {
        let mut command = Command::new(built("stoker-load"));
        command.args(["--url", &demo.service_url(NAME)?, "--step", steps]);
        command.args(["--prompt-tokens", "40..120", "--max-tokens", "300", "--ignore-eos"]);
        Ok(Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_is_watched_under_load_explained_harmed_rolled_and_talked_to() -> Result<()> {
    let test = "the_demo_is_watched_under_load_explained_harmed_rolled_and_talked_to";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    let browser = browser.patient(PATIENCE);
    let demo = tokio::task::block_in_place(Demo::start)?;
    let fleet = demo.address("what runs, and why")?;
    browser.open(fleet).await?;
    demo.apply(&example()?)?;
    browser.click(PAGE).await?;
    browser.shows("#head", "1 of 1 replica serves").await?;
    browser.shows("#why", "Why 1 replica?").await?;

    // From one to three, and why.
    let service = Service { base: demo.service_url(NAME)?, model: NAME.into() };
    let crowd = Clients::start(&service, CROWD.0, CROWD.1, Duration::ZERO);
    browser.shows("#why", "Why 3 replicas?").await?;
    browser.shows("#head", "3 of 3 replicas serve").await?;
    let untold =
        "['TTFT', 'ITL'].some(name => document.querySelector('#head').innerText.includes(`${name} p50 / p95\\n–`))";
    browser.wait_until("both latencies", &format!("!{untold}")).await?;
    is_explained(&browser).await?;

    // A process is killed, and the page says of what it ended.
    let victim = browser.text("#replicas tbody tr:not(.group) th").await?;
    demo.kill_process_of(&victim)?;
    browser.shows("#replicas", "ended with exit code 137 (SIGKILL, often out of memory)").await?;
    browser.shows("#head", "3 of 3 replicas serve").await?;

    // The load goes, and so do replicas. Who was at the killed one saw its end.
    let (answered, _cut) = tokio::task::block_in_place(|| crowd.stop());
    ensure!(answered > CROWD.0, "{answered} answers");
    browser.shows("#why", "Why 1 replica?").await?;
    browser.shows("#head", "1 of 1 replica serves").await?;
    browser.shows("#decisions", "3 → ").await?;

    // A roll, from the older revision to the wanted one.
    let older = browser.text("#head .mono").await?;
    demo.kubectl(&["patch", "infd", NAME, "--type=merge", "-p", r#"{"spec": {"engine": {"maxModelLen": 480}}}"#])?;
    browser.shows("#rollout", "older").await?;
    browser.wait_until("the end of the roll", "!document.querySelector('#rollout table')").await?;
    browser.shows("#head", "1 of 1 replica serves").await?;
    ensure!(browser.text("#head .mono").await? != older, "another revision than {older} is wanted");
    draw_deployments(&browser, &demo).await?;

    let base = demo.address("talk to it")?;
    open(&browser, base, &json!({"a.temperature": "0"})).await?;
    ensure!(ask(&browser, "Who are you?").await?.contains("ember"), "it says who it is");
    a_stream_is_stopped(&browser, base).await?;
    a_tool_is_used(&browser, base).await?;
    a_schema_is_used(&browser, base).await?;
    let complaints = browser.complaints();
    ensure!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

/// The decision for three replicas, opened at its address, says why in numbers of the agents.
async fn is_explained(browser: &Browser) -> Result<()> {
    let link = "[...document.querySelectorAll('#decisions tr')].find(row => row.innerText.includes('→ 3')).querySelector('a').href";
    let link = browser.value(link).await?;
    browser.open(link.as_str().context("an address")?).await?;
    browser.shows("#why", "The decision of").await?;
    let why = browser.text("#why .explained").await?;
    let words = ["-> 3 replicas: pressure ", "(128 blocks per replica x ", "between min 1 and max 3"];
    let is_fresh = [" serving replica fresh, ", " serving replicas fresh, "].iter().any(|words| why.contains(words));
    ensure!(is_fresh && words.iter().all(|words| why.contains(words)), "{why}");
    browser.click("#why a").await?;
    browser.shows("#why", "The decision that stands").await
}

/// Pictures for the docs, if they are wanted: of waves of load, and of one that is in trouble.
async fn draw_deployments(browser: &Browser, demo: &Demo) -> Result<()> {
    if pictures().is_none() {
        return Ok(());
    }
    tokio::task::block_in_place(|| Load::start(demo, WAVES)?.0.wait().context("wait for the waves"))?;
    let spec = json!({"model": {"source": "file:///models/not-there"}});
    demo.apply(&json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "broken"}, "spec": spec}))?;
    let _runs = Load::start(demo, "15m:1")?;
    browser.wait_until("requests", "!/Requests\\s+0 running/.test(document.querySelector('#head').innerText)").await?;
    draw(browser, "deployment").await?;
    browser.open(demo.address("what runs, and why")?).await?;
    browser.shows("#fleet", "ModelLoadFailed").await?;
    draw(browser, "fleet").await
}
