//! A rule of others that chooses among real agents, inside of who asks them: it knows what they say when they are asked, as often as its
//! documents have it, and what it sent. What agents hold, which some rules know from events, is taken from what was sent to each: it keeps as
//! much as it has room for, and what was not used for longest goes first.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Result;
use stoker_crds::contract::LoadReport;
use stoker_loadgen::{
    answer::Complete,
    client::{Ask, Client, Failure},
};
use stoker_sim::routing::{BLOCK_TOKENS, Cache, Prompt, Rule, RuleName, Said};
use tokio::task::JoinHandle;

use crate::{agent::AgentProcess, live};

/// Tokens that agents of such a comparison keep, each (`--kv-cache-tokens`).
pub const KV_TOKENS: u32 = 16_384;
/// The same in blocks of a [`Prompt`].
pub const KV_BLOCKS: usize = (KV_TOKENS / BLOCK_TOKENS) as usize;

/// See the module. It asks agents for their load until it is dropped.
pub struct Rival {
    clients: Vec<Client>,
    known: Arc<Mutex<Known>>,
    asking: JoinHandle<()>,
}

struct Known {
    rule: Rule,
    begun: Instant,
    /// By each agent, when it was asked last.
    said: Vec<Said>,
    /// Requests on each.
    in_flight: Vec<u32>,
    /// What each holds.
    held: Vec<Cache>,
    n_chosen: usize,
}

/// A request on its way.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    agent: usize,
    /// Of the rule's, in their order.
    number: usize,
}

impl Rival {
    /// This rule before these agents.
    pub fn start(rule: RuleName, agents: &[AgentProcess], seed: u64) -> Result<Self> {
        let n = agents.len();
        let known = Arc::new(Mutex::new(Known {
            rule: rule.rule(n, seed),
            begun: Instant::now(),
            said: vec![Said::default(); n],
            in_flight: vec![0; n],
            held: (0..n).map(|_| Cache::of(KV_BLOCKS)).collect(),
            n_chosen: 0,
        }));
        let loads = agents.iter().map(|agent| agent.admin_url("/v1/load")).collect();
        let asking = tokio::spawn(keep_asking(loads, Duration::from_secs_f64(rule.asks_every()), Arc::clone(&known)));
        let clients = agents.iter().map(|agent| live::client(agent.base(), None)).collect::<Result<_>>()?;
        Ok(Self { clients, known, asking })
    }

    /// Sends a request to the agent that is chosen for it.
    pub(crate) async fn ask(&self, model: &str, text: &str, ask: &Ask, deadline: Instant) -> Result<Complete, Failure> {
        let chosen = self.known().choose(&Prompt::of_text(text.as_bytes()));
        let begins = || self.known().begins(chosen);
        let answer = self.clients[chosen.agent].ask_telling(model, ask, deadline.into(), begins).await;
        self.known().ends(chosen);
        answer
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Rival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rival").field("rule", &self.known().rule.name()).finish_non_exhaustive()
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        self.asking.abort();
    }
}

impl Known {
    fn now(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    fn choose(&mut self, prompt: &Prompt) -> Chosen {
        let now = self.now();
        let held = |agent: usize| self.held[agent].held(&prompt.blocks);
        let agent = self.rule.choose(prompt, now, &self.said, &self.in_flight, held);
        self.held[agent].touch(&prompt.blocks);
        self.in_flight[agent] += 1;
        self.n_chosen += 1;
        Chosen { agent, number: self.n_chosen - 1 }
    }

    fn begins(&mut self, chosen: Chosen) {
        let now = self.now();
        self.rule.began(chosen.number, now);
    }

    fn ends(&mut self, chosen: Chosen) {
        let now = self.now();
        self.rule.ended(chosen.number, now);
        self.in_flight[chosen.agent] -= 1;
    }

    fn hears(&mut self, reports: Vec<Option<LoadReport>>) {
        let now = self.now();
        for (said, report) in self.said.iter_mut().zip(reports) {
            *said = report.map_or(*said, |report| heard(&report));
        }
        self.rule.asked(now);
    }
}

fn heard(report: &LoadReport) -> Said {
    Said {
        running: report.running,
        waiting: report.waiting,
        prefill_tokens: report.waiting_prefill_tokens,
        kv_share: f64::from(report.referenced_blocks) / f64::from(report.total_blocks.max(1)),
    }
}

/// Asks all agents again and again, until it is aborted. Of one that does not answer, what it said before is known.
async fn keep_asking(loads: Vec<String>, every: Duration, known: Arc<Mutex<Known>>) {
    let client = reqwest::Client::new();
    loop {
        let mut reports = Vec::new();
        for url in &loads {
            reports.push(read(&client, url).await.ok());
        }
        known.lock().unwrap_or_else(PoisonError::into_inner).hears(reports);
        tokio::time::sleep(every).await;
    }
}

async fn read(client: &reqwest::Client, url: &str) -> reqwest::Result<LoadReport> {
    client.get(url).send().await?.json().await
}
