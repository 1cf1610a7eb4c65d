//! What is asked: five kinds of load, each by its seed. Conversations go on when they were answered; everything else comes when it comes.

use stoker_workload::Rng;

use super::prompt::{Piece, Prompt};

/// System prompts of a catalogue for each replica: 300,000 tokens, three quarters of its cache.
const CATALOGUE: usize = 150;

/// A kind of load.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Seven of ten requests begin with one of eight system prompts of 2,000 tokens.
    SharedPrompts,
    /// The same with [`CATALOGUE`] system prompts for each replica: one of them does not hold all, together they do.
    Catalogue,
    /// Conversations of several turns, each of which repeats all before it.
    Conversations,
    /// Agents that call again and again behind 20,000 tokens of instructions and tools, in four kinds.
    Agents,
    /// Prompts that share nothing.
    NoSharing,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::SharedPrompts, Self::Catalogue, Self::Conversations, Self::Agents, Self::NoSharing];

    /// One word, for figures.
    pub fn word(self) -> &'static str {
        match self {
            Self::SharedPrompts => "shared",
            Self::Catalogue => "catalogue",
            Self::Conversations => "chat",
            Self::Agents => "agents",
            Self::NoSharing => "unshared",
        }
    }

    /// Sessions that begin in a second, for each replica: such that a fleet which finds prefixes has room, and one which does not has less.
    fn sessions_per_second(self) -> f64 {
        match self {
            Self::SharedPrompts | Self::Catalogue => 14.0,
            Self::Conversations => 2.0,
            Self::Agents => 0.5,
            Self::NoSharing => 12.0,
        }
    }

    fn session(self, id: u64, n_replicas: usize, rng: &mut Rng) -> Session {
        let unique = |at: u64| id * 1000 + at + 1_000_000;
        let among = |rng: &mut Rng, n: f64| (rng.uniform() * n) as u64;
        let length = |rng: &mut Rng, median: f64| rng.log_normal(median, 0.5).clamp(16.0, 8.0 * median) as u32;
        let (pieces, turns, pause, own, answer) = match self {
            Self::SharedPrompts | Self::Catalogue if rng.uniform() < 0.7 => {
                let n_prompts = if self == Self::Catalogue { CATALOGUE * n_replicas } else { 8 };
                let system = Piece { id: 1 + among(rng, n_prompts as f64), tokens: 2000 };
                (vec![system], 1, 0.0, 200.0, 150.0)
            }
            Self::SharedPrompts | Self::Catalogue => {
                (vec![Piece { id: unique(0), tokens: length(rng, 1000.0) }], 1, 0.0, 200.0, 150.0)
            }
            Self::Conversations => (vec![], 2 + among(rng, 8.0) as u32, 8.0, 250.0, 200.0),
            Self::Agents => {
                let kind = Piece { id: 1 + among(rng, 4.0), tokens: 12_000 };
                let task = Piece { id: unique(0), tokens: 8_000 };
                (vec![kind, task], 6 + among(rng, 10.0) as u32, 1.5, 300.0, 80.0)
            }
            Self::NoSharing => (vec![], 1, 0.0, 800.0, 150.0),
        };
        Session { next_piece: unique(1), pieces, turns, pause, own, answer }
    }
}

/// Requests of one client, each behind the last.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    pieces: Vec<Piece>,
    next_piece: u64,
    turns: u32,
    /// Mean seconds between an answer and the next request.
    pause: f64,
    /// Median tokens of a turn's own.
    own: f64,
    /// Median tokens of an answer.
    answer: f64,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Prompt,
    pub(crate) completion_tokens: u32,
}

impl Session {
    /// The next request, if there is one.
    pub(crate) fn ask(&mut self, rng: &mut Rng) -> Option<Request> {
        self.turns = self.turns.checked_sub(1)?;
        let length = |rng: &mut Rng, median: f64| rng.log_normal(median, 0.5).clamp(8.0, 8.0 * median) as u32;
        self.add(length(rng, self.own));
        let request = Request { prompt: Prompt::of(&self.pieces), completion_tokens: length(rng, self.answer) };
        // The answer is a part of what comes next.
        self.add(request.completion_tokens);
        Some(request)
    }

    /// Seconds until the next one.
    pub(crate) fn pause(&self, rng: &mut Rng) -> f64 {
        self.pause * rng.exponential()
    }

    fn add(&mut self, tokens: u32) {
        self.pieces.push(Piece { id: self.next_piece, tokens });
        self.next_piece += 1;
    }
}

/// A load on a fleet.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// What is asked.
    pub kind: Kind,
    /// On how many replicas.
    pub n_replicas: usize,
    /// Sessions begin for so long.
    pub seconds: f64,
    /// So many times as often as usual.
    pub pace: f64,
    /// Of everything that is left to chance.
    pub seed: u64,
}

impl Load {
    /// All sessions with the second at which they begin.
    pub(crate) fn sessions(&self) -> Vec<(f64, Session)> {
        let mut rng = Rng::seeded(self.seed);
        let rate = self.kind.sessions_per_second() * self.pace * self.n_replicas as f64;
        let (mut now, mut sessions) = (0.0, Vec::new());
        loop {
            now += rng.exponential() / rate;
            if now > self.seconds {
                return sessions;
            }
            let session = self.kind.session(sessions.len() as u64, self.n_replicas, &mut rng);
            sessions.push((now, session));
        }
    }
}
