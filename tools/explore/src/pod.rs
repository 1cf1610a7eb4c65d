//! One pod of the model: what the API server shows of it, the process in it, and what the operator heard of that process.
//!
//! Times are counted in ticks of [`TICK_SECONDS`] and only as far as a decision can tell them apart.

/// One tick: longer than an unreachable agent is waited for, half of the patience with one that falters.
pub const TICK_SECONDS: i64 = 16;
/// Ticks beyond which nothing depends on how many.
pub const AGE_MAX: u8 = 2;

/// One pod.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Pod {
    /// Revision it was made for.
    pub revision: u8,
    /// Its number within the revision.
    pub ordinal: u8,
    /// How far it is, by the API server.
    pub stage: Stage,
    /// What is written on it.
    pub intent: Option<Intent>,
    /// The process in it.
    pub agent: Option<Agent>,
    /// What the operator heard of that process.
    pub reading: Reading,
    /// The operator cannot reach its agent.
    pub muted: bool,
}

/// How far a pod is.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Stage {
    /// Without a node.
    Unscheduled {
        /// For so many ticks.
        age: u8,
    },
    /// Its agent runs and was not ready yet.
    Starting,
    /// Requests reach it.
    Serving,
    /// It was ready and is not now.
    Faltering {
        /// For so many ticks.
        age: u8,
    },
    /// Its container ended and starts again.
    Blocked,
    /// It ended for good.
    Finished {
        /// So many ticks ago.
        age: u8,
    },
    /// Being deleted: its agent was sent SIGTERM.
    Leaving,
}

/// What the operator wrote on a pod.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Intent {
    /// Rises with every change.
    pub number: u8,
    /// Drain, or serve.
    pub drain: bool,
    /// Ticks since then.
    pub age: u8,
}

/// An agent's process.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Agent {
    /// The engine runs.
    pub loaded: bool,
    /// Whether it takes requests.
    pub service: Service,
    /// The order that it took last.
    pub taken: Option<Taken>,
    /// It computes answers.
    pub streams: bool,
    /// Ticks since it left service.
    pub left: u8,
    /// Ticks since it started: none, or some.
    pub up: u8,
}

/// Whether an agent takes requests.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Service {
    /// As soon as the engine runs.
    Serving,
    /// Unready, still admitting.
    Withdrawing,
    /// Finishes what runs.
    Draining,
    /// Nothing runs.
    Empty,
}

/// An order that was taken.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Taken {
    /// Its number.
    pub number: u8,
    /// Drain, or serve.
    pub drain: bool,
}

/// What the operator heard.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Reading {
    /// Not asked yet.
    Unread,
    /// No answer, ever.
    Missing,
    /// The last answer.
    Heard {
        /// The agent as it was then.
        agent: Agent,
        /// Ticks since then.
        age: u8,
    },
}

impl Agent {
    /// A process that has just started.
    pub fn started() -> Self {
        Self { loaded: false, service: Service::Serving, taken: None, streams: false, left: 0, up: 0 }
    }

    /// Takes an order, unless a later one or another of the same number was taken.
    pub fn take(&mut self, intent: Intent) {
        let Intent { number, drain, .. } = intent;
        if self.taken.is_some_and(|taken| taken.number >= number) {
            return;
        }
        self.taken = Some(Taken { number, drain });
        if drain {
            self.leave();
        } else {
            (self.service, self.left) = (Service::Serving, 0);
        }
    }

    /// Leaves service. A departure under way does not start over.
    pub fn leave(&mut self) {
        if !self.loaded {
            self.service = Service::Empty;
        } else if self.service == Service::Serving {
            (self.service, self.left) = (Service::Withdrawing, 0);
        }
    }

    /// The window in which it is unready and still admits is over, or it finished what ran.
    pub fn drain_on(&mut self) {
        if matches!(self.service, Service::Withdrawing | Service::Draining) {
            self.service = if self.streams { Service::Draining } else { Service::Empty };
        }
        if self.service == Service::Empty {
            self.left = 0;
        }
    }

    /// A tick passes: longer than the window, and after the second the deadline is over, too.
    pub fn tick(&mut self) {
        self.up = 1;
        if matches!(self.service, Service::Withdrawing | Service::Draining) {
            self.left = (self.left + 1).min(AGE_MAX);
            self.streams &= self.left < AGE_MAX;
            self.drain_on();
        }
    }

