//! What the status says of nodes that stand by. Pure.

use stoker_crds::status::StandbyStatus;

use super::{Lack, StandbyPlan};

/// The section of the status; `None` while nothing is to stand by. What the API server refused once stands for as long as `before`, what was written
/// last, is about the same revision.
pub(crate) fn status(
    plan: &StandbyPlan,
    refused: Option<&String>,
    before: Option<&StandbyStatus>,
) -> Option<StandbyStatus> {
    if plan.wanted == 0 {
        return None;
    }
    let before = before.filter(|before| before.revision == plan.revision);
    let refused = refused.or_else(|| before?.refused.as_ref()).cloned();
    Some(StandbyStatus {
        revision: plan.revision.clone(),
        wanted: number(plan.wanted),
        ready: number(plan.ready.len().min(plan.wanted)),
        message: refused.as_deref().map_or_else(|| words(plan), of_refused),
        refused,
    })
}

fn of_refused(refused: &str) -> String {
    format!("no node keeps the model in memory, as the API server refuses the pod for it: {refused}")
}

fn words(plan: &StandbyPlan) -> String {
    let (ready, wanted) = (plan.ready.len().min(plan.wanted), plan.wanted);
    let nodes = if wanted == 1 { "node has" } else { "nodes have" };
    let so_far = format!("{ready} of {wanted} {nodes} the model in memory and room for a replica");
    match &plan.lack {
        None => so_far,
        Some(Lack::Unknown(why)) => format!("{so_far}: {why}"),
        Some(Lack::Room { nodes }) => {
            format!(
                "{so_far}: {nodes} of the nodes that replicas may run on have room; add nodes, or lower scaling.standby"
            )
        }
        Some(Lack::UnderWay { trouble: None }) => format!("{so_far}; others are on their way"),
        Some(Lack::UnderWay { trouble: Some(trouble) }) => format!("{so_far}; {trouble}"),
    }
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_how_many_nodes_are_ready_and_what_the_others_lack() {
        let plan = |ready: usize, lack| StandbyPlan {
            wanted: 2,
            revision: "r".to_owned(),
            ready: ["a", "b"].iter().take(ready).map(|node| (*node).to_owned()).collect(),
            lack,
            ..StandbyPlan::default()
        };
        let said = |ready, lack| words(&plan(ready, lack));
        assert_eq!(said(2, None), "2 of 2 nodes have the model in memory and room for a replica");
        let lack = Lack::Room { nodes: 1 };
        let fix = "1 of the nodes that replicas may run on have room; add nodes, or lower scaling.standby";
        assert_eq!(said(1, Some(lack)), format!("1 of 2 nodes have the model in memory and room for a replica: {fix}"));
        let met = Lack::UnderWay { trouble: Some("b: 401 from the hub".to_owned()) };
        assert!(said(1, Some(met)).ends_with("a replica; b: 401 from the hub"));
        assert_eq!(status(&StandbyPlan::default(), None, None), None);

        let before = status(&plan(0, None), Some(&"no CPU".to_owned()), None);
        let after = status(&plan(0, None), None, before.as_ref()).unwrap();
        assert!(after.message.ends_with("the pod for it: no CPU") && after.refused.is_some(), "{after:?}");
        let other = StandbyStatus { revision: "s".to_owned(), ..after };
        assert_eq!(status(&plan(0, None), None, Some(&other)).unwrap().refused, None);
    }
}
