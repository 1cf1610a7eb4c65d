//! A mixed open load: stretches of Poisson arrivals with random lengths, each of which keeps about as many sequences in flight as
//! a point of the grid has, behind about its context. Nobody waits for an answer before the next request is sent.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use stoker_engine::{EngineLoad, RejectReason};
use stoker_workload::{Lengths, Rng};

use super::point::{NEAR, Point, Timed};
use crate::{in_process::InProcess, mix::Arrival};

/// Lengths of answers and the spread of prompts around a point's context: chats vary so.
const ANSWER_TOKENS: f64 = 48.0;
const SIGMA: f64 = 0.7;
/// How often the engine's state is looked at.
const LOOK: Duration = Duration::from_millis(5);
const BLOCK_TOKENS: f64 = 16.0;

/// A time in which requests come alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stretch {
    /// How long it is.
    pub(super) seconds: f64,
    /// Requests a second.
    pub(super) rate: f64,
    /// Median of the tokens of prompts.
    pub(super) prompt_tokens: f64,
}

/// What the engine had to do meanwhile.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// Sequences that ran and the mean tokens before each, whenever it was looked at.
    pub(super) states: Vec<(f64, f64)>,
    /// Tokens of every prompt that was sent.
    pub(super) prompts: Vec<u32>,
    /// Requests that found no place.
    pub(super) refused: usize,
}

/// One stretch for each decoding point, in random order, with the rate that keeps as many in flight by what the points took.
pub(super) fn stretches(timed: &[Timed], seconds: f64, seed: u64) -> Vec<Stretch> {
    let (mean_answer, mean_of_median) = (ANSWER_TOKENS * (SIGMA * SIGMA / 2.0).exp(), (SIGMA * SIGMA / 2.0).exp());
    let mut stretches: Vec<Stretch> = timed
        .iter()
        .filter_map(|step| {
            let Point::Decode { sequences, context } = step.point else { return None };
            let (n, prompt_tokens) = (f64::from(sequences), f64::from(context));
            // Those in flight are what comes in a second times how long it stays, and while prompts are computed nobody decodes.
            let prefill_seconds = prefill_seconds(timed, prompt_tokens * mean_of_median);
            Some(Stretch { seconds: 0.0, rate: n / (mean_answer * step.median() + n * prefill_seconds), prompt_tokens })
        })
        .collect();
    let each = seconds / stretches.len() as f64;
    stretches.iter_mut().for_each(|stretch| stretch.seconds = each);
    shuffle(&mut stretches, seed);
    stretches
}

/// Of a prompt of this length, as the nearest that was timed.
fn prefill_seconds(timed: &[Timed], tokens: f64) -> f64 {
    let per_token = timed.iter().filter_map(|timed| match timed.point {
        Point::Prompt { tokens: timed_tokens } => {
            let timed_tokens = f64::from(timed_tokens);
            Some(((timed_tokens / tokens).ln().abs(), timed.median() / timed_tokens))
        }
        Point::Decode { .. } => None,
    });
    per_token.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(0.0, |(_, seconds)| seconds * tokens)
}

/// Fisher and Yates.
fn shuffle(stretches: &mut [Stretch], seed: u64) {
    let mut rng = Rng::seeded(seed ^ 0x5_0ff1e);
    for last in (1..stretches.len()).rev() {
        stretches.swap(last, (rng.uniform() * (last + 1) as f64) as usize);
    }
}

/// The requests of all stretches, none longer than `max_model_len`.
pub(super) fn arrivals(stretches: &[Stretch], max_model_len: u32, seed: u64) -> Vec<Arrival> {
    let mut rng = Rng::seeded(seed);
    let (mut arrivals, mut begun) = (Vec::new(), 0.0);
    for stretch in stretches {
        let prompts = Lengths::LogNormal { median: stretch.prompt_tokens, sigma: SIGMA };
        let answers = Lengths::LogNormal { median: ANSWER_TOKENS, sigma: SIGMA };
        let mut at = rng.exponential() / stretch.rate;
        while at < stretch.seconds {
            let completion_tokens = answers.draw(&mut rng).min(max_model_len / 2);
            let prompt_tokens = prompts.draw(&mut rng).min(max_model_len - completion_tokens - 1);
            arrivals.push(Arrival { at: begun + at, prompt_tokens, completion_tokens });
            at += rng.exponential() / stretch.rate;
        }
        begun += stretch.seconds;
    }
    arrivals
}

