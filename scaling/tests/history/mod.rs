//! A random life of one deployment: its load wanders, answers get lost, replicas lie, freeze and restart.
//!
//! Everything follows from one seed. The history knows which replicas cannot be believed, independently of the code
//! under test.

use stoker_cost::{Spent, StepCost, StepReport, StepWork};
use stoker_crds::contract::LoadReport;
use stoker_scaling::{
    Answer, DecisionRecord, Expected, Held, Holders, LoadWindow, ScaleState, ScalingSpec, Standby, Standing, ToZero,
    decide_scale,
};
use stoker_workload::Rng;

const TICK_MS: u64 = 2_000;
const BLOCKS: u32 = 1_000;
/// What steps cost in all of them.
const COST: StepCost = StepCost {
    step_seconds: 8e-3,
    decode_seconds: 100e-6,
    context_token_seconds: 0.2e-6,
    prefill_token_seconds: 100e-6,
    prefill_pair_seconds: 5e-9,
};
/// A believed answer may be this old.
const FRESH_MS: u64 = 4_100;

/// One decision and what the history knows about it.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) record: DecisionRecord,
    /// Serving replicas that cannot be believed at this moment.
    pub(crate) doubtful: usize,
}

struct Replica {
    id: String,
    serves_at_ms: u64,
    start_id: u64,
    finished: u64,
    preemptions: u64,
    spent: Spent,
    frozen: bool,
    lies: bool,
    believed_ms: Option<u64>,
    /// What it said when it was believed last.
    said: Option<LoadReport>,
}

pub(crate) struct History {
    rng: Rng,
    spec: ScalingSpec,
    window: LoadWindow,
    state: ScaleState,
    replicas: Vec<Replica>,
    n_created: u64,
    now_ms: u64,
    load: f64,
    /// So many ticks nobody asks.
    quiet: u32,
    /// Engines tell what their steps cost.
    tells: bool,
    /// Nodes are asked to stand by.
    stands_by: bool,
}

impl History {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::seeded(seed);
        let spec = random_spec(&mut rng);
        let initial = spec.min + below(&mut rng, spec.max - spec.min + 1);
        let mut history = Self {
            state: ScaleState::starting_at(initial),
            spec,
            rng,
            window: LoadWindow::default(),
            replicas: Vec::new(),
            n_created: 0,
            now_ms: 1_000_000,
            load: 0.5,
            quiet: 0,
            tells: !seed.is_multiple_of(3),
            stands_by: seed.is_multiple_of(2),
        };
        (0..initial).for_each(|_| history.create(0));
        history
    }

    /// A new process: the state comes back from the object's status, the window does not.
    pub(crate) fn restart_operator(&mut self) {
        self.window = LoadWindow::default();
        self.replicas.iter_mut().for_each(|replica| (replica.believed_ms, replica.said) = (None, None));
    }

    pub(crate) fn run(&mut self, ticks: usize) -> impl Iterator<Item = Event> + use<> {
        (0..ticks).map(|_| self.tick()).collect::<Vec<_>>().into_iter()
    }

    fn tick(&mut self) -> Event {
        self.now_ms += TICK_MS + u64::from(below(&mut self.rng, 20) == 0) * 6_000;
        self.load = (self.load + 0.25 * self.rng.normal()).clamp(0.0, 1.6);
        self.quiet =
            if below(&mut self.rng, 40) == 0 { below(&mut self.rng, 60) } else { self.quiet.saturating_sub(1) };
        self.disturb();
        let fleet = self.replicas.iter().map(|replica| (replica.id.as_str(), standing(replica, self.now_ms)));
        self.window.set_fleet(fleet);
        (0..self.replicas.len()).for_each(|idx| self.answer(idx));
        let held = self.held();
        self.window.set_held(held);
        let nodes = (self.now_ms / (10 * TICK_MS) % 4) as u32;
        self.window.set_standby(self.stands_by.then_some(Standby { nodes, start_seconds: Some(5.0) }));
        self.window.tick(self.now_ms);
        let decided = decide_scale(&self.spec, &self.window, &self.state, self.now_ms);
        let record = DecisionRecord::new(&self.spec, &self.state, decided, self.now_ms);
        let doubtful = self.doubtful();
        self.state = record.after.clone();
        self.follow(record.decision.desired);
        Event { record, doubtful }
    }

    /// Gateways are there, but not always and not always heard; where nobody serves some wait, or nobody.
    fn held(&mut self) -> Held {
        let by = match below(&mut self.rng, 40) {
            0 => Holders::Nobody,
            1 => Holders::Silent("10.0.0.1".to_owned()),
            _ => Holders::All,
        };
        let is_unserved = self.replicas.iter().all(|replica| standing(replica, self.now_ms) != Standing::Serving);
        let is_asked = self.quiet == 0 && is_unserved && by != Holders::Nobody && below(&mut self.rng, 2) == 0;
        Held { requests: if is_asked { 1 + below(&mut self.rng, 200) } else { 0 }, by }
    }

    fn create(&mut self, starts_for_ms: u64) {
        self.n_created += 1;
        self.replicas.push(Replica {
            id: format!("r{:04}", self.n_created),
            serves_at_ms: self.now_ms + starts_for_ms,
            start_id: self.n_created << 32,
            finished: u64::from(below(&mut self.rng, 1000)),
            preemptions: 0,
            spent: Spent::default(),
            frozen: false,
            lies: false,
            believed_ms: None,
            said: None,
        });
    }

    /// Freezes, thaws, corrupts and restarts replicas now and then.
    fn disturb(&mut self) {
        for replica in &mut self.replicas {
            match below(&mut self.rng, 60) {
                0 => replica.frozen = true,
                1..=6 => replica.frozen = false,
                7 => replica.lies = true,
                8..=14 => replica.lies = false,
                15 => {
                    replica.start_id += 1;
                    (replica.finished, replica.preemptions, replica.spent) = (0, 0, Spent::default());
                }
                _ => {}
            }
        }
    }

    fn answer(&mut self, idx: usize) {
        let report = self.report(idx);
        let now_ms = self.now_ms;
        let replica = &mut self.replicas[idx];
        let expected = Expected { revision: "r1", now_ms };
        if replica.frozen || standing(replica, now_ms) == Standing::Starting {
            self.window.take(&replica.id, Answer::Silence, expected);
        } else if replica.lies {
            replica.believed_ms = None;
            let lie = lie(&mut self.rng, &report, replica.said.as_ref());
            self.window.take(&replica.id, lie.as_ref().map_or(Answer::NotAReport, Answer::Report), expected);
        } else {
            (replica.believed_ms, replica.said) = (Some(now_ms), Some(report.clone()));
            self.window.take(&replica.id, Answer::Report(&report), expected);
        }
    }

    fn report(&mut self, idx: usize) -> LoadReport {
        let load = if self.quiet > 0 { 0.0 } else { self.load };
        let share = (load * (0.7 + 0.6 * self.rng.uniform())).min(1.0);
        let referenced_blocks = (share * f64::from(BLOCKS)) as u32;
        let waiting = if share >= 1.0 { below(&mut self.rng, 20) } else { 0 };
        let finished = u64::from(below(&mut self.rng, 1 + referenced_blocks / 40));
        let preemptions = u64::from(share >= 1.0 && below(&mut self.rng, 3) == 0);
        let replica = &mut self.replicas[idx];
        replica.finished += finished;
        replica.preemptions += preemptions;
        let answered = StepWork::prefill(400.0, 0.0) + StepWork::answer(150.0, 400.0);
        replica.spent.step(answered.times(finished as f64));
        (0..finished).for_each(|_| replica.spent.request(COST.work_seconds(answered)));
        let steps = StepReport { cost: Some(COST), error: 0.05, spent: replica.spent };
        LoadReport {
            steps: self.tells.then_some(steps),
            up_ms: self.now_ms,
            start_id: replica.start_id.to_string(),
            revision: "r1".to_owned(),
            running: referenced_blocks / 20,
            waiting,
            waiting_prefill_tokens: u64::from(waiting) * 300,
            referenced_blocks,
            free_blocks: BLOCKS - referenced_blocks,
            preemptions: replica.preemptions,
            finished: replica.finished,
            ttft_p95_seconds: Some(share),
            prefill_tokens_per_second: Some(2_000.0),
            ..LoadReport::idle(BLOCKS)
        }
    }

    fn doubtful(&self) -> usize {
        let serving = self.replicas.iter().filter(|replica| standing(replica, self.now_ms) == Standing::Serving);
        let is_believed = |replica: &&Replica| replica.believed_ms.is_some_and(|at_ms| self.now_ms - at_ms <= FRESH_MS);
        serving.filter(|replica| !is_believed(replica)).count()
    }

    fn follow(&mut self, desired: u32) {
        self.replicas.truncate(desired as usize);
        while self.replicas.len() < desired as usize {
            let starts_for_ms = u64::from(below(&mut self.rng, 30)) * 1_000;
            self.create(starts_for_ms);
        }
    }
}

