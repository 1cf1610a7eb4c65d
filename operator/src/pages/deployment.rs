//! The view of one deployment, from values. Pure: nothing here asks anybody or reads a clock.

use std::sync::Arc;

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::Condition as KubeCondition};
use stoker_crds::{
    InferenceDeployment,
    conditions::{DEGRADED, FITS, GRANTED, METRICS_HEALTHY, PROGRESSING, RECONCILING, SCALING, STALLED},
    contract::{AgentPhase, LoadReport},
    scaling::{ScalingMode, ScalingSpec},
    scaling_status::DecisionStatus,
};
use stoker_pages::{
    deployment::{
        Change, Condition, Decision, Deployment, DeploymentQuery, History, Opened, ReplicaLoad, ReplicaRow,
        RevisionCount, Scaling, Settings, Told, WhatIf,
    },
    view::{Latency, Summary, Tone},
    words,
};
use stoker_replica::{Replica, Sight, Stage};
use stoker_scaling::{DecisionRecord, Replay, explain, what_if_over};

use super::summary::{leaves, starts};
use crate::{
    observe::{agent, exit_code, last_words},
    readings::millis,
    scaling::{Ledger, word},
};

/// Rows of replicas on a page at most.
const REPLICAS: usize = 50;

const UNANSWERED: &str = "its agent does not answer any more";

/// What a view is made from.
pub(super) struct Scene<'a> {
    pub(super) object: &'a InferenceDeployment,
    pub(super) summary: &'a Summary,
    pub(super) pods: &'a [Arc<Pod>],
    pub(super) replicas: Vec<Replica>,
    pub(super) ledger: &'a Ledger,
    pub(super) history: History,
    pub(super) events: Vec<Told>,
    pub(super) leads_since_ms: u64,
    pub(super) now_ms: u64,
}

/// The view.
pub(super) fn view(scene: Scene<'_>, query: &DeploymentQuery) -> Deployment {
    let status = scene.object.status.clone().unwrap_or_default();
    let progress = status.conditions.iter().find(|condition| condition.type_ == PROGRESSING);
    let progress = progress.map(|condition| condition.message.clone()).unwrap_or_default();
    let mut rows: Vec<ReplicaRow> =
        scene.pods.iter().zip(&scene.replicas).map(|(pod, replica)| row(pod, replica, &status.revision)).collect();
    // Who needs a look is never left out.
    rows.sort_by(|a, b| (a.tone, &a.pod).cmp(&(b.tone, &b.pod)));
    let n_more_replicas = rows.len().saturating_sub(REPLICAS);
    rows.truncate(REPLICAS);
    rows.sort_by(|a, b| a.pod.cmp(&b.pod));
    Deployment {
        summary: scene.summary.clone(),
        now_ms: scene.now_ms,
        created_ms: scene.object.metadata.creation_timestamp.as_ref().map_or(0, |time| millis(time.0)),
        leads_since_ms: scene.leads_since_ms,
        progress,
        replicas: rows,
        n_more_replicas,
        revisions: revisions(&scene.replicas, &status.revision),
        scaling: scaling(&scene, query),
        history: scene.history,
        events: scene.events,
        conditions: status.conditions.iter().map(condition).collect(),
        revision: status.revision,
        url: status.url,
    }
}

fn row(pod: &Pod, replica: &Replica, wanted: &str) -> ReplicaRow {
    let (tone, phase, mut said, progress) = phase(replica);
    if said.is_empty() {
        said = restarted(pod).unwrap_or_default();
    }
    let is_older = replica.pod.revision != wanted && !wanted.is_empty();
    let load = replica.reading.report().filter(|report| report.total_blocks > 0).map(|report| load(replica, report));
    ReplicaRow {
        pod: replica.pod.name.clone(),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        older_revision: is_older.then(|| replica.pod.revision.clone()),
        tone,
        phase,
        words: said,
        progress,
        load,
        created_ms: millis(replica.pod.created),
    }
}

