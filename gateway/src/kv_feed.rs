//! Follows what replicas say of their prefix caches: one question at a time to each that serves, which waits there for what is new.
//! What came out of order, from another start or not at all is asked for anew as a whole; while nobody answers, what was sent is all
//! that is known. No request waits for any of it.

use std::{collections::HashSet, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::Request;
use stoker_crds::{
    endpoints::EndpointState,
    kv_events::{KV_EVENTS_PATH, KvEvent, KvEvents, WAIT_SECONDS_MAX},
};
use stoker_routing::Hearing;
use tokio::{
    task::yield_now,
    time::{Instant, sleep, timeout},
};

use crate::{fleet::Fleet, followed::follow_each, gateway::Gateway};

/// More than the wait that is asked for.
const TIMEOUT: Duration = Duration::from_secs(WAIT_SECONDS_MAX + 5);
/// All that the largest cache holds has less.
const ANSWER_BYTES_MAX: usize = 64 << 20;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Agents that know no such question are asked this often: they may be replaced in place.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// What a replica said last is believed for so long while it does not answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Events that are taken in while no request is routed.
const AT_A_TIME: usize = 256;

/// A replica that says what it holds.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Teller {
    uid: String,
    slot: u32,
    address: String,
}

/// Follows every replica that serves, for ever.
pub async fn follow(gateway: Arc<Gateway>) {
    let listen = |teller| Listener { gateway: Arc::clone(&gateway), teller, known: None }.listen();
    follow_each(gateway.fleets(), tellers, listen).await;
}

fn tellers(fleet: &Fleet) -> HashSet<Teller> {
    let members = fleet.deployments().iter().flat_map(|deployment| &deployment.members);
    let serving = members.filter(|member| member.state == EndpointState::Serving);
    let teller = |member: &crate::fleet::Member| {
        Some(Teller { uid: member.uid.clone(), slot: member.slot, address: member.events.clone()? })
    };
    serving.filter_map(teller).collect()
}

/// What is known of a replica's events.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    start_id: String,
    number: u64,
    hearing: Hearing,
}

/// What an answer is, beside what is known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum News {
    /// All that is held.
    Whole,
    /// What follows.
    More,
    /// Something else: what is known says nothing any more.
    Gap,
}

fn judge(known: Option<&Known>, told: &KvEvents) -> News {
    let follows = |known: &Known| known.start_id == told.start_id && known.number == told.after;
    let is_counted = told.number.checked_sub(told.after) == Some(told.events.len() as u64);
    match known {
        _ if told.is_whole => News::Whole,
        Some(known) if follows(known) && is_counted => News::More,
        _ => News::Gap,
    }
}

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random::<f64>() / 2.0 + 0.5)
}

/// Listens to one replica. What it said is known no more when this is dropped.
struct Listener {
    gateway: Arc<Gateway>,
    teller: Teller,
    known: Option<Known>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.forget();
    }
}

