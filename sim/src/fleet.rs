//! A deployment in virtual time: replicas start, serve, drain and go, requests are routed, a rule is asked.
//!
//! Owns the clock of the simulation and the order of events. Every rule meets the same requests, the same router, the
//! same start times and the same graceful scale-down, so that only the decisions differ.

use std::collections::VecDeque;

use stoker_workload::{Request, Rng};

use crate::{
    gateway::Gateway,
    model::{ReplicaModel, Slo},
    outcome::{Outcomes, Sample},
    replica::Replica,
    standby::Standby,
    world::{Router, World},
};

/// The rule is shown the fleet this often; it keeps its own, longer period.
pub const LOOK_SECONDS: f64 = 1.0;
/// A point of the plots covers this much.
pub(super) const SAMPLE_SECONDS: f64 = 10.0;

/// A scaling rule.
pub trait Rule {
    /// Looks at the fleet; answers with the number of replicas from now on when this is a moment to decide.
    fn look(&mut self, view: &View<'_>) -> Option<u32>;

    /// The smallest number that it may answer with.
    fn least(&self, setting: &Setting) -> u32 {
        setting.min
    }
}

/// What a rule may look at.
#[derive(Debug)]
pub struct View<'a> {
    /// Seconds since the simulation began.
    pub now: f64,
    /// Replicas wanted at present.
    pub desired: u32,
    /// Requests waiting for a first replica.
    pub held: u32,
    /// Nodes that have the model in memory for the next replicas.
    pub warm_nodes: u32,
    /// Every replica there is.
    pub members: &'a [Member],
}

impl View<'_> {
    /// Replicas that serve.
    pub fn serving(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.stage == Stage::Serving)
    }

    /// Replicas on their way in.
    pub fn starting(&self) -> usize {
        self.members.iter().filter(|member| matches!(member.stage, Stage::Starting { .. })).count()
    }
}

/// Where a simulated replica is in its life.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    /// Loading until then.
    Starting {
        /// When it will serve.
        until: f64,
    },
    /// Taking requests.
    Serving,
    /// Finishing what it has, until then at most.
    Draining {
        /// When it goes at the latest.
        until: f64,
    },
}

/// One replica of the fleet.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its number, never used twice.
    pub id: u32,
    /// When it was created.
    pub created: f64,
    /// Its node had the model in memory then.
    pub is_warm: bool,
    /// Where it is in its life.
    pub stage: Stage,
    /// Its engine.
    pub replica: Replica,
}

/// Bounds and seed of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Replicas at least.
    pub min: u32,
    /// Replicas at most.
    pub max: u32,
    /// Seed of start times, routing and mishaps.
    pub seed: u64,
    /// What users were promised.
    pub slo: Slo,
}

/// Runs a world under a rule until its last request is answered.
pub fn simulate(world: &World, rule: &mut dyn Rule, setting: &Setting) -> Outcomes {
    let mut fleet = Fleet::new(world, setting);
    let mut requests = world.trace.requests.iter().cloned().peekable();
    let mut now = 0.0;
    while requests.peek().is_some() || !fleet.is_idle() {
        let next_look = now + LOOK_SECONDS;
        while let Some(request) = requests.next_if(|request| request.arrived < next_look) {
            fleet.route(request);
        }
        now = next_look;
        fleet.advance(now);
        fleet.account(now);
        fleet.lose(now);
        fleet.grow_up_and_go(now);
        let view = View {
            now,
            desired: fleet.desired,
            held: fleet.held.len() as u32,
            warm_nodes: fleet.standby.warm(now),
            members: &fleet.members,
        };
        if let Some(desired) = rule.look(&view) {
            fleet.want(desired.clamp(rule.least(setting), setting.max), now);
        }
    }
    fleet.outcomes
}

struct Fleet<'a> {
    world: &'a World,
    starts: Rng,
    standby: Standby,
    choices: Rng,
    fate: Rng,
    desired: u32,
    members: Vec<Member>,
    n_created: u32,
    held: VecDeque<Request>,
    outcomes: Outcomes,
    sample: Sample,
    gone: Gone,
    gateway: Gateway,
}

/// What replicas that are no more came to.
#[derive(Clone, Copy, Debug, Default)]
struct Gone {
    preemptions: u64,
    prefill_tokens: u64,
}

impl Gone {
    fn add(&mut self, replica: &Replica) {
        self.preemptions += replica.preemptions();
        self.prefill_tokens += replica.prefill_tokens();
    }
}

