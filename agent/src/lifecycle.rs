//! The life of one replica as a pure state machine: which phase it is in, what it admits, and what an event leads to.
//!
//! Two things vary independently: what the engine is (`Engine`) and whether the replica is in service (`Service`).
//! `next` takes the time inside the event and returns the new state with the actions that the caller carries out.
//! Nothing here reads a clock, sends a signal or knows HTTP.

use std::time::{Duration, Instant};

use stoker_crds::contract::{AgentPhase, DrainSettings};

/// After the drain deadline every request has been told to end; this long the engine may take to say so. Past it the
/// engine is taken for hung, and waiting longer would only delay the exit.
const ABORT_GRACE: Duration = Duration::from_secs(5);

/// How much longer than it was told to a replica admits at most, while somebody still sends requests: balancers learn late on a busy
/// cluster, and connections that were kept alive through a Service stay with their replica.
const LATE: u32 = 9;

/// Exit code after the engine stopped by itself: its memory on the device may be lost, only a new process gets a clean one.
const ENGINE_DIED: u8 = 1;

/// Where a replica is in its life.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// What the engine is.
    pub engine: Engine,
    /// Whether the replica takes requests.
    pub service: Service,
}

/// What the engine is.
#[derive(Clone, Debug, PartialEq)]
pub enum Engine {
    /// Reading weights, planning memory, warming up.
    Loading,
    /// Loaded and warm.
    Running,
    /// The model is not loaded, and will be tried again. A restart would fail the same way.
    LoadFailed(String),
    /// The engine stopped by itself after it ran. A restart may help.
    Died(String),
}

/// Whether the replica takes requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Service {
    /// In service (as soon as the engine runs).
    Serving,
    /// Unready, still admitting: load balancers are learning that it leaves.
    Withdrawing(Departure),
    /// Admits nothing, finishes what runs.
    Draining(Departure),
    /// Nothing runs, nothing is admitted.
    Empty(Purpose),
}

/// Why a replica leaves service.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Ordered by the operator: it stays up and can be taken back.
    Drain,
    /// Told to end by a signal: it exits once empty.
    Exit,
}

impl Purpose {
    fn stricter(self, other: Self) -> Self {
        if self == Self::Exit { self } else { other }
    }
}

/// When a leaving replica does what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Departure {
    /// Why it leaves.
    pub purpose: Purpose,
    /// Until then new requests are admitted in any case.
    pub withdraw_until: Instant,
    /// And until nobody came for so long.
    pub silence: Duration,
    /// From then on open requests are ended with an error.
    pub deadline: Instant,
}

/// What happens to a replica.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The engine is loaded and warm.
    Loaded,
    /// The model cannot be loaded.
    LoadFailed(String),
    /// The engine stopped by itself.
    Died(String),
    /// Leave service.
    Leave(Departure),
    /// Come back into service.
    Return,
    /// Time passed.
    Tick {
        /// The time.
        now: Instant,
        /// Requests that have not been answered to the end.
        open: usize,
        /// When one was admitted last.
        newest: Option<Instant>,
    },
}

/// What the caller must do after an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// End every open request with this error.
    AbortAll(String),
    /// End the process with this code.
    Exit(u8),
}

impl Departure {
    /// A departure that begins `now` with the given windows.
    pub fn new(purpose: Purpose, now: Instant, window: DrainSettings) -> Self {
        let silence = Duration::from_secs(window.withdraw_seconds.into());
        let withdraw_until = now + silence;
        let deadline = withdraw_until + Duration::from_secs(window.deadline_seconds.into());
        Self { purpose, withdraw_until, silence, deadline }
    }

    /// Until when requests are admitted, as far as is known.
    fn admits_until(self, newest: Option<Instant>) -> Instant {
        let latest = (self.withdraw_until + LATE * self.silence).min(self.deadline);
        newest.map_or(self.withdraw_until, |newest| newest + self.silence).min(latest).max(self.withdraw_until)
    }

    /// A departure under way that is asked for again: it never starts over, and the stricter of both wins.
    fn hastened_by(self, other: Self) -> Self {
        Self {
            purpose: self.purpose.stricter(other.purpose),
            withdraw_until: self.withdraw_until.min(other.withdraw_until),
            silence: self.silence.min(other.silence),
            deadline: self.deadline.min(other.deadline),
        }
    }
}

impl State {
    /// A replica at process start.
    pub fn new() -> Self {
        Self { engine: Engine::Loading, service: Service::Serving }
    }

    /// The phase as `/v1/load` names it. Leaving hides loading and failing: what matters then is whether it is empty.
    pub fn phase(&self) -> AgentPhase {
        match (&self.service, &self.engine) {
            (Service::Withdrawing(_), _) => AgentPhase::Withdrawing,
            (Service::Draining(_), _) => AgentPhase::Draining,
            (Service::Empty(_), _) => AgentPhase::Empty,
            (Service::Serving, Engine::Loading) => AgentPhase::Loading,
            (Service::Serving, Engine::Running) => AgentPhase::Ready,
            (Service::Serving, Engine::LoadFailed(_) | Engine::Died(_)) => AgentPhase::Failed,
        }
    }