impl Listener {
    async fn listen(mut self) {
        let (mut pause, mut heard, mut is_silent) = (FIRST_PAUSE, Instant::now(), false);
        // Gateways and replicas begin together: not all questions do.
        sleep(FIRST_PAUSE.mul_f64(rand::random())).await;
        loop {
            match self.ask().await {
                Ok(told) => {
                    (heard, is_silent) = (Instant::now(), false);
                    let (news, is_empty) = (judge(self.known.as_ref(), &told), told.events.is_empty());
                    self.take(told).await;
                    pause = match news {
                        News::More => FIRST_PAUSE,
                        News::Whole => pause,
                        News::Gap => (pause * 2).min(LONGEST_PAUSE),
                    };
                    // Whoever does not wait with an answer, or has nothing follow, is not asked the faster for it.
                    if is_empty || news != News::More {
                        sleep(jittered(pause)).await;
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_silent, true) {
                        let address = &self.teller.address;
                        tracing::debug!(address, error = format!("{error:#}"), "a replica does not say what it holds");
                    }
                    if heard.elapsed() > PATIENCE {
                        self.forget();
                    }
                    sleep(jittered(pause)).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    async fn ask(&self) -> anyhow::Result<KvEvents> {
        let query = self
            .known
            .as_ref()
            .map(|known| format!("?start={}&since={}&wait={WAIT_SECONDS_MAX}", known.start_id, known.number));
        let uri = format!("http://{}{KV_EVENTS_PATH}{}", self.teller.address, query.unwrap_or_default());
        let request = Request::get(uri).body(Bytes::new()).context("make a request")?;
        let answered = timeout(TIMEOUT, async {
            let response = self.gateway.send(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
            anyhow::Ok((status, body.map_err(|error| anyhow::anyhow!("read the answer: {error}"))?.to_bytes()))
        });
        let (status, body) = answered.await.context("no answer in time")??;
        if !status.is_success() {
            bail!("answered {status}");
        }
        serde_json::from_slice(&body).context("read events")
    }

    async fn take(&mut self, told: KvEvents) {
        let news = judge(self.known.as_ref(), &told);
        let hearing = match (news, &self.known) {
            (News::Whole, _) => self.hear(),
            (News::More, Some(known)) => Some(known.hearing),
            (News::Gap, _) | (News::More, None) => None,
        };
        match news {
            News::Whole => self.count("whole", 1),
            News::Gap => self.count("gap", 1),
            News::More => {
                let n_stored = told.events.iter().filter(|event| matches!(event, KvEvent::Stored(_))).count();
                self.count("stored", n_stored);
                self.count("removed", told.events.len() - n_stored);
            }
        }
        let Some(hearing) = hearing else { return self.forget() };
        // Before it is taken in: whoever ends this in the middle has all of it forgotten.
        self.known = Some(Known { start_id: told.start_id, number: told.number, hearing });
        for events in told.events.chunks(AT_A_TIME) {
            if !self.take_some(&hearing, events) {
                return self.forget();
            }
            yield_now().await;
        }
    }

    /// `None`: its slot is another's by now.
    fn hear(&self) -> Option<Hearing> {
        let Teller { uid, slot, .. } = &self.teller;
        let mut index = self.gateway.index();
        let fleet = self.gateway.fleet();
        let mut members = fleet.deployments().iter().flat_map(|deployment| &deployment.members);
        let is_there = members.any(|member| member.uid == *uid && member.slot == *slot);
        is_there.then(|| index.hear(*slot))
    }

    /// `false`: it was forgotten meanwhile, as the replica has begun anew.
    fn take_some(&self, hearing: &Hearing, events: &[KvEvent]) -> bool {
        let mut index = self.gateway.index();
        for event in events {
            match event {
                KvEvent::Stored(name) => index.store(hearing, *name),
                KvEvent::Removed(name) => index.remove(hearing, *name),
            }
        }
        index.goes_on(hearing)
    }

    fn count(&self, kind: &str, n: usize) {
        self.gateway.metrics.kv_events.with_label_values(&[kind]).inc_by(n as u64);
    }

    fn forget(&mut self) {
        if let Some(known) = self.known.take() {
            self.gateway.index().hear_no_more(&known.hearing);
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_routing::PrefixIndex;

    use super::*;

    #[test]
    fn only_what_follows_is_taken_for_more() {
        let known = Known { start_id: "s".into(), number: 5, hearing: PrefixIndex::bounded(1).hear(0) };
        let told = |start_id: &str, after, number, n_events| KvEvents {
            start_id: start_id.into(),
            after,
            number,
            is_whole: false,
            events: vec![KvEvent::Stored(1); n_events],
        };
        for (told, expected) in [
            (told("s", 5, 7, 2), News::More),
            (told("s", 5, 5, 0), News::More),
            (told("s", 4, 6, 2), News::Gap),
            (told("s", 6, 8, 2), News::Gap),
            (told("s", 5, 7, 1), News::Gap),
            (told("s", 5, 3, 0), News::Gap),
            (told("t", 5, 7, 2), News::Gap),
            (KvEvents { is_whole: true, ..told("t", 0, 7, 2) }, News::Whole),
        ] {
            assert_eq!(judge(Some(&known), &told), expected, "{told:?}");
        }
        assert_eq!(judge(None, &told("s", 5, 7, 2)), News::Gap);
        assert_eq!(judge(None, &told("s", 0, 0, 0)), News::Gap);
    }
}