/// Sends what is due, looks at the engine meanwhile, and lets what still runs after `seconds` go.
pub(super) fn serve(engine: &mut InProcess, arrivals: &[Arrival], seconds: f64) -> Result<Seen> {
    let begun = Instant::now();
    let (mut seen, mut streams, mut arrivals) = (Seen::default(), Vec::new(), arrivals.iter().peekable());
    loop {
        let now = begun.elapsed().as_secs_f64();
        while let Some(arrival) = arrivals.next_if(|arrival| arrival.at <= now) {
            let prompt = engine.prompts().fresh(arrival.prompt_tokens);
            match engine.try_greedy(prompt, arrival.completion_tokens) {
                Ok(stream) => streams.push(stream),
                Err(RejectReason::QueueFull { .. }) => seen.refused += 1,
                Err(reason) => bail!("a request of the load was refused: {reason}"),
            }
            seen.prompts.push(arrival.prompt_tokens);
        }
        seen.note(&engine.engine().load());
        if now >= seconds {
            break;
        }
        let next = arrivals.peek().map_or(seconds, |arrival| arrival.at);
        thread::sleep(LOOK.min(Duration::from_secs_f64((next - now).max(0.0))));
    }
    drop(streams);
    while engine.engine().load().open_requests > 0 {
        thread::sleep(LOOK);
    }
    Ok(seen)
}

impl Seen {
    fn note(&mut self, load: &EngineLoad) {
        let running = f64::from(load.running);
        if running > 0.0 {
            self.states.push((running, f64::from(load.referenced_blocks) * BLOCK_TOKENS / running));
        }
    }

    /// How often the engine was near a point: had about its sequences at about its context, or was sent a prompt of about its length.
    pub(super) fn near(&self, point: Point) -> usize {
        let is_near = |seen: f64, wanted: u32| (1.0 / NEAR..=NEAR).contains(&(seen / f64::from(wanted)));
        match point {
            Point::Decode { sequences, context } => {
                let is_met = |(n, before): &&(f64, f64)| is_near(*n, sequences) && is_near(*before, context);
                self.states.iter().filter(is_met).count()
            }
            Point::Prompt { tokens } => self.prompts.iter().filter(|sent| is_near(f64::from(**sent), tokens)).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed() -> Vec<Timed> {
        let step = |point, seconds| Timed { point, seconds: vec![seconds] };
        vec![
            step(Point::Decode { sequences: 1, context: 128 }, 0.01),
            step(Point::Decode { sequences: 8, context: 128 }, 0.02),
            step(Point::Prompt { tokens: 128 }, 0.05),
        ]
    }

    #[test]
    fn a_stretch_keeps_about_as_many_in_flight_as_its_point_has() {
        for stretch in stretches(&timed(), 20.0, 1) {
            let n = if stretch.rate < 2.0 { 1.0 } else { 8.0 };
            let step = if n == 1.0 { 0.01 } else { 0.02 };
            // A second holds `rate` prompts; what is left of it decodes.
            let prefill = stretch.rate * 0.05 * 1.278;
            let stay = 48.0 * 1.278 * step / (1.0 - prefill);
            assert!((stretch.rate * stay / n - 1.0).abs() < 0.01, "{stretch:?}");
            assert_eq!(stretch.seconds, 10.0);
        }
    }

    #[test]
    fn a_seed_repeats_its_load_in_order_and_within_the_context() {
        let stretches = stretches(&timed(), 60.0, 1);
        let arrivals_of = |seed| arrivals(&stretches, 256, seed);
        let load = arrivals_of(7);
        assert_eq!(load, arrivals_of(7));
        assert_ne!(load, arrivals_of(8));
        assert!(load.len() > 50 && load.is_sorted_by(|a, b| a.at <= b.at));
        assert!(load.iter().all(|arrival| arrival.prompt_tokens + arrival.completion_tokens < 256));
        assert!(load.iter().all(|arrival| arrival.prompt_tokens > 0 && arrival.completion_tokens > 0));
    }

    #[test]
    fn a_state_is_near_one_point_of_a_grid_of_powers_of_two() {
        let seen =
            Seen { states: vec![(8.0, 120.0), (11.0, 128.0), (6.0, 300.0)], prompts: vec![100, 190], refused: 0 };
        let near = |sequences, context| seen.near(Point::Decode { sequences, context });
        assert_eq!([near(8, 128), near(16, 128), near(8, 256), near(4, 128)], [2, 0, 1, 0]);
        assert_eq!(seen.near(Point::Prompt { tokens: 128 }), 1);
    }
}
