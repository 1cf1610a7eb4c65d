//! A node that keeps a model in memory for replicas to come. Operator, real agents and a hub on loopback, on a real control plane.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{core::v1::Pod, events::v1::Event};
use kube::{ResourceExt, api::ListParams};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::status::StandbyStatus;
use stoker_tests::{
    cluster::built,
    hub::{Commit, Hub, Repository},
    operator::{Rig, revision_of},
    resident::in_memory,
};

/// A busy machine fetches, loads and probes in this time.
const LIMIT: Duration = Duration::from_secs(180);
/// The image with the real agent.
const IMAGE: &str = "real/agent:1";

/// The node has 64 CPUs: three such replicas fit.
fn spec(replicas: u32, max_model_len: u32, standby: u32) -> Value {
    json!({
        "model": {"source": "hf://tests/ember"},
        "engine": {"threads": 1, "maxModelLen": max_model_len, "kvCacheTokens": 1024},
        "resources": {"cpu": 20},
        "drain": {"deadlineSeconds": 5, "withdrawSeconds": 0},
        "replicas": replicas,
        "scaling": {"max": 3, "mode": "advisory", "standby": standby},
        "pod": {"image": IMAGE},
    })
}

fn standby(rig: &Rig) -> Result<Option<StandbyStatus>> {
    Ok(rig.get("chat")?.status.and_then(|status| status.standby))
}

/// Pods that stand by and are not on their way out.
fn pods(rig: &Rig) -> Result<Vec<Pod>> {
    let stand_by = ListParams::default().labels("app.kubernetes.io/component=standby");
    let mut pods = rig.block_on(rig.api::<Pod>().list(&stand_by))?.items;
    pods.retain(|pod| pod.metadata.deletion_timestamp.is_none());
    Ok(pods)
}

fn is_ready(rig: &Rig) -> Result<bool> {
    Ok(standby(rig)?.is_some_and(|standby| (standby.wanted, standby.ready) == (1, 1)))
}

#[test]
fn a_node_keeps_the_model_in_memory_for_replicas_to_come() -> Result<()> {
    let node_cache = tempfile::tempdir()?;
    let ember = Commit::of_directory(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"))?;
    let hub = Hub::start(vec![Repository::public("tests/ember", ember)])?;
    let mut rig = Rig::start(Audit::Off)?;
    rig.cluster.node.add_image(IMAGE, built("stoker-agent"));
    let cache = node_cache.path().to_str().context("a path of text")?;
    rig.operator.restart_with(&["--hub-endpoint", &hub.endpoint(), "--model-cache", cache])?;
    rig.apply("chat", spec(1, 256, 1))?;
    rig.wait_ready("chat", LIMIT)?;
    rig.wait("the status says that a node has it in memory", LIMIT, is_ready)?;

    let made = pods(&rig)?;
    ensure!(made.len() == 1, "{made:?}");
    let kept = &made[0];
    let asked = kept.spec.as_ref().context("a spec")?.containers[0].resources.clone().context("what it asks for")?;
    let status = rig.get("chat")?.status.context("a status")?;
    let bytes = status.model.and_then(|model| model.bytes).context("the model's size")?;
    ensure!(asked.requests.context("requests")?["memory"].0 == (bytes + (64 << 20)).to_string());
    ensure!(status.replicas == 1, "{} replicas: the pod that stands by is counted as one", status.replicas);
    for blob in fs::read_dir(node_cache.path().join("blobs"))? {
        let (there, all) = in_memory(&blob?.path())?;
        ensure!(there == all, "{there} of {all} bytes in memory");
    }
    rig.wait("an Event tells of it", LIMIT, |rig| {
        let events = rig.block_on(rig.api::<Event>().list(&ListParams::default()))?.items;
        Ok(events.iter().any(|event| event.reason.as_deref() == Some("StandingBy")))
    })?;

    // A replica more changes nothing while there is room for another.
    rig.apply("chat", spec(2, 256, 1))?;
    rig.wait("two serve", LIMIT, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 2)))?;
    rig.wait("the status still says so", LIMIT, is_ready)?;
    let still = pods(&rig)?;
    ensure!(still.len() == 1 && still[0].uid() == kept.uid(), "{still:?}");
    rig.wait("scaling knows that it started warm, and that the next one would", LIMIT, |rig| {
        let last = rig.operator.records("chat", 0)?.pop();
        let standby = last.and_then(|record| record.signals.standby);
        Ok(standby.is_some_and(|standby| standby.next_start_seconds().is_some()))
    })?;

    rig.apply("chat", spec(1, 128, 1))?;
    rig.wait("it stands by for the new revision alone", LIMIT, |rig| {
        let revision = rig.get("chat")?.status.context("a status")?.revision;
        let pods = pods(rig)?;
        Ok(revision != revision_of(kept) && is_ready(rig)? && pods.iter().all(|pod| revision_of(pod) == revision))
    })?;

    rig.apply("chat", spec(1, 128, 0))?;
    rig.wait("nothing is left of it", LIMIT, |rig| Ok(pods(rig)?.is_empty() && standby(rig)?.is_none()))?;
    Ok(())
}
