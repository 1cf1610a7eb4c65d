//! What is said of models that come onto nodes before replicas are drained for them. Pure.

use stoker_crds::{conditions::PROGRESSING, status::PrefetchStatus};

use crate::{
    rollout::prefetch::{PrefetchPlan, PrefetchState},
    status::Round,
    verdict::Verdict,
};

/// The section of the status; `None` while nothing is fetched ahead. What was refused once stands for as long as it is there.
pub(crate) fn status(round: &Round<'_>) -> Option<PrefetchStatus> {
    let plan = Some(&round.plan.pods.prefetch).filter(|plan| !plan.nodes.is_empty())?;
    let rollout = round.observed.deployment.status.as_ref().and_then(|status| status.rollout.as_ref());
    let before =
        rollout.and_then(|rollout| rollout.prefetch.as_ref()).filter(|before| before.revision == plan.revision);
    let refused = round.applied.prefetch_refused.clone().or_else(|| before?.refused.clone());
    let done = plan.nodes.values().filter(|state| **state == Some(PrefetchState::Done)).count();
    Some(PrefetchStatus {
        revision: plan.revision.clone(),
        nodes: number(plan.nodes.len()),
        done: number(done),
        message: refused.as_deref().map_or_else(|| words(plan, done), of_refused),
        refused,
    })
}

/// What goes on says what it waits for.
pub(crate) fn said_with(type_: &str, mut verdict: Verdict, prefetch: Option<&PrefetchStatus>) -> Verdict {
    if let Some(prefetch) = prefetch.filter(|_| type_ == PROGRESSING && verdict.value) {
        verdict.trouble.message = format!("{}; {}", verdict.trouble.message, prefetch.message);
    }
    verdict
}

fn of_refused(refused: &str) -> String {
    format!("no node fetches the model before its replica goes, as the API server refuses the pod for it: {refused}")
}

fn words(plan: &PrefetchPlan, done: usize) -> String {
    let nodes = if plan.nodes.len() == 1 { "node has" } else { "nodes have" };
    let so_far = format!("{done} of {} {nodes} the model that comes", plan.nodes.len());
    let waits = match plan.awaited.len() {
        0 => String::new(),
        1 => ", and the replica of 1 stays until then".to_owned(),
        awaited => format!(", and replicas of {awaited} stay until then"),
    };
    let trouble = plan.nodes.iter().find_map(|(node, state)| match state {
        Some(PrefetchState::Fetching { trouble: Some(trouble) } | PrefetchState::Failed { trouble }) => {
            Some(format!("; {node}: {trouble}"))
        }
        Some(PrefetchState::Fetching { trouble: None } | PrefetchState::Done) | None => None,
    });
    format!("{so_far}{waits}{}", trouble.unwrap_or_default())
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn words_say_how_many_nodes_have_it_who_stays_and_what_a_fetch_met() {
        let met = |trouble: &str| Some(PrefetchState::Fetching { trouble: Some(trouble.to_owned()) });
        let said = |nodes: [Option<PrefetchState>; 2], awaited: &[&str]| {
            let nodes = BTreeMap::from_iter(["a", "b"].map(str::to_owned).into_iter().zip(nodes));
            let awaited: BTreeSet<String> = awaited.iter().map(|node| (*node).to_owned()).collect();
            let done = nodes.values().filter(|state| **state == Some(PrefetchState::Done)).count();
            words(&PrefetchPlan { nodes, awaited, ..PrefetchPlan::default() }, done)
        };
        assert_eq!(
            said([None, met("401 from the hub")], &["a", "b"]),
            "0 of 2 nodes have the model that comes, and replicas of 2 stay until then; b: 401 from the hub"
        );
        assert_eq!(
            said([Some(PrefetchState::Done), Some(PrefetchState::Fetching { trouble: None })], &["b"]),
            "1 of 2 nodes have the model that comes, and the replica of 1 stays until then"
        );
        let failed = Some(PrefetchState::Failed { trouble: "Evicted".to_owned() });
        assert_eq!(
            said([Some(PrefetchState::Done), failed], &[]),
            "1 of 2 nodes have the model that comes; b: Evicted"
        );
    }
}
