//! What gateways have: requests in line, that no replica has room for or that there is no replica for, and what they sent to whom. Agents
//! know nothing of the first, so that whoever reckons replicas by agents alone would find them busy and not see how much more is asked.
//!
//! The operator asks the gateways that it leads Services to, at the addresses that Kubernetes has for them: what anybody could send
//! here would be anybody's say in how many replicas there are. Decides nothing.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::future::join_all;
use stoker_crds::endpoints::{Line, Lines};
use stoker_scaling::{Held, Holders};
use tokio::time::MissedTickBehavior;
use tracing::debug;

use crate::{agent_client::AgentClient, gateways::Gateways, lease::Leadership, vitals::Vitals};

/// As often as agents are asked.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// A gateway that has not answered for so long has nothing in line that anybody knows of, and may have.
const BELIEVED_FOR: Duration = Duration::from_secs(10);

/// Requests in line, by gateway. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Waiting(Arc<Mutex<Heard>>);

#[derive(Debug, Default)]
struct Heard {
    /// Those that there are; `None` until they are asked for the first time.
    gateways: Option<HashSet<String>>,
    said: HashMap<String, Said>,
}

/// What a gateway said.
#[derive(Debug)]
struct Said {
    at: Instant,
    lines: Vec<Line>,
}

impl Said {
    fn is_believed(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < BELIEVED_FOR
    }
}

impl Waiting {
    /// What waits for a deployment at all gateways.
    pub fn of(&self, namespace: &str, name: &str, now: Instant) -> Held {
        let heard = self.lock();
        let believed = |said: &&Said| said.is_believed(now);
        let lines = heard.said.values().filter(believed).flat_map(|said| &said.lines);
        let of_it = lines.filter(|line| line.namespace == namespace && line.name == name);
        let requests = of_it.fold(0, |sum: u32, line| sum.saturating_add(line.waiting));
        let is_silent = |gateway: &&String| heard.said.get(*gateway).filter(believed).is_none();
        let by = match &heard.gateways {
            None => Holders::Silent("nobody was asked yet".to_owned()),
            // Always the same of several.
            Some(gateways) => {
                gateways.iter().filter(is_silent).min().map_or(Holders::All, |gateway| Holders::Silent(gateway.clone()))
            }
        };
        Held { requests, by }
    }

    /// What all gateways have of a deployment, added up; `None` where none says anything.
    pub fn routed(&self, namespace: &str, name: &str, now: Instant) -> Option<Line> {
        let heard = self.lock();
        let mut said = heard.said.values().filter(|said| said.is_believed(now)).peekable();
        said.peek()?;
        let mut sum = Line { namespace: namespace.to_owned(), name: name.to_owned(), ..Line::default() };
        let lines = said.flat_map(|said| &said.lines);
        for line in lines.filter(|line| line.namespace == namespace && line.name == name) {
            sum.waiting = sum.waiting.saturating_add(line.waiting);
            for replica in &line.replicas {
                match sum.replicas.iter_mut().find(|known| known.pod == replica.pod) {
                    Some(known) => {
                        known.requests = known.requests.saturating_add(replica.requests);
                        known.circuit_open |= replica.circuit_open;
                    }
                    None => sum.replicas.push(replica.clone()),
                }
            }
        }
        Some(sum)
    }

    fn hear(&self, gateway: String, Lines { lines }: Lines, at: Instant) {
        self.lock().said.insert(gateway, Said { at, lines });
    }

