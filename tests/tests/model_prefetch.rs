//! A change of the model where there is no room for one more replica: the node has the next model before its replica goes. Operator, real
//! agents and a hub on loopback, on a real control plane.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    core::v1::{Pod, ResourceQuota},
    events::v1::Event,
};
use kube::{ResourceExt, api::ListParams};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::status::PrefetchStatus;
use stoker_tests::{
    cluster::built,
    hub::{Commit, Hub, Repository},
    operator::{Rig, condition, intent_of, is_ready, revision_of, serves},
};

/// A busy machine fetches, loads and probes in this time.
const LIMIT: Duration = Duration::from_secs(180);
/// The image with the real agent.
const IMAGE: &str = "real/agent:1";
const WEIGHTS: &str = "model.safetensors";

/// Ember with a bit of the last weight turned: another file to the cache, as the weights of another model are.
fn next_ember() -> Result<Commit> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember");
    let mut files = Vec::new();
    for name in
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    {
        files.push((name, fs::read(dir.join(name))?));
    }
    let mut weights = fs::read(dir.join(WEIGHTS))?;
    let low_byte = weights.len() - 2;
    weights[low_byte] ^= 1;
    files.push((WEIGHTS, weights));
    Ok(Commit::of(files))
}

fn ember() -> Result<Commit> {
    Commit::of_directory(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"))
}

/// The node has 64 CPUs: one such replica fits, two do not.
fn spec(source: &str, deadline_seconds: u32) -> Value {
    json!({
        "model": {"source": source},
        "engine": {"threads": 1, "maxModelLen": 256, "kvCacheTokens": 1024},
        "resources": {"cpu": 40},
        "drain": {"deadlineSeconds": 5, "withdrawSeconds": 0},
        "rollout": {"maxUnavailable": 1, "surgeSeconds": 2, "progressDeadlineSeconds": deadline_seconds},
        "pod": {"image": IMAGE},
    })
}

/// A rig where nodes keep models, with a replica of ember that leaves no room for another one.
fn rig(hub: &Hub, node_cache: &Path) -> Result<Rig> {
    let mut rig = Rig::start(Audit::Off)?;
    rig.cluster.node.add_image(IMAGE, built("stoker-agent"));
    let cache = node_cache.to_str().context("a path of text")?;
    rig.operator.restart_with(&["--hub-endpoint", &hub.endpoint(), "--model-cache", cache])?;
    rig.apply("chat", spec("hf://tests/ember", 600))?;
    rig.wait_ready("chat", LIMIT)?;
    hub.take_asked();
    Ok(rig)
}

fn prefetch(rig: &Rig) -> Result<Option<PrefetchStatus>> {
    Ok(rig.get("chat")?.status.and_then(|status| status.rollout).and_then(|rollout| rollout.prefetch))
}

fn prefetch_pods(rig: &Rig) -> Result<Vec<Pod>> {
    let of_prefetches = ListParams::default().labels("app.kubernetes.io/managed-by=stoker-prefetch");
    Ok(rig.block_on(rig.api::<Pod>().list(&of_prefetches))?.items)
}

/// Events that tell of a pod that fetches ahead.
fn told(rig: &Rig) -> Result<usize> {
    let events = rig.block_on(rig.api::<Event>().list(&ListParams::default()))?.items;
    Ok(events.iter().filter(|event| event.reason.as_deref() == Some("Prefetching")).count())
}

/// Pods of replicas, without those that fetch ahead.
fn replicas(rig: &Rig) -> Result<Vec<Pod>> {
    let is_replica = |pod: &Pod| pod.labels().get("app.kubernetes.io/component").is_some_and(|role| role == "agent");
    Ok(rig.pods("chat")?.into_iter().filter(is_replica).collect())
}

/// True while there is a replica of this revision that nobody told to go.
fn stays(rig: &Rig, revision: &str) -> Result<bool> {
    let pods = replicas(rig)?;
    let of_revision = pods.iter().filter(|pod| revision_of(pod) == revision);
    Ok(of_revision.into_iter().any(|pod| intent_of(pod).is_none_or(|(_, drains)| !drains)))
}

fn revision(rig: &Rig) -> Result<String> {
    Ok(rig.get("chat")?.status.context("a status")?.revision)
}

#[test]
fn a_full_node_has_the_next_model_before_its_replica_goes() -> Result<()> {
    let node_cache = tempfile::tempdir()?;
    let hub =
        Hub::start(vec![Repository::public("tests/ember", ember()?), Repository::public("tests/next", next_ember()?)])?;
    let rig = rig(&hub, node_cache.path())?;
    let before = revision(&rig)?;

    // It does not end before it is let go.
    hub.slow_down(Duration::from_secs(2));
    rig.apply("chat", spec("hf://tests/next", 600))?;
    rig.wait("the status says that the node fetches and who stays", LIMIT, |rig| {
        let so_far = prefetch(rig)?.is_some_and(|prefetch| (prefetch.nodes, prefetch.done) == (1, 0));
        let (_, reason, message) = condition(&rig.get("chat")?, "Progressing").unwrap_or_default();
        // `surgeSeconds` are over: without the fetch it would be drained by now.
        Ok(so_far && reason == "ReplacingInPlace" && message.contains("the replica of 1 stays until then"))
    })?;
    ensure!(stays(&rig, &before)?, "the old replica goes before the node has the model");
    let pods = prefetch_pods(&rig)?;
    ensure!(pods.len() == 1 && pods[0].spec.as_ref().is_some_and(|spec| spec.node_name.is_some()), "{pods:?}");
    let counted = rig.get("chat")?.status.context("a status")?.replicas;
    ensure!(counted == 2, "{counted} replicas: the pod that fetches is counted as one");

    let fetched = Instant::now();
    hub.slow_down(Duration::ZERO);
    rig.wait("the node has it", LIMIT, |rig| {
        Ok(prefetch(rig)?.is_none_or(|prefetch| prefetch.done == 1) || !stays(rig, &before)?)
    })?;
    rig.wait("the old replica goes", LIMIT, |rig| Ok(!replicas(rig)?.iter().any(serves)))?;
    let alone = Instant::now();
    let asked_before = hub.take_asked();
    rig.wait_ready("chat", LIMIT)?;
    eprintln!("fetched after {:?}; nobody served for {:?}", alone - fetched, alone.elapsed());
    ensure!(revision(&rig)? != before, "the change is not rolled out");

    let of_weights = |asked: &[stoker_tests::hub::Asked]| {
        asked.iter().filter(|asked| asked.store && asked.what.starts_with("GET")).count()
    };
    let asked_after = hub.take_asked();
    ensure!(of_weights(&asked_before) > 0, "the node fetched nothing: {asked_before:?}");
    ensure!(of_weights(&asked_after) == 0, "the replica fetched again what its node had: {asked_after:?}");
    rig.wait("nothing is left of it", LIMIT, |rig| Ok(prefetch_pods(rig)?.is_empty() && prefetch(rig)?.is_none()))?;
    rig.wait("an Event tells of it", LIMIT, |rig| Ok(told(rig)? == 1))?;

    // Another change of the same model has nothing to fetch.
    let (mut shorter, of_model) = (spec("hf://tests/next", 600), revision(&rig)?);
    shorter["engine"]["maxModelLen"] = json!(128);
    rig.apply("chat", shorter)?;
    rig.wait("it is rolled out", LIMIT, |rig| Ok(is_ready(&rig.get("chat")?) && revision(rig)? != of_model))?;
    ensure!(told(&rig)? == 1 && hub.take_asked().iter().all(|asked| !asked.store), "a model was fetched that is there");
    Ok(())
}

#[test]
fn what_cannot_be_fetched_ahead_holds_up_a_change_until_its_deadline_only() -> Result<()> {
    let node_cache = tempfile::tempdir()?;
    let hub =
        Hub::start(vec![Repository::public("tests/ember", ember()?), Repository::public("tests/next", next_ember()?)])?;
    let rig = rig(&hub, node_cache.path())?;
    let before = revision(&rig)?;
    let changed = Instant::now();
    rig.apply("chat", spec("hf://tests/absent", 30))?;
    rig.wait("the status says why the node does not get it", LIMIT, |rig| {
        Ok(prefetch(rig)?
            .is_some_and(|prefetch| prefetch.done == 0 && prefetch.message.contains("there is no such model")))
    })?;
    ensure!(stays(&rig, &before)?, "the old replica goes for a model that is not there");
    rig.wait("its replica goes nevertheless", LIMIT, |rig| Ok(!stays(rig, &before)?))?;
    let waited = changed.elapsed();
    ensure!(waited >= Duration::from_secs(28), "only {waited:?} after the change");
    rig.wait("the change is given up, and what served before serves again", LIMIT, |rig| {
        let is_back = condition(&rig.get("chat")?, "Ready").is_some_and(|ready| ready.1 == "RolledBack");
        Ok(is_back && stays(rig, &before)? && replicas(rig)?.iter().all(serves))
    })?;
    rig.wait("nothing is left of it", LIMIT, |rig| Ok(prefetch_pods(rig)?.is_empty()))?;

    // Who has a quota of CPU takes no pod that names none.
    let quota = json!({"metadata": {"name": "cpus"}, "spec": {"hard": {"requests.cpu": "200"}}});
    let quotas = rig.api::<ResourceQuota>();
    rig.block_on(quotas.create(&Default::default(), &serde_json::from_value(quota)?))?;
    rig.wait("the quota is in force", LIMIT, |rig| {
        let quota = rig.block_on(rig.api::<ResourceQuota>().get("cpus"))?;
        Ok(quota.status.and_then(|status| status.hard).is_some())
    })?;
    rig.apply("chat", spec("hf://tests/next", 600))?;
    rig.wait("the status quotes it", LIMIT, |rig| {
        Ok(prefetch(rig)?.is_some_and(|prefetch| {
            prefetch.refused.is_some_and(|refused| refused.contains("cpus")) && prefetch.message.contains("refuses")
        }))
    })?;
    rig.wait_ready("chat", LIMIT)?;
    ensure!(
        revision(&rig)? != before && prefetch_pods(&rig)?.is_empty(),
        "{:?}",
        rig.pods("chat")?.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
    );
    Ok(())
}
