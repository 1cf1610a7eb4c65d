//! What the page of one deployment shows, as plain values.

use super::query::Settings;
use crate::view::{Latency, Summary, Tone};

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Deployment {
    /// What the fleet's page shows of it, too.
    pub summary: Summary,
    /// The revision that is wanted.
    pub revision: String,
    /// Where requests go inside the cluster, as the status says it; empty before it does.
    pub url: String,
    /// When it was looked at.
    pub now_ms: u64,
    /// When it was made.
    pub created_ms: u64,
    /// Since when this operator leads: what was before is known from the object alone.
    pub leads_since_ms: u64,
    /// The words of `Progressing`.
    pub progress: String,
    /// Replicas, whoever needs a look first.
    pub replicas: Vec<ReplicaRow>,
    /// Replicas that are left out of the rows.
    pub n_more_replicas: usize,
    /// Replicas by revision, the wanted one first.
    pub revisions: Vec<RevisionCount>,
    /// What its load was.
    pub history: History,
    /// Who decides about the number, and what was decided.
    pub scaling: Scaling,
    /// What was told, newest first.
    pub events: Vec<Told>,
    /// Conditions as the object has them.
    pub conditions: Vec<Condition>,
}

/// One replica.
#[derive(Clone, Debug, Default)]
pub struct ReplicaRow {
    /// Its pod.
    pub pod: String,
    /// Its node; empty before it has one.
    pub node: String,
    /// Its revision, if it is not the wanted one.
    pub older_revision: Option<String>,
    /// How it is meant.
    pub tone: Tone,
    /// How far it is, in a word.
    pub phase: String,
    /// What is wrong, or how far its start is.
    pub words: String,
    /// Share of its start that is done, while it starts and says so.
    pub progress: Option<f64>,
    /// What it carries; nothing where its reading cannot be believed.
    pub load: Option<ReplicaLoad>,
    /// When its pod was made.
    pub created_ms: u64,
}

/// What one replica carries.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplicaLoad {
    /// Share of its KV blocks that sequences reference.
    pub kv: f64,
    /// Sequences being computed.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Tokens a second.
    pub tokens: Option<f64>,
    /// Time to first token.
    pub ttft: Latency,
    /// Between two tokens.
    pub itl: Latency,
    /// Within the last minute.
    pub preemptions: u64,
}

/// Replicas of one revision.
#[derive(Clone, Debug, Default)]
pub struct RevisionCount {
    /// Its name.
    pub revision: String,
    /// Whether it is the wanted one.
    pub is_wanted: bool,
    /// Requests reach them.
    pub serving: u32,
    /// On their way in.
    pub starting: u32,
    /// On their way out.
    pub leaving: u32,
}

/// Load over time, oldest first.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Readings of all replicas together.
    pub points: Vec<Point>,
    /// Milliseconds between two of them; a longer pause is a gap.
    pub step_ms: u64,
    /// Replicas that told what was before this operator led.
    pub n_witnesses: usize,
}

/// The load at a moment: means since the point before, worst latencies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// When.
    pub at_ms: u64,
    /// Replicas worked towards.
    pub wanted: Option<f64>,
    /// Replicas that serve.
    pub serving: Option<f64>,
    /// Share of KV blocks referenced.
    pub kv: Option<f64>,
    /// Sequences being computed.
    pub running: Option<f64>,
    /// Requests waiting.
    pub waiting: Option<f64>,
    /// Tokens a second.
    pub tokens: Option<f64>,
    /// 95th percentile, seconds.
    pub ttft: Option<f64>,
    /// 95th percentile, seconds.
    pub itl: Option<f64>,
}

/// Who decides about the number of replicas.
#[derive(Clone, Debug, Default)]
pub struct Scaling {
    /// In a sentence.
    pub who: String,
    /// The settings in force, if anything is decided.
    pub settings: Option<Settings>,
    /// Share of KV blocks that is aimed at.
    pub kv_target: Option<f64>,
    /// Decisions that changed the number, newest first.
    pub changes: Vec<Change>,
    /// The decision whose words are shown.
    pub opened: Opened,
    /// What other settings would have decided.
    pub what_if: Option<WhatIf>,
    /// Full records of the last decisions: from when, until when, how many.
    pub recorded: Option<(u64, u64, usize)>,
    /// What keeps replicas that are wanted from being had: a budget that grants fewer, nodes that the model does not fit.
    pub limits: Vec<Condition>,
}

/// The decision that is shown in words.
#[derive(Clone, Debug, Default)]
pub enum Opened {
    /// There is none.
    #[default]
    Nothing,
    /// The newest one.
    Newest(Decision),
    /// The one that the address names.
    Asked(Decision),
    /// The address names one whose record is gone.
    Forgotten {
        /// When it was made.
        at_ms: u64,
    },
}

/// A decision in words.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// When it was made.
    pub at_ms: u64,
    /// What `kubectl stoker explain` prints.
    pub words: String,
    /// What comes out when it is made again from its record: the same, or not.
    pub is_reproduced: bool,
}

/// A decision that changed the number.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// When.
    pub at_ms: u64,
    /// Replicas before.
    pub from: u32,
    /// Replicas from then on.
    pub to: u32,
    /// Pressure, in percent.
    pub pressure_percent: i32,
    /// The term that wanted most.
    pub cause: String,
    /// What held the number.
    pub bound: String,
    /// Whether its full record is there.
    pub has_record: bool,
}

/// The same readings, decided by other settings.
#[derive(Clone, Debug, Default)]
pub struct WhatIf {
    /// Why those settings cannot be followed; then there is nothing else.
    pub errors: Vec<String>,
    /// When, what was wanted, what would have been.
    pub points: Vec<(u64, u32, u32)>,
}

/// An Event that the operator published.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// When.
    pub at_ms: u64,
    /// How it is meant.
    pub tone: Tone,
    /// In a word.
    pub reason: String,
    /// In a sentence.
    pub note: String,
}

/// A condition of the object.
#[derive(Clone, Debug, Default)]
pub struct Condition {
    /// Such as `Ready`.
    pub type_: String,
    /// True, False or Unknown.
    pub status: String,
    /// How it is meant.
    pub tone: Tone,
    /// In a word.
    pub reason: String,
    /// In a sentence.
    pub message: String,
    /// Since when.
    pub since_ms: u64,
}
