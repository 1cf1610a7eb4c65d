//! Whose a step's time is: device seconds of sequences, as they are accounted for. Pure.
//!
//! A step's time is shared by the tokens that it computes: those of prompts and one a decode alike. In a step all rows go through the same
//! products, which is where most of its time goes, and a share by rows needs no model of the device and is the same everywhere. It does not
//! see what differs between two rows: attention reads a long context's keys and values and a short one's, and both pay the same; a
//! decode that is alone in its step pays for all the weights that it has read, and one beside a long prompt for little. Shares of a step
//! are its time, to the nanosecond; between steps nothing is computed, and that time is nobody's. Who is preempted pays again for
//! what is computed again, as who puts off a draw does. What a step computes for a sequence that has ended meanwhile is nobody's, too: its
//! account has been told.

use std::time::Duration;

use super::{SchedState, StepPlan, resolve::Finder};
use crate::request::RequestId;

/// Of a step that took so much of its devices' time: the share of each of its chunks, in their order.
pub fn shares(plan: &StepPlan, time: Duration) -> impl Iterator<Item = (RequestId, Duration)> {
    let (nanos, n_tokens) = (time.as_nanos(), plan.n_tokens() as u128);
    let (mut n_shared, mut until) = (0, 0);
    plan.chunks.iter().map(move |chunk| {
        n_shared += chunk.n_tokens as u128;
        // Between two points of the step: what one loses by rounding, the next one has.
        let since = std::mem::replace(&mut until, nanos * n_shared / n_tokens);
        (chunk.id, Duration::from_nanos((until - since) as u64))
    })
}

/// Adds to the accounts of a step's sequences what they had of its time. Before its results are taken in: those may end them.
pub fn charge(state: &mut SchedState, plan: &StepPlan, time: Duration) {
    let mut finder = Finder::default();
    for (id, share) in shares(plan, time) {
        if let Some((sequence, _)) = finder.find(state, id) {
            sequence.device_time += share;
        }
    }
}
