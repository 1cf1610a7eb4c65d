//! What pages show of a deployment, as plain values: who serves a page fills them in.

use maud::{Markup, html};

use crate::words;

/// How a word is meant.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Tone {
    /// Somebody has to look.
    Bad,
    /// On its way.
    Wait,
    /// As it should be.
    Good,
    /// Nothing is wanted, or nothing is known.
    #[default]
    Idle,
}

impl Tone {
    fn class(self) -> &'static str {
        match self {
            Self::Bad => "mark bad",
            Self::Wait => "mark wait",
            Self::Good => "mark good",
            Self::Idle => "mark",
        }
    }
}

/// A word with the colour of its meaning.
pub fn mark(tone: Tone, word: &str) -> Markup {
    html! { span class=(tone.class()) { (words::beginning(word, 48)) } }
}

/// Where a deployment stands: the word and the sentence of its condition.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// How it is meant.
    pub tone: Tone,
    /// Such as `Serving`.
    pub word: String,
    /// Its root cause, in a sentence; what others wrote, as they wrote it.
    pub message: String,
}

/// Replicas by what a reader counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Replicas {
    /// Worked towards.
    pub wanted: u32,
    /// Requests reach them.
    pub serving: u32,
    /// On their way in.
    pub starting: u32,
    /// On their way out.
    pub leaving: u32,
}

const NO_BREAK: &str = "\u{a0}";

/// A latency over the last minute, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latency {
    /// Median: of the replicas the middle one.
    pub p50: Option<f64>,
    /// 95th percentile: of the replicas the largest.
    pub p95: Option<f64>,
}

impl Latency {
    /// Both, or a dash.
    pub fn words(self) -> String {
        match (self.p50, self.p95) {
            (None, None) => words::UNKNOWN.to_owned(),
            (p50, p95) => {
                // Lines are broken between the two, not within one.
                let [p50, p95] = [p50, p95].map(|value| words::known(value, words::seconds).replace(' ', NO_BREAK));
                // A unit that both have is said once.
                let short = p50.rsplit_once(NO_BREAK).filter(|(_, unit)| p95.ends_with(&format!("{NO_BREAK}{unit}")));
                format!("{} / {p95}", short.map_or(p50.as_str(), |(number, _)| number))
            }
        }
    }
}

/// What runs, by readings that can be believed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Share of the KV blocks that sequences reference.
    pub kv: Option<f64>,
    /// Sequences being computed.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Tokens generated a second.
    pub tokens: Option<f64>,
    /// Time to first token.
    pub ttft: Latency,
    /// Between two tokens.
    pub itl: Latency,
    /// Sequences thrown out of the cache within the last minute.
    pub preemptions: u64,
    /// Serving replicas whose reading can be believed.
    pub fresh: u32,
}

/// GPUs of a deployment's pods.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gpus {
    /// Of pods that have a node.
    pub used: u64,
    /// Of pods that no node has room for.
    pub waiting: u64,
}

/// A deployment in one row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Where its model comes from.
    pub model: String,
    /// How it is.
    pub state: State,
    /// Who serves.
    pub replicas: Replicas,
    /// What runs.
    pub load: Load,
    /// What it holds.
    pub gpus: Gpus,
}

impl Summary {
    /// Its page.
    pub fn href(&self) -> String {
        format!("/ns/{}/{}", words::encoded(&self.namespace), words::encoded(&self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_latencies_of_one_unit_say_it_once() {
        let words = |p50, p95| Latency { p50, p95 }.words().replace(NO_BREAK, " ");
        assert_eq!(words(Some(0.0012), Some(0.0028)), "1.2 / 2.8 ms");
        assert_eq!(words(Some(0.9), Some(1.2)), "900 ms / 1.20 s");
        assert_eq!(words(None, Some(1.2)), "– / 1.20 s");
        assert_eq!(words(None, None), "–");
    }
}
