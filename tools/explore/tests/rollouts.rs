//! Changes of whole fleets by virtual time: what they promise, and that the page says what comes out.

use std::{fs, sync::LazyLock};

use stoker_explore::rollouts::{Case, Fault, Outcome, outcomes, table};

const HOUR: i64 = 3600;

static OUTCOMES: LazyLock<Vec<(Case, Outcome)>> = LazyLock::new(outcomes);

#[test]
fn every_change_ends_no_stream_is_cut_and_no_more_is_missing_than_may_be() {
    for (case, outcome) in &*OUTCOMES {
        assert!(outcome.done.is_some(), "{case:?}: {outcome:?}");
        assert_eq!(outcome.streams_cut, 0, "{case:?}");
        let lost = if matches!(case.fault, Fault::NodeLost { .. }) { 4 } else { 0 };
        let replacing = case.rule.of(case.replicas);
        assert!(outcome.fewest_serving + replacing.max_unavailable + lost >= case.replicas, "{case:?}: {outcome:?}");
        assert!(outcome.most_pods <= case.replicas + replacing.max_surge + lost, "{case:?}: {outcome:?}");
    }
}

#[test]
fn a_hundred_replicas_that_start_in_five_minutes_are_replaced_within_the_hour_on_a_full_cluster() {
    let (case, outcome) = OUTCOMES.iter().find(|(case, _)| case.name == "a full cluster").expect("it is there");
    assert_eq!((case.replicas, case.room, case.start_seconds), (100, 100, 300));
    assert!(outcome.done.is_some_and(|seconds| seconds < HOUR) && outcome.fewest_serving >= 90, "{outcome:?}");
}

#[test]
fn a_bad_revision_costs_one_replica_whatever_may_be_missing() {
    let bad: Vec<_> = OUTCOMES.iter().filter(|(_, outcome)| outcome.most_bad.is_some()).collect();
    assert_eq!(bad.len(), 2);
    for (case, outcome) in bad {
        assert_eq!((outcome.most_bad, outcome.fewest_serving), (Some(1), case.replicas - 1), "{case:?}");
    }
}

#[test]
fn the_page_has_the_table_that_comes_out() {
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rollouts.md")).expect("read the page");
    let table = table(&OUTCOMES);
    assert!(
        page.contains(&table),
        "docs/rollouts.md: put in what `cargo run -p stoker-explore --bin stoker-rollouts` prints\n{table}"
    );
}