    /// Why the engine does not run, if it failed.
    pub fn error(&self) -> Option<&str> {
        match &self.engine {
            Engine::LoadFailed(error) | Engine::Died(error) => Some(error),
            Engine::Loading | Engine::Running => None,
        }
    }
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}

/// The state after `event`, and what must be done about it.
pub fn next(state: State, event: Event) -> (State, Vec<Action>) {
    let State { engine, service } = state;
    match event {
        Event::Loaded => (State { engine: Engine::Running, service }, vec![]),
        Event::LoadFailed(error) => (State { engine: Engine::LoadFailed(error), service }, vec![]),
        Event::Died(error) => {
            let actions = vec![Action::AbortAll(error.clone()), Action::Exit(ENGINE_DIED)];
            (State { engine: Engine::Died(error), service }, actions)
        }
        Event::Leave(departure) => with_service(leave(&engine, service, departure), engine),
        Event::Return => (State { engine, service: returned(service) }, vec![]),
        Event::Tick { now, open, newest } => with_service(tick(service, now, open, newest), engine),
    }
}

fn with_service((service, actions): (Service, Vec<Action>), engine: Engine) -> (State, Vec<Action>) {
    (State { engine, service }, actions)
}

fn leave(engine: &Engine, service: Service, departure: Departure) -> (Service, Vec<Action>) {
    match (engine, service) {
        (Engine::Running, Service::Serving) => (Service::Withdrawing(departure), vec![]),
        (Engine::Running, Service::Withdrawing(earlier)) => {
            (Service::Withdrawing(earlier.hastened_by(departure)), vec![])
        }
        (Engine::Running, Service::Draining(earlier)) => (Service::Draining(earlier.hastened_by(departure)), vec![]),
        (Engine::Running, Service::Empty(purpose)) => empty(purpose.stricter(departure.purpose)),
        // Without a running engine nothing was admitted, so there is nothing to wait for.
        (Engine::Loading | Engine::LoadFailed(_) | Engine::Died(_), _) => empty(departure.purpose),
    }
}

fn returned(service: Service) -> Service {
    let purpose = match &service {
        Service::Serving => return Service::Serving,
        Service::Withdrawing(departure) | Service::Draining(departure) => departure.purpose,
        Service::Empty(purpose) => *purpose,
    };
    match purpose {
        Purpose::Drain => Service::Serving,
        Purpose::Exit => service,
    }
}

fn tick(service: Service, now: Instant, open: usize, newest: Option<Instant>) -> (Service, Vec<Action>) {
    match service {
        Service::Serving | Service::Empty(_) => (service, vec![]),
        Service::Withdrawing(departure) if now < departure.admits_until(newest) => (service, vec![]),
        Service::Withdrawing(departure) | Service::Draining(departure) => draining(departure, now, open),
    }
}

fn draining(departure: Departure, now: Instant, open: usize) -> (Service, Vec<Action>) {
    if open == 0 || now >= departure.deadline + ABORT_GRACE {
        return empty(departure.purpose);
    }
    let mut actions = vec![];
    if now >= departure.deadline {
        // Repeated every tick on purpose: it also ends a request that was being submitted during the last one.
        actions.push(Action::AbortAll("the drain deadline passed".to_owned()));
    }
    (Service::Draining(departure), actions)
}

