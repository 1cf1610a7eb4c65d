//! Agents of another release than the operator: how they show, and what is said of them. Pure.
//!
//! One that serves is left to itself: it counts as serving, nothing goes down for it, and it leaves as one that cannot be reached.

use stoker_crds::{
    conditions,
    contract::{ADMIN_PORT, CONFIG_FILE},
};
use stoker_replica::{OtherRelease, Replica, Stage, Trouble};

/// A kubelet's word for a container that ends again and again.
pub(crate) const CRASHES: &str = "CrashLoopBackOff";
/// What helps.
const FIX: &str = "let pod.image name an agent of the operator's release, or leave it out";

/// What is to be said of a replica that serves: its agent cannot be read, or no other pod would come to serve as it does.
pub(crate) fn of_serving(replica: &Replica, wanted_revision: &str) -> Option<Trouble> {
    let of = replica.reading.other_release()?;
    let is_operated = of == OtherRelease::Older { is_read: true };
    let stays = replica.is_live() && replica.drain_since().is_none();
    let goes_anyway = is_operated && replica.pod.revision != wanted_revision;
    (stays && replica.may_hold_streams() && !goes_anyway).then(|| named(replica, trouble(of)))
}

/// Why a replica that runs, again and again, does not come to serve, if it is for its agent's release.
pub(crate) fn of_starting(replica: &Replica) -> Option<Trouble> {
    let runs = match &replica.pod.stage {
        Stage::Starting => true,
        Stage::Blocked(trouble) => trouble.reason == CRASHES,
        _ => false,
    };
    replica.reading.other_release().filter(|_| runs).map(trouble)
}

/// Why a process ended that did not know what its operator told it, an argument or a field of its configuration; by its last words.
pub(crate) fn of_ended(last_words: &str) -> Option<Trouble> {
    let has = |line: &str, words: [&str; 2]| words.iter().any(|words| line.contains(words));
    let is_argument = |line: &str| has(line, ["unexpected argument", "unrecognized subcommand"]);
    let is_field = |line: &str| line.contains(CONFIG_FILE) && has(line, ["unknown field", "unknown variant"]);
    let not_known = last_words.lines().find(|line| is_argument(line) || is_field(line))?;
    let not_known = not_known.trim().trim_start_matches("error: ");
    let message = format!(
        "its agent is of an older release than this operator and ends over what it is told: {not_known}; {FIX}"
    );
    Some(Trouble::new(conditions::REASON_OLDER_AGENT, message))
}

fn trouble(of: OtherRelease) -> Trouble {
    match of {
        OtherRelease::Older { is_read: false } => Trouble::new(
            conditions::REASON_OLDER_AGENT,
            format!(
                "its agent is of an older release than this operator, or port {ADMIN_PORT} is closed to it: it takes clients and cannot be \
                 read, so nothing goes down for it and only SIGTERM drains it; {FIX}"
            ),
        ),
        OtherRelease::Older { is_read: true } => Trouble::new(
            conditions::REASON_OLDER_AGENT,
            format!(
                "its agent is of an older release than this operator: a pod that is made of its image now does not come to serve; {FIX}"
            ),
        ),
        OtherRelease::Newer => Trouble::new(
            conditions::REASON_NEWER_AGENT,
            format!(
                "its agent is of a newer release than this operator, so what it says is not believed and nothing goes down for it; upgrade \
                 the operator, or {FIX}"
            ),
        ),
    }
}

