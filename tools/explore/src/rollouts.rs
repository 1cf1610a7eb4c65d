//! How changes of whole fleets go, by virtual time: the operator's own decisions against a model of nodes, agents and streams, from the
//! change until nothing moves any more. Deterministic: nothing is drawn that is not drawn from a replica's number.

mod cases;
mod fleet;

use std::fmt::Write as _;

pub use self::{
    cases::{Case, Fault, cases},
    fleet::Outcome,
};

/// All of the table, and how they go.
pub fn outcomes() -> Vec<(Case, Outcome)> {
    cases().into_iter().map(|case| (case.clone(), case.run())).collect()
}

/// The table of docs/rollouts.md.
pub fn table(outcomes: &[(Case, Outcome)]) -> String {
    let mut text = String::from(
        "| Case | Replicas | Room | `rollout` | Done after | Serving, at least | Pods, at most | Of a bad revision | Streams cut |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for (case, outcome) in outcomes {
        let Case { name, replicas, room, said, .. } = case;
        let Outcome { fewest_serving, most_pods, most_bad, streams_cut, .. } = *outcome;
        let done = outcome.done.map_or_else(|| "never".to_owned(), minutes);
        let bad = most_bad.map_or_else(String::new, |count| count.to_string());
        writeln!(
            text,
            "| {name} | {replicas} | {room} | {said} | {done} | {fewest_serving} | {most_pods} | {bad} | {streams_cut} |"
        )
        .expect("a string takes everything");
    }
    text
}

fn minutes(seconds: i64) -> String {
    format!("{}:{:02} min", seconds / 60, seconds % 60)
}
