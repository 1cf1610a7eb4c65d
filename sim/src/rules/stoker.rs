//! Our rule in the simulator: replicas answer with the load reports an agent would send, and [`decide_scale`] decides.

use stoker_crds::contract::{AgentPhase, LoadReport, PROTOCOL};
use stoker_scaling::{
    ASSUMED_START_SECONDS, Answer, DecisionRecord, Expected, Held, LoadWindow, ScaleState, ScalingSpec, Standby,
    Standing, StartTimes, decide_scale,
};

use crate::{Member, Rule, Setting, Stage, View};

/// Readings are taken and decisions made this often, as in the operator.
pub const TICK_SECONDS: f64 = 2.0;
/// Virtual time begins here, so that ages never fall below zero.
const EPOCH_MS: u64 = 1_000_000;

/// See the module.
#[derive(Debug)]
pub struct Stoker {
    spec: ScalingSpec,
    window: LoadWindow,
    state: ScaleState,
    starts: StartTimes,
    warm_starts: StartTimes,
    served: u32,
    records: Vec<DecisionRecord>,
}

impl Stoker {
    /// A deployment that begins with some replicas.
    pub fn new(spec: ScalingSpec, initial: u32) -> Self {
        Self {
            state: ScaleState::starting_at(initial).resumed(EPOCH_MS),
            window: LoadWindow::default(),
            starts: StartTimes::default(),
            warm_starts: StartTimes::default(),
            served: initial,
            records: Vec::new(),
            spec,
        }
    }

    /// Every decision, in order.
    pub fn into_records(self) -> Vec<DecisionRecord> {
        self.records
    }

    fn learn_starts(&mut self, view: &View<'_>) {
        let news = view.serving().filter(|member| member.id >= self.served).count();
        for member in view.serving().filter(|member| member.id >= self.served) {
            let starts = if member.is_warm { &mut self.warm_starts } else { &mut self.starts };
            starts.record(view.now - member.created);
        }
        if news > 0 {
            self.served = view.serving().map(|member| member.id + 1).max().unwrap_or(self.served);
        }
        self.window.set_start_seconds(self.starts.p90_seconds().unwrap_or(ASSUMED_START_SECONDS));
        let standby = Standby { nodes: view.warm_nodes, start_seconds: self.warm_starts.p90_seconds() };
        self.window.set_standby((self.spec.standby > 0).then_some(standby));
    }

    fn read(&mut self, view: &View<'_>, now_ms: u64) {
        let ids: Vec<String> = view.members.iter().map(|member| format!("r{:05}", member.id)).collect();
        self.window.set_fleet(ids.iter().map(String::as_str).zip(view.members.iter().map(standing)));
        self.window.set_held(Held::by_all(view.held));
        for (id, member) in ids.iter().zip(view.members).filter(|(_, member)| member.stage == Stage::Serving) {
            let report = load_report(member, now_ms);
            self.window.take(id, Answer::Report(&report), Expected { revision: "sim", now_ms });
        }
        self.window.tick(now_ms);
    }
}

impl Rule for Stoker {
    fn least(&self, setting: &Setting) -> u32 {
        if self.spec.to_zero.is_some() { 0 } else { setting.min }
    }

    fn look(&mut self, view: &View<'_>) -> Option<u32> {
        if view.now % TICK_SECONDS != 0.0 {
            return None;
        }
        let now_ms = EPOCH_MS + (view.now * 1000.0) as u64;
        self.learn_starts(view);
        self.read(view, now_ms);
        let decided = decide_scale(&self.spec, &self.window, &self.state, now_ms);
        let desired = decided.decision.desired;
        let before = std::mem::replace(&mut self.state, decided.next.clone());
        self.records.push(DecisionRecord::new(&self.spec, &before, decided, now_ms));
        Some(desired)
    }
}

fn standing(member: &Member) -> Standing {
    match member.stage {
        Stage::Starting { .. } => Standing::Starting,
        Stage::Serving => Standing::Serving,
        Stage::Draining { .. } => Standing::Draining,
    }
}

fn load_report(member: &Member, now_ms: u64) -> LoadReport {
    let replica = &member.replica;
    let referenced_blocks = replica.referenced_blocks();
    let total_blocks = replica.total_blocks();
    LoadReport {
        protocol: PROTOCOL,
        time_ms: now_ms,
        up_ms: now_ms,
        intent: None,
        start_id: member.id.to_string(),
        revision: "sim".to_owned(),
        phase: AgentPhase::Ready,
        error: None,
        load_progress: 1.0,
        running: replica.running(),
        waiting: replica.waiting(),
        waiting_prefill_tokens: replica.waiting_prefill_tokens(),
        total_blocks,
        referenced_blocks,
        cached_blocks: 0,
        free_blocks: total_blocks - referenced_blocks,
        preemptions: replica.preemptions(),
        finished: replica.finished(),
        failed: None,
        generated_tokens: None,
        ttft_p50_seconds: None,
        ttft_p95_seconds: None,
        itl_p50_seconds: None,
        itl_p95_seconds: None,
        prefill_tokens_per_second: replica.prefill_rate(),
        steps: Some(replica.steps()),
        stalled_seconds: 0.0,
        model: None,
    }
}