/// Of what the process before this one ended: whoever looks later wants to know, too.
fn restarted(pod: &Pod) -> Option<String> {
    let container = agent(pod.status.as_ref()?)?;
    let ended = container.last_state.as_ref()?.terminated.as_ref()?;
    let when = ended.finished_at.as_ref().map(|time| time.0.strftime(" at %H:%M:%S UTC").to_string());
    let last_words = last_words(ended.message.as_deref().unwrap_or_default());
    let said = format!(
        "restarted {}: the agent ended with {}{}: {last_words}",
        times(container.restart_count),
        exit_code(ended),
        when.unwrap_or_default()
    );
    Some(said.trim_end_matches([':', ' ']).to_owned())
}

fn times(count: i32) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

fn load(replica: &Replica, report: &LoadReport) -> ReplicaLoad {
    ReplicaLoad {
        kv: f64::from(report.referenced_blocks) / f64::from(report.total_blocks.max(1)),
        running: report.running,
        waiting: report.waiting,
        tokens: replica.reading.tokens_per_second(),
        ttft: Latency { p50: report.ttft_p50_seconds, p95: report.ttft_p95_seconds },
        itl: Latency { p50: report.itl_p50_seconds, p95: report.itl_p95_seconds },
        preemptions: replica.reading.preemptions_last_minute(),
    }
}

type Phase = (Tone, String, String, Option<f64>);

/// How far a replica is: a word, a sentence, the share of its start that is done.
fn phase(replica: &Replica) -> Phase {
    let of = |tone, word: &str, said: &str| (tone, word.to_owned(), said.to_owned(), None);
    match &replica.pod.stage {
        Stage::Leaving => of(Tone::Wait, "Leaving", "its pod is being deleted"),
        Stage::Finished { trouble, .. } => of(Tone::Idle, &trouble.reason, &trouble.message),
        _ if replica.pod.lost => of(Tone::Bad, "NodeLost", "its node does not answer"),
        Stage::Faltering { trouble, .. } if matches!(replica.reading.sight(), Sight::Stale { .. }) => {
            of(Tone::Bad, &trouble.reason, UNANSWERED)
        }
        Stage::Unscheduled { trouble, .. } | Stage::Blocked(trouble) | Stage::Faltering { trouble, .. } => {
            of(Tone::Bad, &trouble.reason, &trouble.message)
        }
        Stage::Preparing { trouble, .. } => of(Tone::Wait, "Preparing", &trouble.message),
        Stage::Starting => starting(replica.reading.report()),
        Stage::Serving if replica.drain_since().is_some() => {
            of(Tone::Wait, "Draining", "it takes nothing new and ends what runs")
        }
        Stage::Serving => serving(replica),
    }
}

fn starting(report: Option<&LoadReport>) -> Phase {
    let of = |word: &str, said: String, share| (Tone::Wait, word.to_owned(), said, share);
    let Some(report) = report else { return of("Starting", "its agent was not heard of yet".to_owned(), None) };
    if let Some(fetch) = report.model.as_ref().and_then(|model| model.fetch) {
        let of_all =
            if fetch.bytes_total > 0 { format!(" of {}", words::bytes(fetch.bytes_total)) } else { String::new() };
        let said = format!("{}{of_all}, {}/s", words::bytes(fetch.bytes_done), words::bytes(fetch.bytes_per_second));
        let share = (fetch.bytes_total > 0).then(|| fetch.bytes_done as f64 / fetch.bytes_total as f64);
        return of("Fetching", said, share);
    }
    match report.phase {
        AgentPhase::Failed => {
            let why = report.error.clone().unwrap_or_else(|| "it does not say why".to_owned());
            (Tone::Bad, "Failed".to_owned(), why, None)
        }
        AgentPhase::Loading => of("Loading", String::new(), Some(report.load_progress)),
        AgentPhase::Ready => of("BecomingReady", "the kubelet has not asked it yet".to_owned(), None),
        AgentPhase::Withdrawing | AgentPhase::Draining | AgentPhase::Empty => of("Draining", String::new(), None),
    }
}

