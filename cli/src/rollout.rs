//! `kubectl stoker rollout`: how a change goes, holding it, going on, undoing it. Writes `spec` with the caller's rights, as
//! `kubectl edit` would, and nothing else.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use stoker_crds::{
    InferenceDeployment, InferenceDeploymentSpec,
    conditions::READY,
    contract::SPEC_FILE,
    status::{CanaryStatus, RevisionStatus, RolloutStatus},
};

use crate::{
    cluster::{Cluster, ClusterArgs},
    explain::ago,
    output::Output,
};

/// Parts of a spec that replicas are made from.
const PARTS: [&str; 6] = ["model", "resources", "parallelism", "engine", "drain", "pod"];
/// The spec is written at most so often while others change it, too.
const WRITES_MAX: usize = 10;

/// What to do with a change.
#[derive(Debug, Args)]
pub(crate) struct Rollout {
    #[command(subcommand)]
    word: Word,
}

#[derive(Debug, Subcommand)]
enum Word {
    /// How far it is, and which revisions there are to go back to.
    Status(Of),
    /// Holds a change: no replica is replaced until it is resumed.
    Pause(Of),
    /// Goes on with a change that was held.
    Resume(Of),
    /// Puts back what the spec said before, or at a revision.
    Undo {
        #[command(flatten)]
        of: Of,
        /// Number of the revision, as `rollout status` shows it. Default: the newest other one that served.
        #[arg(long, value_name = "NUMBER")]
        to_revision: Option<i64>,
    },
}

