//! Whether replicas that have requests are alive: one that has said nothing for a while is asked, and one that does not answer for
//! too long has stalled. Its requests go elsewhere, and new ones come back when it answers again. A replica that is silent because it
//! computes answers at once: its server and its engine are different threads.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use hyper::{Request, Uri};

use crate::{
    fleet::{Member, Vital},
    gateway::Gateway,
};

/// Parts of the time after which a replica has stalled: for one of them it may be silent before it is asked.
const PARTS: u32 = 3;

/// Watches until the process ends.
pub async fn watch(gateway: Arc<Gateway>) {
    let silence = gateway.settings.stall / PARTS;
    let mut interval = tokio::time::interval(silence / 2);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let (fleet, now_ms) = (gateway.fleet(), gateway.now_ms());
        for member in fleet.deployments().iter().flat_map(|deployment| &deployment.members) {
            let is_silent = now_ms.saturating_sub(member.vital.heard_ms()) > silence.as_millis() as u64;
            if is_silent && member.vital.has_requests() && member.vital.begin_asking(now_ms) {
                tokio::spawn(ask(Arc::clone(&gateway), question_of(member), Arc::clone(&member.vital)));
            }
        }
    }
}

fn question_of(member: &Member) -> Option<Uri> {
    format!("http://{}/healthz", member.address.as_deref()?).parse().ok()
}

/// Asks until it is heard of, or nobody waits for it any more.
async fn ask(gateway: Arc<Gateway>, question: Option<Uri>, vital: Arc<Vital>) {
    let Some(question) = question else { return vital.end_asking() };
    let begun_ms = gateway.now_ms();
    let limit = gateway.settings.stall * (PARTS - 1) / PARTS;
    let pause = limit / 8;
    while vital.heard_ms() <= begun_ms && (vital.has_requests() || vital.is_stalled()) {
        if answers(&gateway, &question, limit).await {
            vital.heard(gateway.now_ms().max(begun_ms + 1));
            break;
        }
        let asked = Duration::from_millis(gateway.now_ms().saturating_sub(begun_ms));
        if asked >= limit && vital.heard_ms() <= begun_ms && vital.set_stalled(true) {
            tracing::warn!(%question, asked_ms = asked.as_millis() as u64, "a replica has stalled: its requests go elsewhere");
        }
        if asked > 100 * limit {
            break;
        }
        tokio::time::sleep(pause).await;
    }
    if vital.heard_ms() > begun_ms && vital.set_stalled(false) {
        tracing::info!(%question, "a replica that had stalled answers again");
    }
    vital.end_asking();
}

/// Any answer is one: what it says of its health is the operator's to judge.
async fn answers(gateway: &Gateway, question: &Uri, limit: Duration) -> bool {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = question.clone();
    matches!(tokio::time::timeout(limit, gateway.send(request)).await, Ok(Ok(_)))
}