    /// Itself without what it does not say.
    fn as_heard(self) -> Self {
        Self { left: 0, taken: self.taken.map(|taken| Taken { drain: false, ..taken }), ..self }
    }

    /// True when it answers the kubelet's probe.
    pub fn is_ready(&self) -> bool {
        self.loaded && self.service == Service::Serving
    }

    /// True when a request that reaches it is admitted.
    pub fn admits(&self) -> bool {
        self.loaded && matches!(self.service, Service::Serving | Service::Withdrawing)
    }
}

impl Pod {
    /// A pod that was just created.
    pub fn new(revision: u8, ordinal: u8) -> Self {
        let stage = Stage::Unscheduled { age: 0 };
        Self { revision, ordinal, stage, intent: None, agent: None, reading: Reading::Unread, muted: false }
    }

    /// True while it takes up room on a node.
    pub fn holds_room(&self) -> bool {
        !matches!(self.stage, Stage::Unscheduled { .. } | Stage::Finished { .. })
    }

    /// True when requests reach it and are admitted, and it is meant to stay.
    pub fn serves(&self) -> bool {
        self.stage == Stage::Serving && !self.drains() && self.agent.is_some_and(|agent| agent.is_ready())
    }

    /// True when it should drain.
    pub fn drains(&self) -> bool {
        self.intent.is_some_and(|intent| intent.drain)
    }

    /// True when its agent computes answers.
    pub fn holds_streams(&self) -> bool {
        self.agent.is_some_and(|agent| agent.streams)
    }

    /// The kubelet looks at its agent and says how far it is.
    pub fn look(&mut self) {
        let Some(agent) = self.agent else { return };
        self.stage = match self.stage {
            Stage::Starting | Stage::Serving | Stage::Faltering { .. } | Stage::Blocked if agent.is_ready() => {
                Stage::Serving
            }
            Stage::Serving => Stage::Faltering { age: 0 },
            stage => stage,
        };
    }

    /// The operator reads its agent, and tells it what is written on the pod if it does not know.
    pub fn probe(&mut self) {
        let Some(agent) = self.agent.as_mut().filter(|_| !self.muted && self.stage != Stage::Leaving) else { return };
        if let Some(intent) = self.intent
            && agent.taken.is_none_or(|taken| taken.number < intent.number)
        {
            agent.take(intent);
        }
        self.reading = Reading::Heard { agent: agent.as_heard(), age: 0 };
    }

    /// A tick passes: within it kubelet and operator have looked.
    pub fn tick(&mut self) {
        let older = |age: &mut u8| *age = (*age + 1).min(AGE_MAX);
        self.intent.iter_mut().for_each(|intent| older(&mut intent.age));
        self.agent.iter_mut().for_each(Agent::tick);
        match &mut self.stage {
            Stage::Unscheduled { age } | Stage::Faltering { age } | Stage::Finished { age } => older(age),
            Stage::Starting | Stage::Serving | Stage::Blocked | Stage::Leaving => {}
        }
        match &mut self.reading {
            Reading::Heard { age, .. } => *age = 1,
            Reading::Unread if self.agent.is_some() => self.reading = Reading::Missing,
            Reading::Unread | Reading::Missing => {}
        }
        self.look();
        self.probe();
    }

    /// Begins to go: at once without a process, else its agent is told to end.
    pub fn delete(&mut self) {
        (self.stage, self.intent, self.reading) = (Stage::Leaving, None, Reading::Unread);
        self.agent.iter_mut().for_each(Agent::leave);
    }

    /// Only the order of numbers is ever looked at: renames them 1, 2, 3.
    pub fn renumber(&mut self) {
        let mut numbers = Vec::with_capacity(3);
        self.each_number(|number| numbers.push(*number));
        numbers.sort_unstable();
        numbers.dedup();
        self.each_number(|number| *number = 1 + numbers.iter().filter(|other| *other < number).count() as u8);
    }

    fn each_number(&mut self, mut visit: impl FnMut(&mut u8)) {
        let heard = match &mut self.reading {
            Reading::Heard { agent, .. } => Some(agent),
            Reading::Unread | Reading::Missing => None,
        };
        let taken = self.agent.iter_mut().chain(heard).filter_map(|agent| agent.taken.as_mut());
        let numbers = taken.map(|taken| &mut taken.number);
        numbers.chain(self.intent.iter_mut().map(|intent| &mut intent.number)).for_each(&mut visit);
    }
}
