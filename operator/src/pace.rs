//! Which agents are asked now. Pure: each has a pace of its own, and one that does not answer holds up nobody.
//!
//! Questions are spread over the pause between them, so that many agents are no burst of work. Agents that were silent twice in a
//! row share a bounded number of sockets among themselves: however many they are, the others are asked as before.

use std::collections::HashMap;

/// How often is looked who is due.
pub const TICK_MS: u64 = 250;
/// How often a settled agent is asked.
const PAUSE_MS: u64 = 2_000;
/// How often an agent that drains or starts is asked.
const PAUSE_MOVING_MS: u64 = 500;
/// How early a question may be: ticks never fall exactly on a pause.
const SLACK_MS: u64 = 50;
/// Silences in a row after which an agent is asked among the silent ones.
const SILENCES: u32 = 2;
/// Questions to silent agents that wait for an answer at the same time.
const SILENT_AT_ONCE: usize = 512;
/// Questions begun in a tick, beyond an even share: agents that are new and ticks that came late.
const SPARE_QUESTIONS: f64 = 64.0;
const SPARE_SHARE: f64 = 1.25;

/// See the module.
#[derive(Debug, Default)]
pub struct Pace {
    agents: HashMap<String, Agent>,
    tick: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Agent {
    asked_ms: Option<u64>,
    waits: bool,
    silences: u32,
    /// When it was last a candidate.
    tick: u64,
}

/// An agent that may be asked.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// UID of its pod.
    pub uid: &'a str,
    /// Draining or starting: its phase is about to change.
    pub moving: bool,
}

impl Candidate<'_> {
    fn pause_ms(self) -> u64 {
        if self.moving { PAUSE_MOVING_MS } else { PAUSE_MS }
    }
}