impl<'a> Fleet<'a> {
    fn new(world: &'a World, setting: &Setting) -> Self {
        let mut fleet = Self {
            world,
            starts: Rng::seeded(setting.seed),
            standby: Standby::of(world.standby, setting.seed),
            choices: Rng::seeded(setting.seed ^ 0x5eed),
            fate: Rng::seeded(setting.seed ^ 0xfa7e),
            desired: world.initial.clamp(setting.min, setting.max),
            members: Vec::new(),
            n_created: 0,
            held: VecDeque::new(),
            outcomes: Outcomes::new(setting.slo),
            sample: Sample::default(),
            gone: Gone::default(),
            gateway: Gateway::default(),
        };
        (0..fleet.desired).for_each(|_| fleet.create(0.0, 0.0, false));
        fleet.members.iter_mut().for_each(|member| member.stage = Stage::Serving);
        fleet
    }

    fn is_idle(&self) -> bool {
        self.held.is_empty() && self.members.iter().all(|member| member.replica.is_empty())
    }

    /// A new replica, on a node that stands by if there is one.
    fn start(&mut self, now: f64) {
        let model = &self.world.replica;
        let is_warm = self.standby.take(now, model);
        let median = model.warm_start_seconds.filter(|_| is_warm).unwrap_or(model.start_seconds);
        let seconds = self.starts.log_normal(median, model.start_sigma);
        self.create(now, seconds, is_warm);
    }

    fn create(&mut self, now: f64, start_seconds: f64, is_warm: bool) {
        let stage = Stage::Starting { until: now + start_seconds };
        let replica = Replica::serving_from(now, &self.model());
        self.members.push(Member { id: self.n_created, created: now, is_warm, stage, replica });
        self.n_created += 1;
    }

    /// The next replica's own: one on a slow node takes longer for everything.
    fn model(&mut self) -> ReplicaModel {
        let (model, mishaps) = (self.world.replica.clone(), self.world.mishaps);
        let is_slow = mishaps.slow_share > 0.0 && self.fate.uniform() < mishaps.slow_share;
        if is_slow { model.times_as_fast(1.0 / mishaps.slow_times) } else { model }
    }

    /// Takes away what is lost; a new pod takes its place, and the clients ask again.
    fn lose(&mut self, now: f64) {
        let chance = self.world.mishaps.losses_per_hour * LOOK_SECONDS / 3600.0;
        if chance <= 0.0 {
            return;
        }
        let mut idx = 0;
        while idx < self.members.len() {
            let is_lost = self.members[idx].stage == Stage::Serving && self.fate.uniform() < chance;
            if !is_lost {
                idx += 1;
                continue;
            }
            let lost = self.members.remove(idx).replica;
            self.gone.add(&lost);
            self.start(now);
            for request in lost.abandon() {
                self.sample.arrivals -= self.sample.arrivals.min(1);
                self.route(request);
            }
        }
    }

    fn advance(&mut self, until: f64) {
        for member in &mut self.members {
            member.replica.advance(until);
        }
    }

    fn route(&mut self, request: Request) {
        self.sample.arrivals += 1;
        let chosen = match self.world.router {
            Router::BestOfTwo => self.better_of_two(request.arrived),
            Router::Random => self.pick(),
            Router::LeastRequests => self.least_requests(request.arrived),
            Router::Prefix => self.longest_prefix(&request),
        };
        match chosen {
            Some(idx) => self.members[idx].replica.submit(request),
            None => self.held.push_back(request),
        }
    }

    fn better_of_two(&mut self, now: f64) -> Option<usize> {
        let (one, other) = (self.pick()?, self.pick()?);
        // Only these two are looked at, so only they must be in the present.
        for idx in [one, other] {
            self.members[idx].replica.advance(now);
        }
        let wanted = |idx: usize| self.members[idx].replica.blocks_wanted();
        Some(if wanted(other) < wanted(one) { other } else { one })
    }

    /// The first of equals is a random one, or all of a quiet hour would meet the same replica.
    fn least_requests(&mut self, now: f64) -> Option<usize> {
        let first = self.pick()?;
        let n = self.members.len();
        for member in self.members.iter_mut().filter(|member| member.stage == Stage::Serving) {
            member.replica.advance(now);
        }
        let serving = (0..n).map(|idx| (first + idx) % n).filter(|idx| self.members[*idx].stage == Stage::Serving);
        serving.min_by_key(|idx| self.members[*idx].replica.open())
    }

