//! Somebody who reaches an agent's ports and throws orders at it as fast as they go, of every kind that is none, while it
//! streams: no stream is cut, it stays ready, and the log says of each kind that it was tried, once a second at most.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use reqwest::{Client, StatusCode};
use serde_json::Value;
use stoker_crds::{
    contract::{AgentPhase, DrainSettings},
    intent::{INTENT_PATH, Order, SIGNATURE_HEADER, Want},
};
use stoker_tests::{
    agent_pod::{AgentPod, signature},
    bystanders::{Probes, stream},
};

/// Cuts every stream at once.
const DRAIN: Want = Want::Drain(DrainSettings { deadline_seconds: 0, withdraw_seconds: 0 });
/// Streams at a time, and who throws orders at a time.
const STREAMS: usize = 4;
const THROWERS: usize = 4;
/// The number that the operator's own order has.
const TAKEN: u64 = 8;

/// What is thrown, and how the admin port answers.
struct Forgery {
    what: &'static str,
    body: Vec<u8>,
    signature: Option<String>,
    status: u16,
    /// Empty where nothing is refused.
    code: &'static str,
}

fn forgeries(operators: &Order) -> Result<Vec<Forgery>> {
    let drain = Order { number: TAKEN + 1, want: DRAIN, expires_up_ms: u64::MAX, ..operators.clone() };
    let forged = |what, order: &Order, seed: Option<u8>, status, code| -> Result<Forgery> {
        let body = serde_json::to_vec(order)?;
        let signature = seed.map(|seed| signature(&body, seed));
        Ok(Forgery { what, body, signature, status, code })
    };
    let other_pod = Order { pod_uid: "uid-2".into(), ..drain.clone() };
    let other_process = Order { start_id: "before".into(), ..drain.clone() };
    let expired = Order { expires_up_ms: 1, ..drain.clone() };
    let lower = Order { number: TAKEN - 1, ..drain.clone() };
    let reused = Order { number: TAKEN, ..drain.clone() };
    let changed = Forgery { body: serde_json::to_vec(&drain)?, ..forged("", operators, Some(1), 0, "")? };
    let large = Forgery { body: vec![b' '; 1 << 20], ..forged("", &drain, Some(1), 0, "")? };
    Ok(vec![
        forged("unsigned", &drain, None, 401, "signature_missing")?,
        Forgery { signature: Some("00".into()), ..forged("no signature", &drain, None, 400, "signature_malformed")? },
        forged("by another key", &drain, Some(2), 403, "signature_wrong")?,
        Forgery { what: "under another's signature", status: 403, code: "signature_wrong", ..changed },
        Forgery { what: "a megabyte", status: 413, code: "order_too_large", ..large },
        // From here on the operator's own key signed, for somebody else or at another time.
        forged("for another pod", &other_pod, Some(1), 403, "other_pod")?,
        forged("for another process", &other_process, Some(1), 409, "other_process")?,
        forged("expired", &expired, Some(1), 403, "order_expired")?,
        forged("older", &lower, Some(1), 409, "lower_number")?,
        forged("of a number that was taken", &reused, Some(1), 409, "number_reused")?,
        forged("the operator's own, again", operators, Some(1), 200, "")?,
    ])
}

/// Throws everything at both ports until the end; how often each was thrown.
async fn throw(pod: &AgentPod, forgeries: &[Forgery], end: Instant) -> Result<BTreeMap<&'static str, u64>> {
    let http = Client::new();
    // What is not read to its end closes the connection, which nobody else is to find in a pool.
    let once = Client::builder().pool_max_idle_per_host(0).build()?;
    let mut thrown = BTreeMap::new();
    while Instant::now() < end {
        for Forgery { what, body, signature, status, code } in forgeries {
            let large = *code == "order_too_large";
            let http = if large { &once } else { &http };
            let put = |url: String| {
                let request = http.put(url).body(body.clone());
                signature.iter().fold(request, |request, signature| request.header(SIGNATURE_HEADER, signature))
            };
            let public = put(pod.agent.url(INTENT_PATH)).send().await;
            // Whoever sends a megabyte to somebody who does not read it may find the connection closed before the answer.
            ensure!(
                public.is_ok_and(|answer| answer.status() == StatusCode::NOT_FOUND) || large,
                "{what}: public port"
            );
            match put(pod.agent.admin_url(INTENT_PATH)).send().await {
                Ok(answer) => {
                    let (got, answer) = (answer.status().as_u16(), answer.json::<Value>().await?);
                    let said = answer["error"]["code"].as_str().unwrap_or_default();
                    ensure!((got, said) == (*status, *code), "{what}: {got} {answer}");
                }
                Err(error) => ensure!(large, "{what}: {error}"),
            }
            *thrown.entry(*what).or_default() += 1;
        }
    }
    Ok(thrown)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_of_nobody_thrown_in_a_loop_cut_no_stream_and_leave_a_line_of_each_kind() -> Result<()> {
    let seconds = std::env::var("STOKER_FORGED_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let pod = AgentPod::ready().await?;
    let operators = Order { expires_up_ms: u64::MAX, ..pod.order(TAKEN, Want::Serve).await? };
    ensure!(pod.give_signed(&operators, 1).await?.0 == 200);
    let forgeries = forgeries(&operators)?;
    let (begun, end) = (Instant::now(), Instant::now() + Duration::from_secs(seconds));
    let probes = Probes::ask(&pod.agent, end);
    let (streams, throws) =
        ((0..STREAMS).map(|_| stream(pod.agent.base(), end)), (0..THROWERS).map(|_| throw(&pod, &forgeries, end)));
    let (streams, thrown) = tokio::try_join!(try_join_all(streams), try_join_all(throws))?;
    let probes = probes.join().expect("it does not panic")?;
    let lasted = begun.elapsed().as_secs();

    let load = pod.agent.load().await?;
    assert_eq!((load.phase, load.intent), (AgentPhase::Ready, Some(TAKEN)));
    let log = pod.agent.log();
    let lines = |code: &str| {
        let of_code = format!("\"code\":\"{code}\"");
        log.lines().filter(|line| line.contains("order refused") && line.contains(&of_code)).count() as u64
    };
    for code in forgeries.iter().map(|forgery| forgery.code).filter(|code| !code.is_empty()) {
        let lines = lines(code);
        assert!((1..=lasted + 1).contains(&lines), "{lines} lines of {code} in {lasted} s");
    }
    let mut by_kind: BTreeMap<&str, u64> = BTreeMap::new();
    thrown.iter().flatten().for_each(|(what, count)| *by_kind.entry(what).or_default() += count);
    assert_eq!(by_kind.len(), forgeries.len());
    println!(
        "{lasted} s: {} orders at each port, {:?}; {} streams whole; probes p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms",
        by_kind.values().sum::<u64>(),
        by_kind,
        streams.iter().sum::<u64>(),
        probes.quantile(0.5),
        probes.quantile(0.99),
        probes.quantile(1.0),
    );
    Ok(())
}