fn serving(replica: &Replica) -> Phase {
    let of = |tone, word: &str, said: &str| (tone, word.to_owned(), said.to_owned(), None);
    match replica.reading.sight() {
        Sight::Fresh(report) if report.phase == AgentPhase::Ready => of(Tone::Good, "Serving", ""),
        Sight::Fresh(report) => of(Tone::Wait, &format!("{:?}", report.phase), report.error.as_deref().unwrap_or("")),
        Sight::Stale { .. } => of(Tone::Wait, "Silent", UNANSWERED),
        Sight::Absurd(why) => of(Tone::Wait, "NotBelieved", &format!("it {}", why.words())),
        Sight::Missing => of(Tone::Wait, "Silent", "its agent never answered"),
        Sight::Unread => of(Tone::Good, "Serving", "not read yet"),
    }
}

fn revisions(replicas: &[Replica], wanted: &str) -> Vec<RevisionCount> {
    let mut counted: Vec<RevisionCount> = Vec::new();
    for replica in replicas.iter().filter(|replica| replica.is_live() || leaves(replica)) {
        let revision = &replica.pod.revision;
        let place = counted.iter().position(|count| count.revision == *revision).unwrap_or_else(|| {
            let is_wanted = revision == wanted;
            counted.push(RevisionCount { revision: revision.clone(), is_wanted, ..RevisionCount::default() });
            counted.len() - 1
        });
        let count = &mut counted[place];
        count.serving += u32::from(replica.serves());
        count.starting += u32::from(starts(replica));
        count.leaving += u32::from(leaves(replica));
    }
    counted.sort_by(|a, b| (!a.is_wanted, &a.revision).cmp(&(!b.is_wanted, &b.revision)));
    counted
}

fn condition(condition: &KubeCondition) -> Condition {
    let is_true = condition.status == "True";
    let tone = match condition.type_.as_str() {
        DEGRADED | STALLED => {
            if is_true {
                Tone::Bad
            } else {
                Tone::Good
            }
        }
        PROGRESSING | RECONCILING => {
            if is_true {
                Tone::Wait
            } else {
                Tone::Idle
            }
        }
        SCALING => Tone::Idle,
        METRICS_HEALTHY => {
            if is_true {
                Tone::Good
            } else {
                Tone::Wait
            }
        }
        _ => {
            if is_true {
                Tone::Good
            } else {
                Tone::Wait
            }
        }
    };
    Condition {
        type_: condition.type_.clone(),
        status: condition.status.clone(),
        tone,
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        since_ms: millis(condition.last_transition_time.0),
    }
}

fn scaling(scene: &Scene<'_>, query: &DeploymentQuery) -> Scaling {
    let spec = scene.object.spec.scaling.as_ref();
    let kept = scene.ledger.kept(scene.object);
    let (records, changed) = kept.unwrap_or_default();
    let decides = spec.filter(|spec| spec.mode != ScalingMode::External);
    let in_force = decides.map(settings);
    let tried = in_force.and_then(|in_force| query.tried(in_force));
    Scaling {
        who: who(spec, scene.summary.replicas.wanted),
        settings: in_force,
        kv_target: decides.map(|spec| spec.targets.kv),
        changes: changes(scene.object, &changed),
        opened: opened(&records, &changed, query.at),
        what_if: tried.zip(decides).map(|(tried, spec)| what_if(&records, spec, tried)),
        recorded: records.first().zip(records.last()).map(|(first, last)| (first.at_ms, last.at_ms, records.len())),
        limits: limits(scene.object),
    }
}

fn who(spec: Option<&ScalingSpec>, wanted: u32) -> String {
    match spec {
        None => {
            format!("spec.replicas is {wanted}, and there is no spec.scaling: the number does not follow the load.")
        }
        Some(spec) => match spec.mode {
            ScalingMode::Native => {
                format!("The operator decides every two seconds, between {} and {}.", spec.min, spec.max)
            }
            ScalingMode::Advisory => {
                format!("scaling.mode is advisory: decisions are recorded, and spec.replicas, {wanted}, stands.")
            }
            ScalingMode::External => format!(
                "scaling.mode is external: the number is spec.replicas, {wanted}, set through the scale subresource; nothing is decided here."
            ),
        },
    }
}

