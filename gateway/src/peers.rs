//! Follows what other gateways have on replicas and send there: a stream from each that the operator names. Gateways that know of each other choose as one
//! would ([0039](../../docs/decisions/0039-gateways-tell-each-other.md)). What one said counts while its stream goes on; without it, choices are made by what replicas
//! report, and no request waits for any of it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::Request;
use stoker_crds::in_flight::{ALIVE_SECONDS, IN_FLIGHT_PATH, InFlight, SentPrompt};
use stoker_routing::{Own, Sent};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    fleet::Fleet,
    followed::follow_each,
    gateway::Gateway,
    vital::{Theirs, Vital},
};

/// A gateway that says nothing for so long, not even that it is there, is not.
const SILENCE: Duration = Duration::from_secs(3 * ALIVE_SECONDS);
/// For the head of its answer.
const ANSWER: Duration = Duration::from_secs(5);
/// All that one has on ten thousand replicas is less.
const LINE_BYTES_MAX: usize = 4 << 20;
/// After a stream that ended; twice as long after each more that was short.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Gateways of before have no such stream: they are asked this often, as they may be replaced behind the same address.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Follows every other gateway, for ever.
pub async fn follow(gateway: Arc<Gateway>) {
    let named = |fleet: &Fleet| fleet.gateways.iter().cloned().collect();
    let listen = |address| Listener { gateway: Arc::clone(&gateway), address }.listen();
    follow_each(gateway.fleets(), named, listen).await;
}

/// How a stream ended that was one.
#[derive(Debug, Eq, PartialEq)]
enum Ended {
    /// It was this gateway's own.
    Own,
    /// The other one has nothing more to say.
    Over,
}

/// Listens to one address.
struct Listener {
    gateway: Arc<Gateway>,
    address: String,
}

impl Listener {
    async fn listen(self) {
        let mut pause = FIRST_PAUSE;
        // Gateways begin together: not all questions do.
        sleep(FIRST_PAUSE.mul_f64(rand::random())).await;
        loop {
            let begun = Instant::now();
            match self.hear().await {
                Ok(Ended::Own) => return,
                Ok(Ended::Over) => tracing::debug!(address = self.address, "another gateway has nothing more to say"),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::debug!(address = self.address, error, "another gateway is not heard");
                }
            }
            pause = if begun.elapsed() > LONGEST_PAUSE { FIRST_PAUSE } else { (pause * 2).min(LONGEST_PAUSE) };
            sleep(pause.mul_f64(rand::random::<f64>() / 2.0 + 0.5)).await;
        }
    }

    /// Takes in a stream to its end. What it said is known no more then.
    async fn hear(&self) -> anyhow::Result<Ended> {
        let uri = format!("http://{}{IN_FLIGHT_PATH}", self.address);
        let request = Request::get(uri).body(Bytes::new()).context("make a request")?;
        let response = timeout(ANSWER, self.gateway.send(request)).await.context("no answer in time")??;
        if !response.status().is_success() {
            bail!("answered {}", response.status());
        }
        let (mut body, mut unread, mut said) = (response.into_body(), BytesMut::new(), None);
        loop {
            let frame = timeout(SILENCE, body.frame()).await.context("it says nothing")?;
            let Some(frame) = frame else { return Ok(Ended::Over) };
            let frame = frame.map_err(|error| anyhow::anyhow!("read what it says: {error}"))?;
            unread.extend_from_slice(frame.data_ref().map_or(&[][..], |bytes| bytes));
            while let Some(end) = memchr::memchr(b'\n', &unread) {
                let line: InFlight = serde_json::from_slice(&unread.split_to(end + 1)).context("read a line")?;
                if line.gateway == self.gateway.id {
                    return Ok(Ended::Own);
                }
                said.get_or_insert_with(|| Said::by_a_peer(&self.gateway)).take(line);
            }
            if unread.len() > LINE_BYTES_MAX {
                bail!("a line has more than {LINE_BYTES_MAX} bytes");
            }
        }
    }
}

/// What another gateway said of replicas, for as long as this is.
struct Said {
    gateway: Arc<Gateway>,
    fleets: watch::Receiver<Arc<Fleet>>,
    /// Of the fleet that was looked at last.
    vitals: HashMap<String, Arc<Vital>>,
    slots: HashMap<String, u32>,
    theirs: HashMap<String, Theirs>,
}

impl Said {
    fn by_a_peer(gateway: &Arc<Gateway>) -> Self {
        gateway.metrics.peers.inc();
        let mut fleets = gateway.fleets();
        fleets.mark_changed();
        Self {
            gateway: Arc::clone(gateway),
            fleets,
            vitals: HashMap::new(),
            slots: HashMap::new(),
            theirs: HashMap::new(),
        }
    }

    fn take(&mut self, line: InFlight) {
        if self.fleets.has_changed().unwrap_or(false) {
            let fleet = self.fleets.borrow_and_update().clone();
            self.vitals = fleet.vitals().map(|(uid, vital)| (uid.to_owned(), Arc::clone(vital))).collect();
            self.slots = fleet.slots().map(|(uid, slot)| (uid.to_owned(), slot)).collect();
            // Of who is known no more nothing has to be known, and who came back is another.
            self.theirs.retain(|uid, theirs| self.vitals.get(uid).is_some_and(|vital| theirs.is_on(vital)));
        }
        for replica in line.replicas {
            let now = Own { requests: replica.requests, prefill_tokens: replica.prefill_tokens };
            // Documents come to one gateway before they come to another: of whom is not known yet is said more soon.
            let Some(vital) = self.vitals.get(&replica.uid) else { continue };
            match now == Own::default() {
                true => drop(self.theirs.remove(&replica.uid)),
                false => self.theirs.entry(replica.uid).or_insert_with(|| Theirs::on(vital)).say(now),
            }
        }
        self.note(line.prompts);
    }

    /// Where these prompts went, others that begin alike may follow.
    fn note(&self, prompts: Vec<SentPrompt>) {
        let now_ms = self.gateway.now_ms();
        for SentPrompt { uid, names, new_bytes } in prompts {
            if let Some(slot) = self.slots.get(&uid) {
                self.gateway.index().note_sent(&Sent { names, new_bytes }, *slot, now_ms);
            }
        }
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        self.gateway.metrics.peers.dec();
    }
}