impl Pace {
    /// Places of the candidates that are to be asked now; each of them waits until [`Pace::ended`]. Others are forgotten.
    pub fn begin(&mut self, candidates: &[Candidate<'_>], now_ms: u64) -> Vec<usize> {
        let due = self.due(candidates, now_ms);
        let silent_waiting = self.agents.values().filter(|agent| agent.waits && agent.is_silent()).count();
        let (mut share, mut silent_share) = (share(candidates), SILENT_AT_ONCE.saturating_sub(silent_waiting));
        let mut places = Vec::new();
        for (_, place) in due {
            let Some(agent) = self.agents.get_mut(candidates[place].uid) else { continue };
            let left = if agent.is_silent() { &mut silent_share } else { &mut share };
            if *left > 0 {
                *left -= 1;
                (agent.asked_ms, agent.waits) = (Some(now_ms), true);
                places.push(place);
            }
        }
        places
    }

    /// The question to this agent came to its end.
    pub fn ended(&mut self, uid: &str, answered: bool) {
        let Some(agent) = self.agents.get_mut(uid) else { return };
        agent.waits = false;
        agent.silences = if answered { 0 } else { agent.silences.saturating_add(1) };
    }

    /// True when its last question had no answer: its reading ages.
    pub fn missed(&self, uid: &str) -> bool {
        self.agents.get(uid).is_some_and(|agent| agent.silences > 0)
    }

    /// When who is due was due, longest first. New candidates are known from then on, and who is none is not any more.
    fn due(&mut self, candidates: &[Candidate<'_>], now_ms: u64) -> Vec<(u64, usize)> {
        self.tick += 1;
        let mut due = Vec::new();
        for (place, candidate) in candidates.iter().enumerate() {
            if !self.agents.contains_key(candidate.uid) {
                self.agents.insert(candidate.uid.to_owned(), Agent::default());
            }
            let Some(agent) = self.agents.get_mut(candidate.uid) else { continue };
            agent.tick = self.tick;
            let due_ms = agent.asked_ms.map_or(0, |asked_ms| asked_ms + candidate.pause_ms());
            if !agent.waits && due_ms <= now_ms + SLACK_MS {
                due.push((due_ms, place));
            }
        }
        self.agents.retain(|_, agent| agent.tick == self.tick);
        due.sort_unstable();
        due
    }
}

impl Agent {
    fn is_silent(&self) -> bool {
        self.silences >= SILENCES
    }
}

/// Questions that fall on one tick when all are spread evenly, and some more.
fn share(candidates: &[Candidate<'_>]) -> usize {
    let even: f64 = candidates.iter().map(|candidate| TICK_MS as f64 / candidate.pause_ms() as f64).sum();
    (even * SPARE_SHARE + SPARE_QUESTIONS) as usize
}

#[cfg(test)]
mod tests {
    use std::{cmp::Reverse, collections::BinaryHeap};

    use super::*;

    const ANSWER_MS: u64 = 20;
    const TIMEOUT_MS: u64 = 1_000;

    /// Agents by their place, on virtual time.
    struct World {
        pace: Pace,
        uids: Vec<String>,
        /// From when on it does not answer.
        dead_from_ms: Vec<u64>,
        read_ms: Vec<u64>,
        /// When a question ends, whose, and whether with an answer.
        ends: BinaryHeap<Reverse<(u64, usize, bool)>>,
        worst_age_ms: u64,
        most_waiting: usize,
        asked_dead: usize,
    }

    impl World {
        fn new(dead_from_ms: Vec<u64>) -> Self {
            let n = dead_from_ms.len();
            Self {
                pace: Pace::default(),
                uids: (0..n).map(|idx| format!("uid-{idx}")).collect(),
                dead_from_ms,
                read_ms: vec![0; n],
                ends: BinaryHeap::new(),
                worst_age_ms: 0,
                most_waiting: 0,
                asked_dead: 0,
            }
        }

        /// Runs and looks at the age of every living agent's reading, from a time on when all were asked once.
        fn run(&mut self, until_ms: u64, looked_at_from_ms: u64) {
            for now_ms in (0..until_ms).step_by(TICK_MS as usize) {
                while let Some(Reverse((end_ms, idx, answered))) =
                    self.ends.peek().copied().filter(|end| end.0.0 <= now_ms)
                {
                    self.ends.pop();
                    self.pace.ended(&self.uids[idx], answered);
                    if answered {
                        self.look(idx, end_ms, looked_at_from_ms);
                        self.read_ms[idx] = end_ms;
                    }
                }
                self.ask(now_ms);
            }
            (0..self.uids.len()).for_each(|idx| self.look(idx, until_ms, looked_at_from_ms));
        }

        fn look(&mut self, idx: usize, now_ms: u64, from_ms: u64) {
            if now_ms >= from_ms && self.dead_from_ms[idx] == u64::MAX {
                self.worst_age_ms = self.worst_age_ms.max(now_ms - self.read_ms[idx]);
            }
        }

        fn ask(&mut self, now_ms: u64) {
            let candidates: Vec<Candidate<'_>> = self.uids.iter().map(|uid| Candidate { uid, moving: false }).collect();
            for idx in self.pace.begin(&candidates, now_ms) {
                let dead = now_ms >= self.dead_from_ms[idx];
                self.asked_dead += usize::from(dead);
                let took_ms = if dead { TIMEOUT_MS } else { ANSWER_MS };
                self.ends.push(Reverse((now_ms + took_ms, idx, !dead)));
            }
            self.most_waiting = self.most_waiting.max(self.ends.len());
        }
    }

    #[test]
    fn a_third_of_ten_thousand_agents_that_die_at_once_do_not_age_the_others() {
        let dies = |idx: usize| if idx.is_multiple_of(3) { 10_000 } else { u64::MAX };
        let mut world = World::new((0..10_000).map(dies).collect());
        world.run(30_000, 5_000);
        assert!(world.worst_age_ms <= 2_500, "{} ms", world.worst_age_ms);
        assert!(world.most_waiting <= 4_096, "{} sockets", world.most_waiting);
        // They are asked on, in turn: 3334 of them, 512 at once, a second and a tick each.
        assert!(world.asked_dead >= 3_334 * 3, "{}", world.asked_dead);
    }

    #[test]
    fn a_third_of_ten_thousand_agents_that_never_answered_do_not_age_the_others() {
        let mut world = World::new((0..10_000).map(|idx| if idx % 3 == 0 { 0 } else { u64::MAX }).collect());
        world.run(12_000, 5_000);
        assert!(world.worst_age_ms <= 2_500, "{} ms", world.worst_age_ms);
    }

    #[test]
    fn nobody_is_asked_while_it_waits_or_before_its_pause_is_over() {
        let mut pace = Pace::default();
        let (settled, moving) = (Candidate { uid: "a", moving: false }, Candidate { uid: "b", moving: true });
        let asked = |pace: &mut Pace, now_ms| pace.begin(&[settled, moving], now_ms);
        assert_eq!(asked(&mut pace, 0), [0, 1]);
        assert_eq!(asked(&mut pace, 10_000), [0_usize; 0], "both wait");
        pace.ended("a", true);
        pace.ended("b", true);
        assert_eq!(asked(&mut pace, 10_000), [1, 0], "longest due first");
        pace.ended("a", true);
        pace.ended("b", false);
        assert_eq!(asked(&mut pace, 10_250), [0_usize; 0]);
        assert_eq!((pace.missed("a"), pace.missed("b")), (false, true));
        assert_eq!(asked(&mut pace, 10_500), [1]);
        pace.ended("b", true);
        assert_eq!(asked(&mut pace, 12_000), [1, 0]);
    }

    #[test]
    fn who_is_gone_is_forgotten() {
        let mut pace = Pace::default();
        pace.begin(&[Candidate { uid: "a", moving: false }], 0);
        pace.begin(&[], 250);
        pace.ended("a", false);
        assert!(pace.agents.is_empty());
    }
}
