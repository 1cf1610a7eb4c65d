//! What strangers and replicas send, changed at random: requests as HTTP, bodies as JSON, answers as server-sent events. Nobody
//! panics, nothing hangs, and what is read is what other readers read or what the same bytes say when they come in other parts. Inputs
//! follow from a seed. `STOKER_FUZZ_INPUTS` says how many of each (`make fuzz`).

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod bodies;
mod mutate;
mod requests;
mod streams;

use std::time::Instant;

/// Inputs of each kind where nobody says another number: seconds in a debug build.
const INPUTS: u64 = 20_000;

/// Gives every input to a check, and says how many there were: one for each `share` of all, as checks take that much longer than others. `check` says whether it was more
/// than refused.
fn every_input(kind: &str, share: u64, mut check: impl FnMut(u64) -> bool) {
    let n_inputs = std::env::var("STOKER_FUZZ_INPUTS").map_or(INPUTS, |text| text.parse().unwrap()) / share;
    let begun = Instant::now();
    let n_read = (0..n_inputs).filter(|seed| check(*seed)).count();
    println!("{kind}: {n_inputs} inputs, {n_read} of them read, in {:.0} s", begun.elapsed().as_secs_f64());
    // A corpus that is all refused would look at nothing behind the first byte.
    let read_share = n_read as f64 / n_inputs as f64;
    assert!((0.05..0.99).contains(&read_share), "{kind}: {read_share:.3} of all inputs were read");
}
