//! The dearest parts, which `make test` leaves to `make check`: one of twelve takes a third of what all take of cores. What they look at end to end and for
//! long has shorter tests that stay: of the same code by itself, and of the same words to the system.

use anyhow::{Result, bail};

use crate::part::Part;

/// Titles of parts that take six seconds of a core or more and have shorter ones beside them, but for what a change is most often about: the engine, an
/// agent's API and its clients, the life of a deployment, scaling's decisions.
const DEAR: [&str; 34] = [
    "cli/tests/autoscaling_page.rs",
    "explore/tests/every_state.rs",
    "quantize/tests/checkpoints.rs",
    "sim/tests/warm.rs",
    "tests/tests/agent_abuse.rs abuse_costs_no_answer_and_leaves_no_memory_behind",
    "tests/tests/agent_clients.rs litellm_and_langchain_work_through_the_gateway",
    "tests/tests/chart.rs the_operator_may_do_what_the_page_says_and_nothing_else",
    "tests/tests/cluster_demo.rs every_example_is_accepted_and_served",
    "tests/tests/cluster_node.rs",
    "tests/tests/control_plane_lent.rs the_next_one_finds_it_as_new",
    "tests/tests/fault_suite.rs a_node_that_takes_no_pods_falls_silent_and_counts_as_lost",
    "tests/tests/fetch_bucket.rs killed_twenty_times_it_brings_the_right_bytes_and_asks_for_none_that_it_has",
    "tests/tests/fetch_registry.rs killed_twenty_times_it_brings_the_right_bytes_and_asks_for_none_that_it_has",
    "tests/tests/gateway_events.rs whatever_comes_instead_of_events_breaks_nothing_and_the_whole_is_asked_for",
    "tests/tests/gateway_operator.rs clients_of_the_gateway_notice_no_roll_no_scale_down_and_no_dead_operator",
    "tests/tests/gateway_resume.rs whoever_lost_its_gateway_asks_another_one_again_and_gets_the_same_answer",
    "tests/tests/gateway_services.rs services_lead_to_gateways_while_there_are_any_and_nobody_notices",
    "tests/tests/operator_canary.rs",
    "tests/tests/operator_canary_weights.rs weights_with_much_noise_are_stopped_by_prompts_and_those_with_little_go_on",
    "tests/tests/operator_faults.rs after_many_outages_in_a_row_the_operator_acts_within_seconds",
    "tests/tests/operator_faults.rs kills_at_random_moments_end_in_the_same_state",
    "tests/tests/operator_kueue.rs a_fleet_lives_within_what_a_queue_gives_it",
    "tests/tests/operator_node_loss.rs streams_of_a_lost_node_go_on_on_another",
    "tests/tests/operator_process.rs one_operator_leads_and_another_takes_over",
    "tests/tests/operator_rolls.rs whatever_moves_replicas_every_answer_is_whole",
    "tests/tests/pages_demo.rs the_demo_is_watched_under_load_explained_harmed_rolled_and_talked_to",
    "tests/tests/pages_fleet.rs a_load_step_its_decision_a_killed_pod_and_a_roll_are_seen_in_a_browser",
    "tests/tests/pages_fleet.rs a_page_left_open_for_a_day_shows_the_last_look_and_does_not_grow",
    "tests/tests/pages_playground.rs nobody_is_kept_out_in_any_theme_or_width",
    "tests/tests/pages_report.rs reports_stand_by_themselves",
    "tests/tests/pages_walk.rs a_new_user_finds_what_runs_why_and_how_to_talk_to_it",
    "tests/tests/scaling_control.rs",
    "tests/tests/scaling_load.rs a_load_step_takes_one_replica_to_three_and_its_end_takes_them_back_without_cutting_a_stream",
    "tests/tests/scaling_load.rs a_mix_that_preempts_scales_up_although_mean_kv_is_under_target",
];

/// The parts without the dear ones, each of which must be among them: one that has another name now would be run unnoticed.
pub(crate) fn leave_out(parts: Vec<Part>) -> Result<Vec<Part>> {
    if let Some(gone) = DEAR.iter().find(|title| !parts.iter().any(|part| part.title == **title)) {
        bail!("no part is {gone:?} any more: take it out of tools/suite/src/dear.rs, or give it its new name there");
    }
    Ok(parts.into_iter().filter(|part| !DEAR.contains(&part.title.as_str())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::Lane;

    fn part(title: &str) -> Part {
        let (title, folder) = (title.to_owned(), "/w".into());
        Part { title, lane: Lane::Behind, program: "/t".into(), arguments: Vec::new(), folder }
    }

    #[test]
    fn the_dear_ones_are_left_out_and_must_be_there() {
        let mut parts: Vec<Part> = DEAR.iter().map(|title| part(title)).collect();
        parts.insert(3, part("fit/tests/periods.rs"));
        let left = leave_out(parts.clone()).unwrap();
        assert_eq!(left, [part("fit/tests/periods.rs")]);
        parts.remove(0);
        assert!(leave_out(parts).unwrap_err().to_string().contains(DEAR[0]));
    }
}
