//! Somebody sets the clock of the operator's machine, by an hour and by years, ahead and back: nothing is written for it, no
//! stream is cut, and what is asked for meanwhile comes as fast as ever. The process is the real one; its wall clock is
//! preloaded.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_tests::{
    operator::{Rig, get, is_ready, revision_of, serves},
    wall_clock::WallClock,
};

const SOON: Duration = Duration::from_secs(60);
/// Several readings, several decisions, and renewals of the Lease.
const A_WHILE: Duration = Duration::from_secs(5);
const HOUR: i64 = 3600;
const YEAR: i64 = 8766 * HOUR;

fn spec(replicas: u32, change: &str) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": replicas, "pod": {"annotations": {"change": change}},
        "drain": {"withdrawSeconds": 1, "deadlineSeconds": 60},
    })
}

fn writes(rig: &Rig) -> Vec<String> {
    let text = rig.operator.metrics().unwrap();
    text.lines().filter(|line| line.starts_with("stoker_operator_api_writes_total")).map(str::to_owned).collect()
}

fn uids(pods: &[Pod]) -> Vec<String> {
    pods.iter().filter_map(ResourceExt::uid).collect()
}

fn this_year(date: &str) -> bool {
    date.starts_with(&jiff::Timestamp::now().to_string()[..3])
}

/// A stream that a client holds open.
fn hold(pod: &Pod, seconds: u64) -> Child {
    let ip = pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap();
    let url = format!("http://{ip}:8000/stream/{seconds}");
    Command::new("curl").args(["-sSN", "--max-time", "90", &url]).stdout(Stdio::piped()).spawn().unwrap()
}

fn end_of(stream: Child) -> String {
    let output = stream.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_clock_that_is_set_moves_nothing() {
    let mut rig = Rig::start(Audit::Off).unwrap();
    let clock = WallClock::new().unwrap();
    rig.operator.restart_in(&clock.environment()).unwrap();
    let pages = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    rig.operator.restart_with(&["--pages-address", &pages]).unwrap();
    rig.apply("steady", spec(2, "a")).unwrap();
    rig.wait_ready("steady", SOON).unwrap();
    sleep(A_WHILE);

    let (before, pods) = (writes(&rig), uids(&rig.pods("steady").unwrap()));
    for ahead in [HOUR, -HOUR, 10 * YEAR, -10 * YEAR] {
        clock.set(ahead).unwrap();
        rig.nudge("steady").unwrap();
        sleep(A_WHILE);
        assert_eq!(writes(&rig), before, "{ahead} s ahead");
        assert_eq!(uids(&rig.pods("steady").unwrap()), pods, "{ahead} s ahead");
        let page = get(&format!("http://{pages}/ns/default/steady")).unwrap();
        let dates: Vec<&str> = page.split("datetime=\"").skip(1).collect();
        assert!(dates.len() > 5 && dates.iter().all(|date| this_year(date)), "{ahead} s ahead: {page}");
    }

    // A drain whose deadline is a minute away: an hour ahead it would be over, and an hour back it would last for an hour.
    clock.set(0).unwrap();
    let streams: Vec<Child> = rig.pods("steady").unwrap().iter().map(|pod| hold(pod, 8)).collect();
    sleep(Duration::from_secs(1));
    rig.scale("steady", 1).unwrap();
    rig.wait("one drains", SOON, |rig| Ok(rig.pods("steady")?.iter().filter(|pod| serves(pod)).count() == 1)).unwrap();
    clock.set(HOUR).unwrap();
    rig.nudge("steady").unwrap();
    sleep(Duration::from_secs(2));
    let staying = rig.pods("steady").unwrap();
    assert!(staying.iter().all(|pod| pod.metadata.deletion_timestamp.is_none()), "deleted while it streams");
    clock.set(-10 * YEAR).unwrap();
    for stream in streams {
        assert_eq!(end_of(stream), "done");
    }
    rig.wait("one is left", SOON, |rig| Ok(rig.pods("steady")?.len() == 1)).unwrap();

    // What is asked for is done, also by an operator that starts with a wrong clock.
    rig.operator.kill().unwrap();
    clock.set(10 * YEAR).unwrap();
    rig.operator.restart().unwrap();
    let old = rig.get("steady").unwrap().status.unwrap().revision;
    rig.apply("steady", spec(2, "b")).unwrap();
    rig.wait("the change is rolled out", SOON, |rig| {
        let pods = rig.pods("steady")?;
        Ok(is_ready(&rig.get("steady")?) && pods.len() == 2 && pods.iter().all(|pod| revision_of(pod) != old))
    })
    .unwrap();
    let conditions = rig.get("steady").unwrap().status.unwrap().conditions;
    assert!(conditions.iter().all(|said| this_year(&said.last_transition_time.0.to_string())), "{conditions:?}");
    // The preloaded clock did what it should.
    let log = rig.operator.last_words();
    assert!(log.lines().any(|line| !this_year(line) && line.contains("applying")), "{log}");
}