/// Whose.
#[derive(Clone, Debug, Args)]
struct Of {
    /// The InferenceDeployment.
    name: String,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Does it.
pub(crate) async fn rollout(args: &Rollout) -> Result<()> {
    match &args.word {
        Word::Status(of) => status(of).await,
        Word::Pause(of) => pause(of, true).await,
        Word::Resume(of) => pause(of, false).await,
        Word::Undo { of, to_revision } => undo(of, *to_revision).await,
    }
}

async fn status(of: &Of) -> Result<()> {
    let deployment = Cluster::find(&of.cluster).await?.deployment(&of.name).await?;
    of.output
        .print(&text(&deployment, Timestamp::now()), || json!(deployment.status.and_then(|status| status.rollout)));
    Ok(())
}

async fn pause(of: &Of, paused: bool) -> Result<()> {
    let cluster = Cluster::find(&of.cluster).await?;
    let deployment = cluster.deployment(&of.name).await?;
    let is_so = deployment.spec.rollout.as_ref().and_then(|rollout| rollout.paused).unwrap_or(false);
    let done = if paused { "paused" } else { "resumed" };
    let said = |already: &str| {
        let json = || json!({"name": of.name, "paused": paused, "changed": already.is_empty()});
        of.output.print(&format!("{} is {done}{already}\n", of.name), json);
    };
    if is_so == paused {
        said(" already");
        return Ok(());
    }
    let patch = Patch::Merge(json!({"spec": {"rollout": {"paused": paused.then_some(true)}}}));
    let deployments: Api<InferenceDeployment> = cluster.namespaced();
    deployments.patch(&of.name, &PatchParams::default(), &patch).await.context("write spec.rollout.paused")?;
    said("");
    Ok(())
}

async fn undo(of: &Of, to_revision: Option<i64>) -> Result<()> {
    let cluster = Cluster::find(&of.cluster).await?;
    let deployments: Api<InferenceDeployment> = cluster.namespaced();
    for _ in 0..WRITES_MAX {
        let Undo { generation, spec, target } = put_back(&cluster, &of.name, to_revision).await?;
        match deployments.patch(&of.name, &PatchParams::default(), &only_at(generation, &spec)?).await {
            Err(kube::Error::Api(refused)) if refused.is_conflict() || refused.is_invalid() => {
                let spec_stands = cluster.deployment(&of.name).await?.metadata.generation == generation;
                ensure!(!spec_stands || refused.is_conflict(), "write the spec: {}", refused.message);
            }
            written => {
                written.context("write the spec")?;
                let RevisionStatus { number, revision, .. } = target;
                let text = format!("the spec of {} is that of revision {number} ({revision}) again\n", of.name);
                of.output.print(&text, || json!({"name": of.name, "number": number, "revision": revision}));
                return Ok(());
            }
        }
    }
    bail!("{} was changed by others {WRITES_MAX} times meanwhile: try again", of.name)
}

/// The spec replaced, unless somebody else changed it after that generation. Who writes the status, labels or annotations
/// meanwhile is not in the way.
fn only_at(generation: Option<i64>, spec: &InferenceDeploymentSpec) -> Result<Patch<()>> {
    let steps = json!([
        {"op": "test", "path": "/metadata/generation", "value": generation},
        {"op": "replace", "path": "/spec", "value": spec},
    ]);
    Ok(Patch::Json(serde_json::from_value(steps).context("write the change as a JSON patch")?))
}

/// What undoing comes to.
struct Undo {
    /// Of the spec that was read.
    generation: Option<i64>,
    /// As it should be written.
    spec: InferenceDeploymentSpec,
    /// The revision that it comes from.
    target: RevisionStatus,
}

async fn put_back(cluster: &Cluster, name: &str, to_revision: Option<i64>) -> Result<Undo> {
    let deployment = cluster.deployment(name).await?;
    let rollout = deployment.status.as_ref().and_then(|status| status.rollout.as_ref());
    let rollout = rollout
        .with_context(|| format!("nothing is known of the revisions of {name}: no operator looked at it yet"))?;
    let target = target(rollout, to_revision)?.clone();
    let maps: Api<ConfigMap> = cluster.namespaced();
    let map = format!("{name}-{}", target.revision);
    let kept = maps.get_opt(&map).await.with_context(|| format!("read ConfigMap {map}"))?;
    let spec = kept.and_then(|kept| kept.data?.remove(SPEC_FILE));
    let spec = spec.with_context(|| {
        format!(
            "ConfigMap {map} does not say what revision {} asked for: it was made by an older operator",
            target.number
        )
    })?;
    let spec: Value = serde_json::from_str(&spec).with_context(|| format!("read {SPEC_FILE} of ConfigMap {map}"))?;
    let spec = with_parts(&deployment.spec, &spec)?;
    ensure!(
        spec != deployment.spec,
        "the spec asks for what revision {} was made from: they differ by what the operator was installed with, such as its agent image",
        target.number
    );
    Ok(Undo { generation: deployment.metadata.generation, spec, target })
}

/// The revision to go back to.
fn target(rollout: &RolloutStatus, number: Option<i64>) -> Result<&RevisionStatus> {
    let kept = || {
        let others = rollout.revisions.iter().filter(|entry| entry.revision != rollout.asked);
        let numbers: Vec<String> = others.map(|entry| entry.number.to_string()).collect();
        if numbers.is_empty() { "none".to_owned() } else { numbers.join(", ") }
    };
    let Some(number) = number else {
        let others = rollout.revisions.iter().rev().filter(|entry| entry.served && entry.revision != rollout.asked);
        let newest = others.into_iter().next();
        return newest.with_context(|| format!("no older revision that served is kept; there is: {}", kept()));
    };
    match rollout.revisions.iter().find(|entry| entry.number == number) {
        Some(entry) if entry.revision == rollout.asked => {
            bail!("revision {number} is the one that the spec asks for; older ones are: {}", kept())
        }
        Some(entry) => Ok(entry),
        None => bail!("no revision {number} is kept; there is: {}", kept()),
    }
}

/// The spec with those parts as they were; the others, such as the number of replicas, stay.
fn with_parts(spec: &InferenceDeploymentSpec, kept: &Value) -> Result<InferenceDeploymentSpec> {
    let mut value = serde_json::to_value(spec).context("write the spec as JSON")?;
    let fields = value.as_object_mut().context("a spec is an object")?;
    for part in PARTS {
        match kept.get(part) {
            Some(then) => fields.insert(part.to_owned(), then.clone()),
            None => fields.remove(part),
        };
    }
    serde_json::from_value(value).context("read the kept spec: it is of another version of the resource")
}

fn text(deployment: &InferenceDeployment, now: Timestamp) -> String {
    let status = deployment.status.clone().unwrap_or_default();
    let Some(rollout) = &status.rollout else { return "no operator looked at it yet\n".to_owned() };
    let mut text = String::new();
    let RolloutStatus { asked, phase, .. } = rollout;
    let _ = writeln!(
        text,
        "{phase:?}: revision {asked} is asked for, {} serve, {} of them of revision {}",
        status.ready_of_wanted, status.updated_replicas, status.revision
    );
    if let Some(gone) = &rollout.rolled_back {
        let _ = writeln!(
            text,
            "revision {} was given up {} ago, {} serves: {}",
            gone.revision,
            ago(gone.at.0, now),
            gone.to,
            gone.message
        );
    } else if let Some(ready) =
        status.conditions.iter().find(|condition| condition.type_ == READY && condition.status != "True")
    {
        let _ = writeln!(text, "{}: {}", ready.reason, ready.message);
    }
    if let Some(canary) = &rollout.canary {
        let CanaryStatus { revision, phase, passing_since, message, .. } = canary;
        let since = passing_since.as_ref().map(|since| format!(", passing for {}", ago(since.0, now)));
        let _ = writeln!(text, "canary of revision {revision}: {phase:?}{}: {message}", since.unwrap_or_default());
    }
    if let Some(prefetch) = &rollout.prefetch {
        let _ = writeln!(text, "prefetch of revision {}: {}", prefetch.revision, prefetch.message);
    }
    text.push_str("\nNUMBER   REVISION\n");
    for entry in rollout.revisions.iter().rev() {
        let word = match entry {
            entry if entry.revision == *asked && entry.revision == status.revision => "asked for, serves",
            entry if entry.revision == *asked => "asked for",
            entry if entry.revision == status.revision => "serves",
            entry if entry.served => "served",
            entry if rollout.canary.as_ref().is_some_and(|canary| canary.revision == entry.revision) => "tried",
            _ => "never served",
        };
        let _ = writeln!(text, "{:<8} {:<10} {word}", entry.number, entry.revision);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rollout(asked: &str, entries: &[(i64, &str, bool)]) -> RolloutStatus {
        let revisions = entries
            .iter()
            .map(|(number, revision, served)| json!({"number": number, "revision": revision, "served": served}));
        let revisions: Vec<Value> = revisions.collect();
        serde_json::from_value(json!({
            "asked": asked, "phase": "Progressing", "movedAt": "2026-01-31T12:00:00Z", "revisions": revisions
        }))
        .unwrap()
    }

    #[test]
    fn undo_goes_to_the_newest_other_one_that_served_or_to_the_number() {
        let rollout = rollout("ccc", &[(1, "aaa", true), (2, "bbb", false), (3, "ccc", true)]);
        assert_eq!(target(&rollout, None).unwrap().revision, "aaa");
        assert_eq!(target(&rollout, Some(2)).unwrap().revision, "bbb");
        assert_eq!(target(&rollout, Some(7)).unwrap_err().to_string(), "no revision 7 is kept; there is: 1, 2");
        assert!(target(&rollout, Some(3)).unwrap_err().to_string().contains("the one that the spec asks for"));
    }

    #[test]
    fn undo_without_a_revision_says_so() {
        let rollout = rollout("aaa", &[(1, "aaa", true)]);
        assert_eq!(
            target(&rollout, None).unwrap_err().to_string(),
            "no older revision that served is kept; there is: none"
        );
    }

    #[test]
    fn a_canary_is_told_with_its_numbers_and_one_that_failed_did_not_serve() {
        let said = |phase: &str, passing_since: Value| {
            let canary = json!({
                "revision": "bbb", "phase": phase, "passingSince": passing_since, "message": "drift by 0.003 nats",
            });
            let mut rollout = serde_json::to_value(rollout("bbb", &[(1, "aaa", true), (2, "bbb", false)])).unwrap();
            rollout["canary"] = canary;
            let deployment = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"},
                "spec": {"model": {"source": "builtin://ember"}},
                "status": {"readyOfWanted": "3/2", "updatedReplicas": 2, "revision": "aaa", "rollout": rollout},
            });
            text(&serde_json::from_value(deployment).unwrap(), "2026-01-31T12:05:00Z".parse().unwrap())
        };
        let passing = said("Analysing", json!("2026-01-31T12:02:00Z"));
        assert!(
            passing.contains("canary of revision bbb: Analysing, passing for 3m: drift by 0.003 nats"),
            "{passing}"
        );
        let failed = said("Failed", Value::Null);
        assert!(failed.contains("canary of revision bbb: Failed: drift by"), "{failed}");
    }

    #[test]
    fn what_was_kept_is_put_back_and_the_rest_stays() {
        let spec = json!({"model": {"source": "builtin://other"}, "engine": {"maxNumSeqs": 4}, "replicas": 3});
        let spec: InferenceDeploymentSpec = serde_json::from_value(spec).unwrap();
        let back = with_parts(&spec, &json!({"model": {"source": "builtin://ember"}})).unwrap();
        assert_eq!((back.model.source.as_str(), back.engine, back.replicas), ("builtin://ember", None, Some(3)));
    }
}
