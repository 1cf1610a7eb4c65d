//! Real agents behind a real gateway that hears of their load every two seconds, as from an operator; and who asks them: requests that
//! come when they come, and how long each waits for its first token.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint};
use stoker_loadgen::{
    client::{Ask, Client, Connections, Ending, Form, Options, Prompt, Sampling},
    shape::Shape,
};
use tokio::task::JoinHandle;

use crate::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
    rival::Rival,
};

/// The operator reads agents this often.
const READ_EVERY: Duration = Duration::from_secs(2);
/// For one answer of an overloaded replica.
const ANSWERED_WITHIN: Duration = Duration::from_secs(120);
const MODEL: &str = "ember";

/// See the module. All of it ends when this is dropped.
pub struct Live {
    agents: Arc<Vec<AgentProcess>>,
    gateway: GatewayProcess,
    reading: JoinHandle<()>,
}

impl Live {
    /// So many agents with these arguments, and a gateway with those.
    pub async fn start(n_agents: usize, agent_args: &[&str], gateway_args: &[&str]) -> Result<Self> {
        let teller = Teller::start().await?;
        let gateway = GatewayProcess::start(teller.url(), gateway_args)?;
        let agents = Arc::new(try_join_all((0..n_agents).map(|_| AgentProcess::ready(agent_args))).await?);
        let reading = tokio::spawn(read(teller, Arc::clone(&agents)));
        gateway.knows("chat", EndpointState::Serving, n_agents).await?;
        gateway.hears("chat", n_agents).await?;
        Ok(Self { agents, gateway, reading })
    }

    /// The agents. The pod of each is `pod-` and its place.
    pub fn agents(&self) -> &[AgentProcess] {
        &self.agents
    }

    /// The gateway before them.
    pub fn gateway(&self) -> &GatewayProcess {
        &self.gateway
    }

    /// Processor time that each agent has used.
    pub fn busy_seconds(&self) -> Result<Vec<f64>> {
        self.agents.iter().map(AgentProcess::busy_seconds).collect()
    }

    /// Prompt tokens that agents looked up in their caches, and those that they found.
    pub async fn looked_up(&self) -> Result<[f64; 2]> {
        let mut sums = [0.0; 2];
        for agent in self.agents.iter() {
            let metrics = reqwest::get(agent.url("/metrics")).await?.text().await?;
            for (sum, family) in sums.iter_mut().zip(["queried", "hit"]) {
                let family = format!("stoker_prefix_cache_{family}_tokens_total ");
                let count = metrics.lines().find_map(|line| line.strip_prefix(&family)?.parse::<f64>().ok());
                ensure!(count.is_some(), "no {family}in\n{metrics}");
                *sum += count.unwrap_or_default();
            }
        }
        Ok(sums)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

/// Reads agents and tells the gateway, until it is aborted. Who does not answer is told as before: an operator waits, too.
async fn read(teller: Teller, agents: Arc<Vec<AgentProcess>>) {
    let mut known: Vec<Option<ReplicaEndpoint>> = vec![None; agents.len()];
    loop {
        for (at, (agent, known)) in agents.iter().zip(&mut known).enumerate() {
            if let Ok(Ok(read)) = tokio::time::timeout(READ_EVERY, replica(&format!("pod-{at}"), agent)).await {
                *known = Some(read);
            }
        }
        teller.tell(vec![deployment("chat", &[MODEL], known.iter().flatten().cloned().collect())]);
        tokio::time::sleep(READ_EVERY).await;
    }
}

/// Who asks: a gateway, or agents by a rule in its place.
#[derive(Clone, Debug)]
pub struct Asker(Arc<Way>);

#[derive(Debug)]
enum Way {
    Gateway(Box<Client>),
    Rule(Rival),
}

/// A request that was answered, in seconds after it was to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    /// Its first token.
    pub first_seconds: f64,
}

impl Asker {
    /// Somebody with this key, if there are keys.
    pub fn new(gateway: &str, api_key: Option<&str>) -> Result<Self> {
        Ok(Self(Arc::new(Way::Gateway(Box::new(client(gateway, api_key)?)))))
    }

    /// Whose requests go where this one says.
    pub fn by(rival: Rival) -> Self {
        Self(Arc::new(Way::Rule(rival)))
    }

    /// Asks, and waits for the whole answer.
    pub async fn ask(&self, prompt: String, max_tokens: u32) -> Result<Timed> {
        let begun = Instant::now();
        let deadline = begun + ANSWERED_WITHIN;
        let ask = Ask { prompt: Prompt::Text(prompt.clone()), max_tokens, seed: 0, shape: Shape::Text };
        let answer = match &*self.0 {
            Way::Gateway(client) => client.ask(MODEL, &ask, deadline.into()).await?,
            Way::Rule(rival) => rival.ask(MODEL, &prompt, &ask, deadline).await?,
        };
        let first = answer.pieces.first().copied().unwrap_or(begun);
        Ok(Timed { first_seconds: (first - begun).as_secs_f64() })
    }
}

/// A client of this base.
pub(crate) fn client(base: &str, api_key: Option<&str>) -> Result<Client> {
    let client = Client::new(Options {
        url: base.to_owned(),
        form: Form::Completions,
        connections: Connections::Kept,
        ending: Ending::AtMaxTokens,
        sampling: Sampling::Greedy,
        api_key: api_key.map(str::to_owned),
    });
    Ok(client?)
}
