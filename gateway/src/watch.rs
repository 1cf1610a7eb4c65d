//! Whether replicas that have requests are alive: one that has said nothing for a while is asked. One that does not answer while others do is left
//! behind, and what can go on elsewhere does; one that does not answer for too long has stalled, whatever others do. New requests come back
//! when it answers again. A replica that is silent because it computes answers at once: its server and its engine are different threads.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use hyper::{Request, Uri};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::{
    fleet::Watched,
    gateway::Gateway,
    vital::{Life, Vital},
};

/// How often all are looked at.
const LOOK: Duration = Duration::from_millis(25);
/// Who has requests and says nothing for so long is asked: streams say something with every token.
const QUIET_MS: u64 = 100;
/// Who has had nothing to say for long and lives is asked after a quarter of that time, and this often at least: whoever waits there has waited
/// for as long already.
const RARELY_MS: u64 = 1000;
/// Who does not answer for so long, while others say something, is left behind: with what is above it is known within half a second. A lost
/// packet is sent again sooner (200 ms).
const BEHIND_MS: u64 = 250;
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(100);

/// Watches until the process ends.
pub async fn watch(gateway: Arc<Gateway>) {
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        for together in gateway.fleet().watched() {
            look(&gateway, &together);
        }
    }
}

/// Looks at replicas of which each is measured by the others.
fn look(gateway: &Arc<Gateway>, together: &[Watched<'_>]) {
    let (now_ms, stall_ms) = (gateway.now_ms(), gateway.settings.stall.as_millis() as u64);
    let heard_last_ms = together.iter().map(|watched| watched.vital.heard_ms()).max().unwrap_or_default();
    let mut lacks_a_witness = false;
    for watched in together.iter().filter(|watched| is_waited_for(watched.vital)) {
        let vital = watched.vital;
        let silence = Silence {
            unanswered_ms: vital.unanswered_since_ms().map(|since_ms| now_ms.saturating_sub(since_ms)),
            others_speak: watched.has_left || vital.unanswered_since_ms().is_some_and(|since| heard_last_ms > since),
        };
        let (life, quiet_ms) = (life(silence, stall_ms), now_ms.saturating_sub(vital.heard_ms()));
        if vital.set_life(life) {
            say(watched.address, life, quiet_ms);
        }
        lacks_a_witness |= silence.unanswered_ms.is_some() && !silence.others_speak;
        if quiet_ms >= next_question_ms(now_ms.saturating_sub(vital.said_ms()), stall_ms) {
            ask(gateway, watched, now_ms);
        }
    }
    // Others may have nothing to say because nobody asked them anything.
    let is_idle =
        |watched: &&Watched<'_>| !is_waited_for(watched.vital) && watched.vital.unanswered_since_ms().is_none();
    if lacks_a_witness && let Some(witness) = together.iter().find(is_idle) {
        ask(gateway, witness, now_ms);
    }
}

/// For how long it may be quiet before it is asked, if it has said nothing of an answer for so long.
fn next_question_ms(silent_ms: u64, stall_ms: u64) -> u64 {
    (silent_ms / 4).clamp(QUIET_MS, RARELY_MS).min(stall_ms / 2)
}

fn say(address: Option<&str>, life: Life, quiet_ms: u64) {
    match life {
        Life::Lives => tracing::info!(address, "a replica that did not say that it lives does"),
        Life::LeftBehind => {
            tracing::warn!(address, quiet_ms, "a replica is silent while others are not: its answers go on elsewhere")
        }
        Life::Stalled => tracing::warn!(address, quiet_ms, "a replica has stalled"),
    }
}

fn is_waited_for(vital: &Vital) -> bool {
    vital.has_requests() || vital.life() != Life::Lives
}

/// What is known of a replica's silence.
#[derive(Clone, Copy, Debug)]
struct Silence {
    /// Since it was asked whether it lives, if it has not answered.
    unanswered_ms: Option<u64>,
    /// Whether others have said something since.
    others_speak: bool,
}

/// Whether it lives, if it may say nothing for `stall_ms`.
fn life(silence: Silence, stall_ms: u64) -> Life {
    match silence {
        Silence { unanswered_ms: Some(unanswered_ms), .. } if unanswered_ms + QUIET_MS >= stall_ms => Life::Stalled,
        Silence { unanswered_ms: Some(BEHIND_MS..), others_speak: true } => Life::LeftBehind,
        _ => Life::Lives,
    }
}

/// Asks a replica whether it lives, unless somebody does.
fn ask(gateway: &Arc<Gateway>, watched: &Watched<'_>, now_ms: u64) {
    let question = watched.address.and_then(|address| format!("http://{address}/healthz").parse().ok());
    if let Some(question) = question
        && watched.vital.begin_asking(now_ms)
    {
        tokio::spawn(go_on_asking(Arc::clone(gateway), question, Arc::clone(watched.vital), now_ms));
    }
}

/// Asks until it is heard of, or nobody waits for it any more.
async fn go_on_asking(gateway: Arc<Gateway>, question: Uri, vital: Arc<Vital>, begun_ms: u64) {
    loop {
        if answers(&gateway, &question).await {
            vital.lives(gateway.now_ms().max(begun_ms + 1));
        }
        // Nobody else knows of it: it is not even among those that left.
        let is_forgotten = Arc::strong_count(&vital) == 1;
        if vital.heard_ms() > begun_ms || !is_waited_for(&vital) || is_forgotten {
            break;
        }
        sleep(PAUSE).await;
    }
    vital.end_asking();
}

/// Any answer is one: what it says of its health is the operator's to judge.
async fn answers(gateway: &Gateway, question: &Uri) -> bool {
    let mut request = Request::new(Bytes::new());
    *request.uri_mut() = question.clone();
    matches!(timeout(gateway.settings.stall, gateway.send(request)).await, Ok(Ok(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_nothing_is_said_the_rarer_are_questions() {
        let next = [0, 600, 800, 4000, 60_000].map(|silent_ms| next_question_ms(silent_ms, 3000));
        assert_eq!(next, [100, 150, 200, 1000, 1000]);
        assert_eq!(next_question_ms(60_000, 150), 75, "twice in the time that it may say nothing");
    }

    #[test]
    fn who_is_silent_while_others_speak_is_left_behind_and_who_is_silent_for_long_has_stalled() {
        for (unanswered_ms, others_speak, expected) in [
            (None, true, Life::Lives),
            (Some(249), true, Life::Lives),
            (Some(250), true, Life::LeftBehind),
            (Some(250), false, Life::Lives),
            (Some(2899), false, Life::Lives),
            (Some(2900), false, Life::Stalled),
            (Some(2900), true, Life::Stalled),
        ] {
            let silence = Silence { unanswered_ms, others_speak };
            assert_eq!(life(silence, 3000), expected, "{silence:?}");
        }
    }
}
