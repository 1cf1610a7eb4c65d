//! Tells other gateways what this one has on replicas and what it sent there, as soon as that changes: they know it after a network's tenth of
//! a millisecond, where reports of replicas are up to two seconds old, and a replica says what it holds when it has computed it.

use std::{collections::HashMap, convert::Infallible, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use stoker_crds::in_flight::{ALIVE_SECONDS, InFlight, ReplicaInFlight, SentPrompt};
use stoker_routing::Own;
use tokio::{
    sync::{
        broadcast::{Receiver, error::TryRecvError},
        mpsc::{self, Sender},
    },
    time::{Instant, sleep, sleep_until},
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};

use crate::gateway::Gateway;

/// From one line to the next on the average: where more changes, several changes are one line.
const PACE: Duration = Duration::from_millis(1);
/// Lines that were not needed for so long may be written later, at once.
const CREDIT: Duration = Duration::from_millis(50);

/// Streams at the same time: a look at all replicas is made for each line.
pub(crate) const READERS_MAX: usize = 32;

/// What this gateway has in flight, as it changes.
pub async fn stream(State(gateway): State<Arc<Gateway>>) -> Response {
    let place = Arc::clone(&gateway.tellings).try_acquire_owned().ok().filter(|_| !gateway.leaves());
    let Some(place) = place else {
        return (StatusCode::SERVICE_UNAVAILABLE, "it is leaving, or tells as many as it can").into_response();
    };
    // Whoever reads slowly is told the newest when it has read.
    let (lines, told) = mpsc::channel(1);
    tokio::spawn(async move {
        tell(&gateway, &lines).await;
        drop(place);
    });
    let body = Body::from_stream(ReceiverStream::new(told).map(Ok::<Bytes, Infallible>));
    ([(CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// Until nobody listens, or the gateway leaves.
async fn tell(gateway: &Gateway, lines: &Sender<Bytes>) {
    let (mut told, mut is_due, mut next) = (HashMap::new(), true, Instant::now());
    let mut sent = gateway.sent();
    loop {
        let changed = gateway.in_flight_changes();
        let replicas = news(&mut told, gateway.fleet().vitals().map(|(uid, vital)| (uid, vital.own())));
        let prompts = since(&mut sent);
        if is_due || !replicas.is_empty() || !prompts.is_empty() {
            let Some(line) = line(InFlight { gateway: gateway.id.clone(), replicas, prompts }) else { return };
            if lines.send(line).await.is_err() {
                return;
            }
            next = next.max(Instant::now() - CREDIT) + PACE;
        }
        tokio::select! {
            () = changed => is_due = false,
            () = sleep(Duration::from_secs(ALIVE_SECONDS)) => is_due = true,
            () = gateway.leaving() => return,
            () = lines.closed() => return,
        }
        sleep_until(next).await;
    }
}

fn line(said: InFlight) -> Option<Bytes> {
    let mut line = serde_json::to_vec(&said).ok()?;
    line.push(b'\n');
    Some(line.into())
}

/// Prompts that were sent since they were looked at last. Those that were too many to keep others hear of when replicas hold them.
fn since(sent: &mut Receiver<SentPrompt>) -> Vec<SentPrompt> {
    let mut prompts = Vec::new();
    loop {
        match sent.try_recv() {
            Ok(prompt) => prompts.push(prompt),
            Err(TryRecvError::Lagged(_)) => {}
            Err(TryRecvError::Empty | TryRecvError::Closed) => return prompts,
        }
    }
}

/// What is other than it was told, and is told now.
fn news<'a>(told: &mut HashMap<String, Own>, now: impl Iterator<Item = (&'a str, Own)>) -> Vec<ReplicaInFlight> {
    let now: HashMap<&str, Own> = now.filter(|(_, own)| *own != Own::default()).collect();
    let gone = told.keys().filter(|uid| !now.contains_key(uid.as_str())).map(|uid| (uid.clone(), Own::default()));
    let other =
        now.iter().filter(|(uid, own)| told.get(**uid) != Some(own)).map(|(uid, own)| ((*uid).to_owned(), *own));
    let news: Vec<(String, Own)> = gone.chain(other).collect();
    for (uid, own) in &news {
        match *own == Own::default() {
            true => told.remove(uid),
            false => told.insert(uid.clone(), *own),
        };
    }
    let said = |(uid, Own { requests, prefill_tokens })| ReplicaInFlight { uid, requests, prefill_tokens };
    news.into_iter().map(said).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_as_it_was_told_is_not_told_again() {
        let own = |requests| Own { requests, prefill_tokens: 10 };
        let mut told = HashMap::new();
        let mut look = |now: &[(&'static str, Own)]| {
            let mut news: Vec<_> =
                news(&mut told, now.iter().copied()).into_iter().map(|new| (new.uid, new.requests)).collect();
            news.sort();
            news
        };
        let none: Vec<(String, u32)> = vec![];
        assert_eq!(look(&[("a", Own::default())]), none);
        assert_eq!(look(&[("a", own(1)), ("b", own(2))]), [("a".to_owned(), 1), ("b".to_owned(), 2)]);
        assert_eq!(look(&[("a", own(1)), ("b", own(3))]), [("b".to_owned(), 3)]);
        assert_eq!(look(&[("b", own(3))]), [("a".to_owned(), 0)], "also of who is known no more");
        assert_eq!(look(&[("b", Own { requests: 3, prefill_tokens: 0 })]), [("b".to_owned(), 3)]);
        assert_eq!(look(&[("b", Own::default())]), [("b".to_owned(), 0)]);
        assert_eq!(look(&[]), none);
    }
}