fn named(replica: &Replica, Trouble { reason, message }: Trouble) -> Trouble {
    Trouble { reason, message: format!("pod {}: {message}", replica.pod.name) }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use stoker_crds::{
        contract::{DrainSettings, LoadReport, PROTOCOL},
        intent::Want,
    };
    use stoker_replica::{Intent, Reading};

    use super::*;
    use crate::observe::fixture::observed_pod;

    const UNREAD: &str = "cannot be read";
    const NEVER_SERVES: &str = "does not come to serve";
    const NEWER: &str = "upgrade the operator";

    fn replica(stage: Stage, reading: Reading) -> Replica {
        Replica { pod: observed_pod(stage), reading, intent: None }
    }

    fn speaks(protocol: u32) -> Reading {
        Reading::of(&LoadReport { protocol, ..LoadReport::idle(10) })
    }

    fn crashed() -> Stage {
        Stage::Blocked(Trouble::new(CRASHES, "the agent ended with exit code 0, 3 restarts"))
    }

    #[test]
    fn one_that_serves_is_named_if_it_cannot_be_read_or_nobody_would_follow_it() {
        let said = |reading, wanted| of_serving(&replica(Stage::Serving, reading), wanted);
        for (reading, wanted, words) in [
            (speaks(PROTOCOL), "a", None),
            (Reading::missing(), "a", None),
            (Reading::default(), "a", None),
            (speaks(0), "a", Some(NEVER_SERVES)),
            // It is read, obeys and is replaced.
            (speaks(0), "b", None),
            (Reading::of_older_agent(), "a", Some(UNREAD)),
            (Reading::of_older_agent(), "b", Some(UNREAD)),
            (speaks(PROTOCOL + 1), "b", Some(NEWER)),
        ] {
            let trouble = said(reading.clone(), wanted);
            assert_eq!(trouble.is_some(), words.is_some(), "{reading:?} {trouble:?}");
            if let Some((trouble, words)) = trouble.zip(words) {
                assert!(
                    trouble.message.starts_with("pod chat-a-0: ") && trouble.message.contains(words),
                    "{trouble:?}"
                );
                assert!(trouble.message.contains("pod.image"), "{trouble:?}");
                assert_eq!(trouble.reason, if words == NEWER { "NewerAgent" } else { "OlderAgent" });
            }
        }
    }

    #[test]
    fn one_that_leaves_or_does_not_serve_is_not_named_among_those_that_do() {
        let older = || replica(Stage::Serving, Reading::of_older_agent());
        let want = Want::Drain(DrainSettings::default());
        let leaves = Replica { intent: Some(Intent { number: 1, want, since: Timestamp::UNIX_EPOCH }), ..older() };
        assert_eq!(of_serving(&leaves, "b"), None);
        for stage in [Stage::Leaving, Stage::Starting, crashed()] {
            assert_eq!(of_serving(&replica(stage, Reading::of_older_agent()), "b"), None);
        }
    }

    #[test]
    fn one_that_does_not_come_to_serve_says_what_its_agent_lacks() {
        for (stage, reading, words) in [
            (crashed(), speaks(0), Some(NEVER_SERVES)),
            (crashed(), Reading::of_older_agent(), Some(UNREAD)),
            (crashed(), speaks(PROTOCOL), None),
            (crashed(), Reading::default(), None),
            (Stage::Starting, Reading::of_older_agent(), Some(UNREAD)),
            (Stage::Starting, speaks(0), Some(NEVER_SERVES)),
            (Stage::Starting, speaks(PROTOCOL + 1), Some(NEWER)),
            (Stage::Starting, speaks(PROTOCOL), None),
            (Stage::Starting, Reading::missing(), None),
            (Stage::Blocked(Trouble::new("ErrImagePull", "no such image")), Reading::of_older_agent(), None),
        ] {
            let trouble = of_starting(&replica(stage.clone(), reading));
            let found = trouble.as_ref().map(|trouble| trouble.message.as_str());
            assert_eq!(found.is_some(), words.is_some(), "{stage:?}: {found:?}");
            assert!(words.is_none_or(|words| found.is_some_and(|found| found.contains(words))), "{stage:?}: {found:?}");
        }
    }

    #[test]
    fn one_that_ended_is_older_if_it_did_not_know_what_it_was_told() {
        let clap = "error: unexpected argument '--operator-keys' found\n\nUsage: stoker-agent [OPTIONS]";
        let fetch = "error: unrecognized subcommand 'fetch'\n\nFor more information, try '--help'.";
        let field = "configuration /etc/stoker/agent.json: `engine`: unknown field `itlTargetMs`, expected `threads`";
        let ended = |words: &str| of_ended(words).map(|trouble| trouble.message);
        for (words, not_known) in [
            (clap, "is told: unexpected argument '--operator-keys' found; let pod.image"),
            (fetch, "is told: unrecognized subcommand 'fetch'; let pod.image"),
            (field, "is told: configuration /etc/stoker/agent.json: `engine`: unknown field `itlTargetMs`"),
        ] {
            assert!(ended(words).is_some_and(|message| message.contains(not_known)), "{:?}", ended(words));
        }
        for words in
            ["", "no memory", "/models/config.json: unknown field `rope`", "configuration /etc/stoker/agent.json: gone"]
        {
            assert_eq!(ended(words), None);
        }
    }
}