fn standing(replica: &Replica, now_ms: u64) -> Standing {
    if replica.serves_at_ms <= now_ms { Standing::Serving } else { Standing::Starting }
}

/// One of the ways an agent can be wrong; `None` is an answer that is no report at all.
fn lie(rng: &mut Rng, report: &LoadReport, said: Option<&LoadReport>) -> Option<LoadReport> {
    let mut lie = report.clone();
    let repeated = said.filter(|said| said.start_id == report.start_id);
    match below(rng, 7) {
        0 => return None,
        1 => lie.ttft_p95_seconds = Some(f64::NAN),
        2 => lie.stalled_seconds = -1.0,
        3 if repeated.is_some() => return repeated.cloned(),
        4 => lie.revision = "r0".to_owned(),
        5 => {
            let cost = StepCost { decode_seconds: -1e-6, ..COST };
            lie.steps = Some(StepReport { cost: Some(cost), ..StepReport::default() });
        }
        _ => lie.free_blocks += 1,
    }
    Some(lie)
}

fn random_spec(rng: &mut Rng) -> ScalingSpec {
    let min = 1 + below(rng, 3);
    let mut spec = ScalingSpec::between(min, min + below(rng, 10));
    spec.targets.kv = 0.3 + 0.6 * rng.uniform();
    spec.targets.slowdown = (below(rng, 2) == 0).then(|| 1.5 + 4.0 * rng.uniform());
    spec.targets.ttft_ms = (below(rng, 3) == 0).then_some(800.0);
    spec.behavior.spare_replicas = (below(rng, 2) == 0).then(|| below(rng, 4));
    spec.prices.late_answer = 0.1 * rng.uniform();
    spec.behavior.stable_window_seconds = 10 + below(rng, 30);
    spec.behavior.down_stabilization_seconds = Some(10 + below(rng, 60));
    spec.to_zero = (below(rng, 3) == 0).then_some(ToZero { after_seconds: 20, max_wake_seconds: 90 });
    spec
}

fn below(rng: &mut Rng, n: u32) -> u32 {
    (rng.uniform() * f64::from(n)) as u32
}
