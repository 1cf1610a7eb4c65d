//! The past of a deployment from what its replicas remember of themselves. Only ages are compared: how long ago a sample was by its
//! replica's uptime, and now by who asks.

use std::collections::BTreeMap;

use stoker_crds::history::{LoadHistory, LoadSample};

use super::{FINE, FINE_SECONDS, MINUTE_SECONDS, MINUTES, known, mean, whole_seconds, worst};

/// Whether this can be what the process with this start id remembers: bounded, in order, of its own time, and numbers.
pub fn is_believable(told: &LoadHistory, start_id: &str) -> bool {
    // The minute that is not over is told, too.
    let bounded = told.fine.len() <= FINE && told.minutes.len() <= MINUTES + 1;
    let is_past = |sample: &LoadSample| sample.at_seconds <= whole_seconds(told.up_ms);
    let believable = |samples: &[LoadSample]| {
        samples.is_sorted_by(|a, b| a.at_seconds < b.at_seconds)
            && samples.iter().all(|sample| is_past(sample) && is_numbers(sample))
    };
    told.start_id == start_id && bounded && believable(&told.fine) && believable(&told.minutes)
}

fn is_numbers(sample: &LoadSample) -> bool {
    let LoadSample { at_seconds: _, wanted: _, serving, kv, running, waiting, tokens, ttft, itl } = *sample;
    let within = |most: f32| move |value: f32| value.is_nan() || (0.0..=most).contains(&value);
    [serving, kv].into_iter().all(within(1.0))
        && [running, waiting, tokens, ttft, itl].into_iter().all(within(f32::MAX))
}

/// Whether it begins longer ago than that.
pub fn reaches_back(told: &LoadHistory, age_seconds: u32) -> bool {
    let first = told.minutes.first().into_iter().chain(told.fine.first()).map(|sample| sample.at_seconds).min();
    first.is_some_and(|first| whole_seconds(told.up_ms).saturating_sub(first) > age_seconds)
}

/// What all remember, fine and by minutes; oldest first. They said so at `now_seconds`.
pub(super) fn of_all(told: &[LoadHistory], now_seconds: u32) -> (Vec<LoadSample>, Vec<LoadSample>) {
    let grid = |step_seconds| Grid { now_seconds, step_seconds };
    (grid(FINE_SECONDS).lay(told, |one| &one.fine), grid(MINUTE_SECONDS).lay(told, |one| &one.minutes))
}

/// Steps of the clock of who asks.
struct Grid {
    now_seconds: u32,
    step_seconds: u32,
}

impl Grid {
    /// Samples of all replicas by step. A replica has at most one sample in a step of its own uptime; all of them are moved by the same
    /// time, so it has at most one in a step of ours: none counts twice.
    fn lay(&self, told: &[LoadHistory], of: fn(&LoadHistory) -> &[LoadSample]) -> Vec<LoadSample> {
        let mut by_step: BTreeMap<u32, Vec<LoadSample>> = BTreeMap::new();
        for one in told {
            for sample in of(one) {
                let age = whole_seconds(one.up_ms).saturating_sub(self.begin(sample.at_seconds));
                by_step.entry(self.begin(self.now_seconds.saturating_sub(age))).or_default().push(*sample);
            }
        }
        by_step.into_iter().map(|(at_seconds, samples)| of_replicas(at_seconds, &samples)).collect()
    }

    fn begin(&self, seconds: u32) -> u32 {
        seconds - seconds % self.step_seconds
    }
}

/// One sample of several replicas at the same time. Replicas of a deployment have as many KV blocks as each other, so that the mean
/// of their shares is the share of all.
fn of_replicas(at_seconds: u32, samples: &[LoadSample]) -> LoadSample {
    let sum = |of: fn(&LoadSample) -> f32| known(samples, of).reduce(|a, b| a + b).unwrap_or(f32::NAN);
    LoadSample {
        at_seconds,
        wanted: f32::NAN,
        serving: sum(|one| one.serving),
        kv: mean(known(samples, |one| one.kv)),
        running: sum(|one| one.running),
        waiting: sum(|one| one.waiting),
        tokens: sum(|one| one.tokens),
        ttft: worst(known(samples, |one| one.ttft)),
        itl: worst(known(samples, |one| one.itl)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = "[50,1,0.5,3,0,20,null,null]";

    /// Whether a process that has run for a minute is believed when it tells these rows; what cannot be read is not.
    fn believed(minutes: &str) -> bool {
        let told = format!(r#"{{"startId": "a", "upMs": 60000, "fine": [{ROW}], "minutes": [{minutes}]}}"#);
        serde_json::from_str(&told).is_ok_and(|told| is_believable(&told, "a"))
    }

    #[test]
    fn what_can_be_is_believed_of_the_process_that_says_it() {
        assert!(believed("") && believed(ROW) && believed("[0,0,null,0,0,null,null,null],[60,1,1,1e6,0,20,800,12.5]"));
        let told = LoadHistory { start_id: "a".to_owned(), ..LoadHistory::default() };
        assert!(is_believable(&told, "a") && !is_believable(&told, "b"));
    }

    #[test]
    fn what_cannot_be_is_not_believed() {
        for (rows, why) in [
            (format!("{ROW},{ROW}"), "the same moment twice"),
            ("[60,1,0,0,0,0,0,0],[50,1,0,0,0,0,0,0]".to_owned(), "time goes back"),
            ("[61,1,0,0,0,0,0,0]".to_owned(), "the future"),
            ("[50,2,0,0,0,0,0,0]".to_owned(), "more than one replica"),
            ("[50,1,1.5,0,0,0,0,0]".to_owned(), "more than all blocks"),
            ("[50,1,0,-1,0,0,0,0]".to_owned(), "less than nothing"),
            ("[50,1,0,0,0,1e39,0,0]".to_owned(), "no end"),
        ] {
            assert!(!believed(&rows), "{why}");
        }
        let sample = serde_json::from_str::<LoadSample>(ROW).unwrap();
        let rows = (0..).map(|at_seconds| LoadSample { at_seconds, ..sample });
        let mut told = LoadHistory { up_ms: u64::MAX, ..LoadHistory::default() };
        told.minutes = rows.clone().take(MINUTES + 2).collect();
        assert!(!is_believable(&told, ""), "more than a day");
        (told.minutes, told.fine) = (Vec::new(), rows.take(FINE + 1).collect());
        assert!(!is_believable(&told, ""), "more than ten minutes");
    }
}
