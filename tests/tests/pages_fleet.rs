//! The fleet in a browser, as a platform team sees it: a step of load is watched, its decision read, a pod killed, a roll followed. A real
//! API server, the real operator, a real Chromium; agents are stand-ins.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    convert::Infallible,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use axum::{
    Router,
    response::{Html, Sse, sse::Event},
    routing,
};
use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_pages::{
    fleet::{self, Fleet, FleetQuery},
    live,
    view::Summary,
};
use stoker_tests::{
    browser::Browser,
    looks::looks_well,
    operator::{NAMESPACE, Rig, get, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
const CHAT: &str = "/ns/default/chat";
/// Of an operator, one every two seconds.
const LOOKS_A_DAY: u64 = 86_400 / 2;
/// That the operator takes for pages at once.
const CONNECTIONS: usize = 512;

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

/// What the page says, once it does.
fn shows(rig: &Rig, browser: &Browser, part: &str, words: &str) -> Result<()> {
    rig.block_on(browser.shows(part, words))
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
    let why = rig.block_on(browser.text("#why .explained"))?;
    let asked = rig.block_on(browser.value("Number(new URLSearchParams(location.search).get('at'))"))?;
    let records = rig.operator.records("chat", 0)?;
    let record = records.iter().find(|record| Some(record.at_ms) == asked.as_u64()).unwrap();
    assert_eq!(why.trim_end(), stoker_scaling::explain(record).trim_end(), "the words of explain");

    // What other settings would have decided.
    rig.block_on(browser.fill("#w-max", "2"))?;
    rig.block_on(browser.click("#what-if button"))?;
    shows(&rig, &browser, "#what-if", "Replicas, most\t3\t2")?;
    rig.block_on(looks_well(&browser, test))?;
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

    shows(&rig, &browser, "#head", "http://chat.default.svc:8000")?;
    rig.block_on(looks_well(&browser, test))?;
    rig.block_on(browser.open(&url))?;
    rig.block_on(looks_well(&browser, test))?;
    let complaints = browser.complaints();
    ensure!(complaints.is_empty(), "{complaints:?}");
    Ok(())
}

/// What the upper edge of a panel stands for.
fn edge(page: &str, panel: &str) -> String {
    let drawn = page.split_once(&format!("{panel}</span>")).map(|(_, drawn)| drawn).unwrap_or_default();
    let edge = drawn.split_once("class=\"edge\">").and_then(|(_, edge)| edge.split_once('<'));
    edge.map(|(edge, _)| edge.to_owned()).unwrap_or_default()
}

#[test]
fn the_load_of_before_outlives_the_operator_that_read_it() -> Result<()> {
    let (mut rig, url) = rig_with_pages()?;
    let page = format!("{url}{CHAT}");
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}, "replicas": 2}))?;
    rig.wait_ready("chat", SOON)?;
    let pods = serving(&rig);
    let memory =
        |pod: &Pod| get(&format!("http://{}:8001/v1/history", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap()));
    let streams = Streams::hold(&pods[0], 8);
    rig.wait("the operator draws eight requests", SOON, |_| Ok(edge(&get(&page)?, "Requests") == "8"))?;
    rig.wait("the agent remembers them", SOON, |_| Ok(memory(&pods[0])?.contains(",8.0,0.0,")))?;
    rig.wait("the other agent remembers something", SOON, |_| Ok(memory(&pods[1])?.contains(r#""fine":[["#)))?;
    drop(streams);
    // Ages are whole seconds.
    std::thread::sleep(Duration::from_secs(2));

    rig.operator.kill()?;
    rig.operator.restart()?;
    rig.wait("both replicas told the next operator what they remember", SOON, |_| {
        Ok(get(&page).is_ok_and(|text| text.contains("what 2 replicas that still run remember of themselves")))
    })?;
    let text = get(&page)?;
    assert_eq!((edge(&text, "Requests"), edge(&text, "Replicas")), ("8".to_owned(), "2".to_owned()), "{text}");
    assert!(text.contains("0 running, 0 waiting"), "nothing runs now: {text}");
    Ok(())
}

#[test]
fn an_agent_that_is_gone_is_said_and_what_it_carried_is_not_counted() -> Result<()> {
    let (rig, url) = rig_with_pages()?;
    let page = format!("{url}{CHAT}");
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}, "replicas": 2}))?;
    rig.wait_ready("chat", SOON)?;
    let pod = serving(&rig).remove(0);
    let _streams = Streams::hold(&pod, 8);
    rig.wait("eight requests are shown", SOON, |_| Ok(get(&page)?.contains("8 <small>running")))?;
    rig.cluster.node.freeze_pod(NAMESPACE, &pod.name_any())?;
    rig.wait("it is said", SOON, |_| Ok(get(&page)?.contains("its agent does not answer any more")))?;
    rig.wait("none of its requests is shown", SOON, |_| Ok(get(&page)?.contains("0 <small>running")))?;
    Ok(())
}

