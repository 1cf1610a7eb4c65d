//! The fleet in a browser, as a platform team sees it: a step of load is watched, its decision read, a pod killed, a roll followed. A real
//! API server, the real operator, a real Chromium; agents are stand-ins.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_tests::{
    browser::{Browser, Theme},
    operator::{NAMESPACE, Rig, get, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
const CHAT: &str = "/ns/default/chat";
/// Wide, and as narrow as a page has to work.
const WIDTHS: [u32; 2] = [1280, 320];

/// Five streams fill a replica to its target; windows are short enough for a test.
fn scaled(more: Value) -> Value {
    let mut spec = json!({
        "model": {"source": "file:///stand-in/loads-seconds/2"},
        "drain": {"withdrawSeconds": 1, "deadlineSeconds": 60},
        "scaling": {
            "max": 3, "targets": {"kv": 0.05},
            "behavior": {"stableWindowSeconds": 6, "panicWindowSeconds": 2, "downStabilizationSeconds": 4, "spareReplicas": 0},
        },
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

/// An operator with pages, and the address of them.
fn rig_with_pages() -> Result<(Rig, String)> {
    let mut rig = Rig::start(Audit::Off)?;
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    rig.operator.restart_with(&["--pages-address", &address])?;
    let url = format!("http://{address}");
    rig.wait("pages are served", SOON, |_| Ok(get(&url)?.contains("No InferenceDeployment yet")))?;
    Ok((rig, url))
}

/// Streams that clients hold open to one pod; they end when this is dropped.
struct Streams(Vec<Child>);

impl Streams {
    fn hold(pod: &Pod, count: usize) -> Self {
        let url = format!("http://{}:8000/stream/300", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap());
        let one = || Command::new("curl").args(["-sSN", "--max-time", "300", &url]).stdout(Stdio::null()).spawn();
        Self((0..count).map(|_| one().unwrap()).collect())
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        for stream in &mut self.0 {
            stream.kill().unwrap();
            stream.wait().unwrap();
        }
    }
}

fn serving(rig: &Rig) -> Vec<Pod> {
    rig.pods("chat").unwrap().into_iter().filter(serves).collect()
}

/// Load to look at, for pictures only: six minutes of it.
fn waves(rig: &Rig) {
    for count in [6, 14, 9, 2, 12, 5] {
        let streams = Streams::hold(&serving(rig)[0], count);
        std::thread::sleep(Duration::from_secs(60));
        drop(streams);
    }
}

/// What the page says, once it does.
fn shows(rig: &Rig, browser: &Browser, part: &str, words: &str) -> Result<()> {
    let said = format!("document.querySelector({}).innerText.includes({})", json!(part), json!(words));
    rig.block_on(browser.wait_until(words, &said))
}

/// Where pictures for the docs go, if they are wanted: `STOKER_PAGES_PICTURES=docs/pages`.
fn pictures() -> Option<PathBuf> {
    let folder = std::env::var_os("STOKER_PAGES_PICTURES")?;
    Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder))
}

/// Nothing keeps people out in either theme, nothing is wider than a window, and the picture is small.
async fn looks_well(browser: &Browser, test: &str, name: &str) -> Result<()> {
    let folder = pictures().filter(|_| name != "what-if");
    for theme in Theme::ALL {
        for width in WIDTHS {
            browser.look(theme, width).await?;
            let found = browser.axe(test).await?;
            ensure!(found.is_empty(), "{name}, {}, {width}: {}", theme.name(), found.join("\n"));
            let wide = "[...document.querySelectorAll('main *, header *')].filter(one => one.getBoundingClientRect().right > innerWidth + 1 \
                        && !one.parentElement.closest('.scroll, pre')).map(one => one.outerHTML.slice(0, 120)).slice(0, 5).join('\\n')";
            let overflow = browser.overflow().await?;
            ensure!(overflow <= 0, "{name} is {overflow} wider than {width}: {}", browser.value(wide).await?);
            if let Some(folder) = &folder {
                let picture = browser.screenshot(theme, width).await?;
                fs::create_dir_all(folder)?;
                fs::write(folder.join(format!("{name}-{}-{width}.png", theme.name())), &picture)?;
            }
        }
    }
    browser.look(Theme::Light, 1280).await
}

#[test]
fn a_load_step_its_decision_a_killed_pod_and_a_roll_are_seen_in_a_browser() -> Result<()> {
    let test = "a_load_step_its_decision_a_killed_pod_and_a_roll_are_seen_in_a_browser";
    let (rig, url) = rig_with_pages()?;
    let Some(browser) = rig.block_on(Browser::start(test))? else { return Ok(()) };
    rig.block_on(browser.open(&url))?;
    rig.block_on(browser.wait_until("live", "document.getElementById('live').textContent === 'live'"))?;

    // What is made while the page is open comes onto it.
    rig.apply("chat", scaled(json!({})))?;
    rig.apply("broken", json!({"model": {"source": "file:///stand-in/load-fails"}, "replicas": 1}))?;
    shows(&rig, &browser, "#fleet", "chat")?;
    shows(&rig, &browser, "#fleet", "ModelLoadFailed")?;
    shows(&rig, &browser, "#fleet", "no such file")?;
    shows(&rig, &browser, "#fleet", "Serving")?;

    // A step of load: from one replica to three, with a decision that can be read.
    rig.block_on(browser.click("a[href='/ns/default/chat']"))?;
    shows(&rig, &browser, "#why", "Why 1 replica?")?;
    let first = serving(&rig).remove(0);
    let streams = Streams::hold(&first, 14);
    shows(&rig, &browser, "#why", "Why 3 replicas?")?;
    shows(&rig, &browser, "#head", "3 of 3")?;
    shows(&rig, &browser, "#decisions", "1 → ")?;
    rig.block_on(browser.click("#decisions td a"))?;
    shows(&rig, &browser, "#why", "The decision of")?;
    let why = rig.block_on(browser.text("#why pre"))?;
    let asked = rig.block_on(browser.value("Number(new URLSearchParams(location.search).get('at'))"))?;
    let records = rig.operator.records("chat", 0)?;
    let record = records.iter().find(|record| Some(record.at_ms) == asked.as_u64()).unwrap();
    assert_eq!(why.trim_end(), stoker_scaling::explain(record).trim_end(), "the words of explain");

    // What other settings would have decided.
    rig.block_on(browser.fill("#w-max", "2"))?;
    rig.block_on(browser.click("#what-if button"))?;
    shows(&rig, &browser, "#what-if", "Replicas, most\t3\t2")?;
    rig.block_on(looks_well(&browser, test, "what-if"))?;
    rig.block_on(browser.open(&format!("{url}{CHAT}")))?;

    // A pod is killed, and the page says of what it ended.
    let killed = serving(&rig).into_iter().find(|pod| pod.name_any() != first.name_any()).unwrap().name_any();
    rig.cluster.node.kill_pod(NAMESPACE, &killed)?;
    shows(&rig, &browser, "#replicas", "exit code")?;
    shows(&rig, &browser, "#head", "3 of 3")?;

    // The load goes, and so do replicas.
    drop(streams);
    shows(&rig, &browser, "#why", "Why 1 replica?")?;
    shows(&rig, &browser, "#head", "1 of 1")?;

    // A roll is followed from the older revision to the wanted one.
    rig.apply("chat", scaled(json!({"engine": {"maxModelLen": 512}})))?;
    shows(&rig, &browser, "#rollout", "older")?;
    rig.wait_ready("chat", SOON)?;
    shows(&rig, &browser, "#head", "Serving")?;
    rig.block_on(browser.wait_until("the roll is over", "!document.querySelector('#rollout table')"))?;
    shows(&rig, &browser, "#events", "Scaled")?;

    if pictures().is_some() {
        waves(&rig);
    }
    rig.block_on(looks_well(&browser, test, "deployment"))?;
    rig.block_on(browser.open(&url))?;
    rig.block_on(looks_well(&browser, test, "fleet"))?;
    let complaints = browser.complaints();
    ensure!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

#[test]
fn an_open_page_outlives_its_operator_and_says_so_meanwhile() -> Result<()> {
    let test = "an_open_page_outlives_its_operator_and_says_so_meanwhile";
    let (mut rig, url) = rig_with_pages()?;
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}, "replicas": 1}))?;
    rig.wait_ready("chat", SOON)?;
    let page = get(&format!("{url}{CHAT}"))?;
    assert!(page.contains("Why 1 replica?") && page.contains("the number does not follow the load"), "{page}");
    assert!(get(&format!("{url}/ns/default/%3Cscript%3E"))?.contains("No such deployment"));
    let odd = get(&format!("{url}/?sort=%3C&page=-7&q=%00&state=%F0%9F%98%80"))?;
    assert!(odd.contains("<main"), "something is shown whatever is asked: {odd}");
    let events = Command::new("curl").args(["-sN", "--max-time", "6", &format!("{url}/events")]).output()?;
    let events = String::from_utf8_lossy(&events.stdout).into_owned();
    assert!(events.contains("event: build") && events.contains("data: facts"), "{events}");
    assert!(events.matches("data: fleet").count() == 1, "the table once, then nothing while nothing changes: {events}");
    let head = Command::new("curl").args(["-sI", &url]).output()?;
    let head = String::from_utf8_lossy(&head.stdout).to_lowercase();
    assert!(head.contains("content-security-policy: default-src 'none'") && head.contains("no-store"), "{head}");

    let Some(browser) = rig.block_on(Browser::start(test))? else { return Ok(()) };
    rig.block_on(browser.open(&format!("{url}{CHAT}")))?;
    shows(&rig, &browser, "#live", "live")?;
    rig.operator.kill()?;
    shows(&rig, &browser, "#live", "not connected since")?;
    rig.operator.restart()?;
    rig.block_on(browser.wait_until("live again", "document.getElementById('live').textContent === 'live'"))?;
    rig.delete("chat")?;
    shows(&rig, &browser, "#head", "Delet")?;
    Ok(())
}