fn empty(purpose: Purpose) -> (Service, Vec<Action>) {
    let actions = match purpose {
        Purpose::Drain => vec![],
        Purpose::Exit => vec![Action::Exit(0)],
    };
    (Service::Empty(purpose), actions)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: DrainSettings = DrainSettings { deadline_seconds: 10, withdraw_seconds: 3 };

    fn ready() -> State {
        next(State::new(), Event::Loaded).0
    }

    fn after(state: State, events: impl IntoIterator<Item = Event>) -> (State, Vec<Action>) {
        events.into_iter().fold((state, vec![]), |(state, _), event| next(state, event))
    }

    fn leave_for(purpose: Purpose, now: Instant) -> Event {
        Event::Leave(Departure::new(purpose, now, WINDOW))
    }

    fn tick_at(start: Instant, seconds: u64, open: usize) -> Event {
        Event::Tick { now: start + Duration::from_secs(seconds), open, newest: None }
    }

    #[test]
    fn loading_becomes_ready_or_failed_with_the_reason() {
        assert_eq!(State::new().phase(), AgentPhase::Loading);
        assert_eq!(ready().phase(), AgentPhase::Ready);
        let (failed, actions) = next(State::new(), Event::LoadFailed("config.json: absent".into()));
        assert_eq!((failed.phase(), failed.error()), (AgentPhase::Failed, Some("config.json: absent")));
        assert!(actions.is_empty());
    }

    #[test]
    fn a_drain_withdraws_first_then_waits_for_open_requests() {
        let start = Instant::now();
        let drain = leave_for(Purpose::Drain, start);
        let (state, _) = after(ready(), [drain.clone(), tick_at(start, 2, 0)]);
        assert_eq!(state.phase(), AgentPhase::Withdrawing, "still admitting although nothing is open");
        let (state, _) = after(ready(), [drain.clone(), tick_at(start, 3, 1)]);
        assert_eq!(state.phase(), AgentPhase::Draining);
        let (state, actions) = next(state, tick_at(start, 4, 0));
        assert_eq!((state.phase(), actions), (AgentPhase::Empty, vec![]));
    }

    #[test]
    fn who_is_sent_late_is_admitted_until_nobody_is_or_it_has_lasted() {
        let start = Instant::now();
        let phase_at = |seconds: u64, newest: u64, window: DrainSettings| {
            let [now, newest] = [seconds, newest].map(|seconds| start + Duration::from_secs(seconds));
            let leave = Event::Leave(Departure::new(Purpose::Drain, start, window));
            after(ready(), [leave, Event::Tick { now, open: 1, newest: Some(newest) }]).0.phase()
        };
        let long = DrainSettings { deadline_seconds: 600, ..WINDOW };
        for (seconds, newest, phase) in [
            (2, 0, AgentPhase::Withdrawing),
            (3, 0, AgentPhase::Draining),
            (4, 2, AgentPhase::Withdrawing),
            (5, 2, AgentPhase::Draining),
            (29, 29, AgentPhase::Withdrawing),
            (30, 29, AgentPhase::Draining),
        ] {
            assert_eq!(phase_at(seconds, newest, long), phase, "after {seconds} s, the newest after {newest}");
        }
        // Those who came have until the deadline, which nobody moves.
        assert_eq!([12, 13].map(|now| phase_at(now, 12, WINDOW)), [AgentPhase::Withdrawing, AgentPhase::Draining]);
        let at_once = DrainSettings { withdraw_seconds: 0, ..long };
        assert_eq!(phase_at(1, 1, at_once), AgentPhase::Draining, "who was told not to wait does not");
    }

    #[test]
    fn the_deadline_ends_open_requests_and_a_hung_engine_does_not_hold_the_exit() {
        let start = Instant::now();
        let (state, actions) = after(ready(), [leave_for(Purpose::Exit, start), tick_at(start, 13, 1)]);
        assert_eq!(state.phase(), AgentPhase::Draining);
        assert!(matches!(actions[..], [Action::AbortAll(_)]));
        let (state, actions) = next(state, tick_at(start, 18, 1));
        assert_eq!((state.phase(), actions), (AgentPhase::Empty, vec![Action::Exit(0)]));
    }

    #[test]
    fn undrain_returns_to_service_but_never_from_an_exit() {
        let start = Instant::now();
        for seconds in [1, 5, 60] {
            let open = usize::from(seconds < 60);
            let events = [leave_for(Purpose::Drain, start), tick_at(start, seconds, open), Event::Return];
            assert_eq!(after(ready(), events).0.phase(), AgentPhase::Ready, "after {seconds} s");
        }
        let (state, _) = after(ready(), [leave_for(Purpose::Exit, start), Event::Return]);
        assert_eq!(state.phase(), AgentPhase::Withdrawing);
    }

    #[test]
    fn a_signal_during_a_drain_exits_without_starting_over() {
        let start = Instant::now();
        let later = start + Duration::from_secs(5);
        let (state, _) = after(ready(), [leave_for(Purpose::Drain, start), leave_for(Purpose::Exit, later)]);
        let Service::Withdrawing(departure) = state.service else { panic!("{state:?}") };
        assert_eq!(departure.purpose, Purpose::Exit);
        assert_eq!(departure.withdraw_until, start + Duration::from_secs(3));
    }

    #[test]
    fn a_signal_exits_at_once_when_nothing_can_be_open() {
        let start = Instant::now();
        let drained = after(ready(), [leave_for(Purpose::Drain, start), tick_at(start, 4, 0)]).0;
        let failed = next(State::new(), Event::LoadFailed("no".into())).0;
        for state in [State::new(), drained, failed] {
            let (_, actions) = next(state, leave_for(Purpose::Exit, start));
            assert_eq!(actions, [Action::Exit(0)]);
        }
    }

    #[test]
    fn a_dead_engine_ends_what_is_open_and_then_the_process() {
        let (state, actions) = next(ready(), Event::Died("step failed".into()));
        assert_eq!(state.phase(), AgentPhase::Failed);
        assert_eq!(actions, [Action::AbortAll("step failed".into()), Action::Exit(ENGINE_DIED)]);
    }
}