/// Three deployments, one of which runs as many requests as there were looks.
fn fleet_at(look: u64) -> Fleet {
    let row = |idx: u64| Summary { namespace: "n".into(), name: format!("chat-{idx}"), ..Summary::default() };
    let mut all: Vec<Summary> = (0..3).map(row).collect();
    all[0].load.running = u32::try_from(look).unwrap_or(u32::MAX);
    Fleet { all, now_ms: 0 }
}

/// What an operator says in a day, at once.
fn day() -> impl Stream<Item = Result<Event, Infallible>> {
    let build = Event::default().event("build").data(live::build());
    let looks = (1..=LOOKS_A_DAY).flat_map(|look| {
        let (parts, _) = fleet::fragments(&fleet_at(look), &FleetQuery::default(), Some(3));
        parts.into_iter().take(2).map(|part| Event::default().data(part.message()))
    });
    stream::iter(std::iter::once(build).chain(looks)).map(Ok).chain(stream::pending())
}

/// The address of a page of the fleet that lives through a day in a moment.
async fn day_in_a_moment() -> Result<String> {
    let page = || async { Html(fleet::page(&fleet_at(0), &FleetQuery::default())) };
    let routes = Router::new()
        .route("/", routing::get(page))
        .route("/events", routing::get(|| async { Sse::new(day()) }))
        .route(&format!("/assets/{}", live::SCRIPT.name()), routing::get(script));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    // It ends with the test.
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok(url)
}

async fn script() -> ([(&'static str, &'static str); 1], &'static str) {
    ([("content-type", live::SCRIPT.content_type)], live::SCRIPT.text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_left_open_for_a_day_shows_the_last_look_and_does_not_grow() -> Result<()> {
    let test = "a_page_left_open_for_a_day_shows_the_last_look_and_does_not_grow";
    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    browser.open(&day_in_a_moment().await?).await?;
    let nodes = browser.value("document.querySelectorAll('*').length").await?;
    let last = format!("document.querySelector('#facts').innerText.includes('{LOOKS_A_DAY} ')");
    browser.wait_until("the last look of the day", &last).await?;
    assert_eq!(browser.value("document.querySelectorAll('*').length").await?, nodes, "as many elements as at first");
    let bytes = browser.value("performance.memory.usedJSHeapSize").await?.as_f64().unwrap();
    assert!(bytes < 64e6, "{bytes} bytes of script's memory");
    Ok(())
}

#[test]
fn pages_are_served_to_so_many_and_not_to_who_never_asks() -> Result<()> {
    let (rig, url) = rig_with_pages()?;
    let address = url.trim_start_matches("http://");
    let mut slow = TcpStream::connect(address)?;
    slow.write_all(b"GET / HTTP/1.1\r\nHost: ")?;
    let begun = Instant::now();
    let idle: Vec<TcpStream> = (1..CONNECTIONS).map(|_| TcpStream::connect(address)).collect::<Result<_, _>>()?;
    rig.wait("one connection more is closed", SOON, |_| Ok(get(&url).is_err()))?;
    drop(idle);
    rig.wait("there is room again", SOON, |_| Ok(get(&url).is_ok_and(|page| page.contains("<main"))))?;
    slow.set_read_timeout(Some(SOON))?;
    let mut rest = Vec::new();
    slow.read_to_end(&mut rest)?;
    assert!(begun.elapsed() > Duration::from_secs(25), "a head may take thirty seconds");
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