    /// These are the gateways that there are.
    fn expect(&self, gateways: &HashSet<String>) {
        let mut heard = self.lock();
        heard.said.retain(|gateway, _| gateways.contains(gateway));
        heard.gateways = Some(gateways.clone());
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks gateways for as long as it runs.
#[derive(Debug)]
pub struct Asker {
    /// Who is asked; `None`: there are no gateways.
    pub gateways: Option<Gateways>,
    /// Speaks to them as to agents.
    pub client: AgentClient,
    /// Only who decides needs to know.
    pub leadership: Leadership,
    /// Where answers go.
    pub waiting: Waiting,
    /// Where it shows that it goes on.
    pub vitals: Vitals,
}

impl Asker {
    /// Asks all of them, over and over.
    pub async fn run(self) {
        let mut ticks = tokio::time::interval(ASK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.vitals.beat("lines");
            if let Some(gateways) = self.gateways.as_ref().filter(|_| self.leadership.holds()) {
                self.ask_all(gateways.ips()).await;
            }
        }
    }

    async fn ask_all(&self, ips: HashSet<String>) {
        self.waiting.expect(&ips);
        join_all(ips.into_iter().map(|ip| self.ask(ip))).await;
    }

    async fn ask(&self, ip: String) {
        match self.client.lines(&ip).await {
            Ok(lines) => self.waiting.hear(ip, lines, Instant::now()),
            // One that has just come does not listen there yet; one of before never does.
            Err(error) => debug!(gateway = ip, %error, "no answer about lines"),
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_crds::endpoints::RoutedReplica;

    use super::*;

    fn lines(waiting: u32) -> Lines {
        Lines { lines: vec![Line { namespace: "default".into(), name: "chat".into(), waiting, replicas: vec![] }] }
    }

    #[test]
    fn what_gateways_sent_to_a_replica_is_added_up_and_one_without_an_answer_is_enough() {
        let (waiting, begun) = (Waiting::default(), Instant::now());
        assert_eq!(waiting.routed("default", "chat", begun), None, "nobody said anything");
        let replica = |pod: &str, requests, circuit_open| RoutedReplica { pod: pod.into(), requests, circuit_open };
        let with = |waiting, replicas| {
            let Lines { lines: mut said } = lines(waiting);
            said[0].replicas = replicas;
            Lines { lines: said }
        };
        waiting.hear("10.0.0.1".into(), with(3, vec![replica("a", 5, false), replica("b", 1, false)]), begun);
        waiting.hear("10.0.0.2".into(), with(1, vec![replica("b", 0, true)]), begun + Duration::from_secs(8));
        let at = |seconds, name| waiting.routed("default", name, begun + Duration::from_secs(seconds));
        let mut chat = at(9, "chat").unwrap();
        chat.replicas.sort_by(|a, b| a.pod.cmp(&b.pod));
        assert_eq!((chat.waiting, chat.replicas), (4, vec![replica("a", 5, false), replica("b", 1, true)]));
        let late = at(12, "chat").unwrap();
        assert_eq!((late.waiting, late.replicas), (1, vec![replica("b", 0, true)]), "what the first said is too old");
        let other = at(12, "code").unwrap();
        assert_eq!((other.waiting, other.replicas), (0, vec![]), "gateways have nothing of it, and say so");
        assert_eq!(at(18, "chat"), None);
    }

    #[test]
    fn gateways_are_added_up_while_they_answer() {
        let (waiting, begun) = (Waiting::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        waiting.hear("10.0.0.1".into(), lines(3), at(0));
        waiting.hear("10.0.0.2".into(), lines(40), at(4));
        let of_chat = |seconds| waiting.of("default", "chat", at(seconds)).requests;
        assert_eq!([of_chat(5), of_chat(9), of_chat(10), of_chat(14)], [43, 43, 40, 0]);
        let of = |namespace, name| waiting.of(namespace, name, at(5)).requests;
        assert_eq!([of("team", "chat"), of("default", "code")], [0, 0]);
        waiting.hear("10.0.0.1".into(), lines(1), at(5));
        assert_eq!(of_chat(5), 41, "what it said before is over");
        waiting.expect(&HashSet::from(["10.0.0.1".to_owned()]));
        assert_eq!(of_chat(5), 1);
    }

    #[test]
    fn all_is_known_when_every_gateway_that_there_is_said_so_lately() {
        let (waiting, begun) = (Waiting::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let by = |seconds| waiting.of("default", "chat", at(seconds)).by;
        assert_eq!(by(0), Holders::Silent("nobody was asked yet".into()));
        waiting.expect(&["10.0.0.1", "10.0.0.2"].map(str::to_owned).into());
        waiting.hear("10.0.0.2".into(), lines(3), at(0));
        assert_eq!(by(1), Holders::Silent("10.0.0.1".into()));
        waiting.hear("10.0.0.1".into(), lines(0), at(2));
        assert_eq!(by(9), Holders::All);
        assert_eq!(by(10), Holders::Silent("10.0.0.2".into()), "what it said is too old");
        waiting.expect(&HashSet::from(["10.0.0.1".to_owned()]));
        assert_eq!(by(10), Holders::All, "the other one is gone");
    }
}