    /// The gateway's choice, which looks at all.
    fn longest_prefix(&mut self, request: &Request) -> Option<usize> {
        for member in self.members.iter_mut().filter(|member| member.stage == Stage::Serving) {
            member.replica.advance(request.arrived);
        }
        self.gateway.choose(request, &self.members)
    }

    /// A random serving replica.
    fn pick(&mut self) -> Option<usize> {
        let serving = || self.members.iter().enumerate().filter(|(_, member)| member.stage == Stage::Serving);
        let nth = (self.choices.uniform() * serving().count() as f64) as usize;
        serving().nth(nth).map(|(idx, _)| idx)
    }

    /// Replicas that finished starting serve; drained ones go.
    fn grow_up_and_go(&mut self, now: f64) {
        for member in &mut self.members {
            if matches!(member.stage, Stage::Starting { until } if until <= now) {
                member.stage = Stage::Serving;
            }
        }
        let is_gone = |member: &Member| match member.stage {
            Stage::Draining { until } => member.replica.is_empty() || until <= now,
            Stage::Starting { .. } | Stage::Serving => false,
        };
        self.members.iter().filter(|member| is_gone(member)).for_each(|member| self.gone.add(&member.replica));
        self.members.retain(|member| !is_gone(member));
        if self.members.iter().any(|member| member.stage == Stage::Serving) {
            let held = std::mem::take(&mut self.held);
            self.sample.arrivals = self.sample.arrivals.saturating_sub(held.len() as u32);
            held.into_iter().for_each(|request| self.route(request));
        }
    }

    fn account(&mut self, now: f64) {
        for member in &mut self.members {
            for outcome in member.replica.take_outcomes() {
                self.sample.misses += u32::from(self.outcomes.add(&outcome));
            }
        }
        let mut all = self.gone;
        self.members.iter().for_each(|member| all.add(&member.replica));
        (self.outcomes.preemptions, self.outcomes.prefill_tokens) = (all.preemptions, all.prefill_tokens);
        if now > self.world.trace.seconds {
            return;
        }
        self.outcomes.gpu_seconds += LOOK_SECONDS * self.members.len() as f64;
        self.outcomes.seconds = now;
        if now % SAMPLE_SECONDS < LOOK_SECONDS {
            self.close_sample(now);
        }
    }

    fn close_sample(&mut self, now: f64) {
        let serving: Vec<&Replica> =
            self.members.iter().filter(|member| member.stage == Stage::Serving).map(|member| &member.replica).collect();
        let kv = serving.iter().map(|replica| replica.kv_usage()).sum::<f64>() / serving.len().max(1) as f64;
        let waiting: u32 = serving.iter().map(|replica| replica.waiting()).sum();
        let sample = std::mem::take(&mut self.sample);
        self.outcomes.samples.push(Sample {
            at: now,
            desired: self.desired,
            serving: serving.len() as u32,
            members: self.members.len() as u32,
            kv,
            waiting: waiting + self.held.len() as u32,
            preemptions: self.outcomes.preemptions,
            ..sample
        });
    }

    fn want(&mut self, desired: u32, now: f64) {
        if desired == self.desired {
            return;
        }
        self.outcomes.change(now, self.desired, desired);
        self.desired = desired;
        let present =
            self.members.iter().filter(|member| !matches!(member.stage, Stage::Draining { .. })).count() as u32;
        (present..desired).for_each(|_| self.add(now));
        (desired..present).for_each(|_| self.remove(now));
    }

    /// Takes a draining replica back before it creates a new one.
    fn add(&mut self, now: f64) {
        let draining = self.members.iter_mut().find(|member| matches!(member.stage, Stage::Draining { .. }));
        if let Some(member) = draining {
            member.stage = Stage::Serving;
            return;
        }
        self.start(now);
    }

    /// A replica that does not serve yet goes first, the youngest; else the one with the fewest requests drains.
    fn remove(&mut self, now: f64) {
        if let Some(idx) = self.members.iter().rposition(|member| matches!(member.stage, Stage::Starting { .. })) {
            self.members.remove(idx);
            return;
        }
        let until = now + self.world.replica.drain_seconds;
        let serving = self.members.iter_mut().filter(|member| member.stage == Stage::Serving);
        if let Some(victim) = serving.min_by_key(|member| member.replica.open()) {
            victim.stage = Stage::Draining { until };
        }
    }
}