fn settings(spec: &ScalingSpec) -> Settings {
    let (targets, prices) = (&spec.targets, &spec.prices);
    Settings {
        min: spec.min,
        max: spec.max,
        kv: targets.kv,
        slowdown: targets.slowdown,
        queue: targets.queue_seconds,
        ttft: targets.ttft_ms,
        itl: targets.itl_ms,
        late: prices.late_answer,
        hour: prices.replica_hour,
        spare: spec.behavior.spare_replicas,
    }
}

/// Grants that are fewer than what is wanted, and nodes that the model does not fit.
fn limits(object: &InferenceDeployment) -> Vec<Condition> {
    let conditions = object.status.iter().flat_map(|status| &status.conditions);
    let limit =
        |condition: &&KubeCondition| [GRANTED, FITS].contains(&condition.type_.as_str()) && condition.status == "False";
    conditions.filter(limit).map(condition).collect()
}

/// What the records have, and before them what the status has.
fn changes(object: &InferenceDeployment, changed: &[Arc<DecisionRecord>]) -> Vec<Change> {
    let status = object.status.as_ref().and_then(|status| status.scaling.as_ref());
    let first_ms = changed.first().map_or(u64::MAX, |record| record.at_ms);
    let in_status = status.iter().flat_map(|scaling| &scaling.decisions);
    // Dates in the status are whole seconds.
    let before = in_status.filter(|decision| millis(decision.at.0).saturating_add(1000) <= first_ms).map(in_short);
    let mut all: Vec<Change> = before.chain(changed.iter().map(|record| of_record(record))).collect();
    all.reverse();
    all
}

fn in_short(decision: &DecisionStatus) -> Change {
    let DecisionStatus { at, from, to, pressure_percent, cause, bound, .. } = decision;
    Change {
        at_ms: millis(at.0),
        from: from.unsigned_abs(),
        to: to.unsigned_abs(),
        pressure_percent: *pressure_percent,
        cause: cause.clone(),
        bound: bound.clone(),
        has_record: false,
    }
}

fn of_record(record: &DecisionRecord) -> Change {
    let decision = &record.decision;
    Change {
        at_ms: record.at_ms,
        from: decision.previous,
        to: decision.desired,
        pressure_percent: (decision.pressure * 100.0).round() as i32,
        cause: decision.cause.map_or_else(|| "none".to_owned(), |cause| word(&cause)),
        bound: word(&decision.bound),
        has_record: true,
    }
}

fn opened(records: &[Arc<DecisionRecord>], changed: &[Arc<DecisionRecord>], asked: Option<u64>) -> Opened {
    let Some(at_ms) = asked else {
        return records.last().map_or(Opened::Nothing, |record| Opened::Newest(decision(record)));
    };
    let found = changed.iter().chain(records).find(|record| record.at_ms == at_ms);
    found.map_or(Opened::Forgotten { at_ms }, |record| Opened::Asked(decision(record)))
}

fn decision(record: &DecisionRecord) -> Decision {
    Decision { at_ms: record.at_ms, words: explain(record), is_reproduced: record.replay() == Replay::Identical }
}

fn what_if(records: &[Arc<DecisionRecord>], spec: &ScalingSpec, tried: Settings) -> WhatIf {
    let mut spec = spec.clone();
    (spec.min, spec.max) = (tried.min, tried.max);
    spec.targets.kv = tried.kv;
    spec.targets.slowdown = tried.slowdown;
    spec.targets.queue_seconds = tried.queue;
    (spec.targets.ttft_ms, spec.targets.itl_ms) = (tried.ttft, tried.itl);
    (spec.prices.late_answer, spec.prices.replica_hour) = (tried.late, tried.hour);
    spec.behavior.spare_replicas = tried.spare;
    let errors: Vec<String> = spec.errors().iter().map(ToString::to_string).collect();
    if !errors.is_empty() {
        return WhatIf { errors, points: Vec::new() };
    }
    let again = what_if_over(records.iter().map(|record| &**record), &spec);
    let points =
        records.iter().zip(again).map(|(record, again)| (record.at_ms, record.decision.desired, again.desired));
    WhatIf { errors, points: points.collect() }
}
