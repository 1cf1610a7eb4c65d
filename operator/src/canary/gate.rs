//! Whether a canary is as good as the replicas beside it, by what was found and what is allowed. Pure.

use stoker_crds::status::CanaryMeasured;

use super::{drift::Drift, traffic::Tally};

/// One error proves nothing, nor do two.
const FAILED_MIN: u64 = 3;

/// What has to hold; at least one of its parts is there.
#[derive(Clone, Debug, PartialEq)]
pub struct Gate {
    /// Of the same prompts.
    pub prompts: Option<PromptsGate>,
    /// Of the requests that both get.
    pub traffic: Option<TrafficGate>,
}

/// How far answers may be apart.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptsGate {
    /// In the mean, in nats.
    pub max_mean_drift: f64,
    /// To which prompts.
    pub texts: Vec<String>,
}

/// How much worse requests may be treated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrafficGate {
    /// Requests of each side before latencies are compared.
    pub min_requests: u64,
    /// Multiple of the time to first token.
    pub max_ttft_ratio: f64,
    /// Multiple of the inter-token latency.
    pub max_itl_ratio: f64,
    /// Errors beyond the older replicas', in percent of requests.
    pub max_error_percent: f64,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finding {
    /// UID of the pod that it is about.
    pub pod_uid: String,
    /// What both made of the same prompts.
    pub prompts: Compared,
    /// Requests of the canary.
    pub canary: Tally,
    /// Requests of the older replicas meanwhile.
    pub older: Tally,
}

/// What came of asking both.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Compared {
    /// Nobody was asked yet.
    #[default]
    NotYet,
    /// They could not be compared, for this reason.
    Not(String),
    /// The canary answered with an error of its own what an older replica answered well.
    Failed(String),
    /// They were.
    By(Drift),
}

/// What a finding means, with the numbers in words.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It was not looked at yet.
    Unknown,
    /// Something is missing before it can be judged.
    Waits(String),
    /// As good.
    Passes(String),
    /// Slower than allowed. That may pass.
    Slow(String),
    /// Worse than allowed.
    Fails(String),
}

/// Judges. What fails comes before what is slow, and that before what is waited for.
pub fn judge(gate: &Gate, finding: &Finding) -> Verdict {
    let prompts = gate.prompts.as_ref().map(|gate| by_prompts(gate, &finding.prompts));
    let traffic = gate.traffic.as_ref().map(|gate| by_traffic(gate, finding));
    match (prompts, traffic) {
        (Some(fails @ Verdict::Fails(_)), _) | (_, Some(fails @ Verdict::Fails(_))) => fails,
        (_, Some(slow @ Verdict::Slow(_))) => slow,
        // With too few requests prompts decide, if they are compared.
        (Some(Verdict::Passes(of_prompts)), Some(Verdict::Waits(of_traffic) | Verdict::Passes(of_traffic))) => {
            Verdict::Passes(format!("{of_prompts}; {of_traffic}"))
        }
        (Some(verdict), _) | (None, Some(verdict)) => verdict,
        (None, None) => {
            Verdict::Waits("nothing is compared: add rollout.canary.analysis.prompts or traffic".to_owned())
        }
    }
}

fn by_prompts(gate: &PromptsGate, compared: &Compared) -> Verdict {
    let drift = match compared {
        Compared::NotYet => return Verdict::Unknown,
        Compared::Not(why) => return Verdict::Waits(format!("answers to prompts cannot be compared: {why}")),
        Compared::Failed(why) => {
            return Verdict::Fails(format!(
                "prompts that an older replica answers end in an error: {why}; its log says more, as a rule its weights are not what they should be"
            ));
        }
        Compared::By(drift) => drift,
    };
    let Drift { tokens, equal, mean, max } = drift;
    let (n_prompts, bound) = (gate.texts.len(), gate.max_mean_drift);
    let measured = format!(
        "log-probabilities drift by {mean:.3} nats in the mean and {max:.3} at most, {equal} of {tokens} tokens to {n_prompts} prompts are equal"
    );
    if *mean <= bound {
        return Verdict::Passes(measured);
    }
    Verdict::Fails(format!(
        "{measured}; the mean may be {bound}: change what made the model answer otherwise, or if it shall, raise \
         rollout.canary.analysis.prompts.maxMeanDrift or compare traffic alone"
    ))
}

fn by_traffic(gate: &TrafficGate, finding: &Finding) -> Verdict {
    let Finding { canary, older, .. } = finding;
    if let Some(errors) = errors(gate, canary, older) {
        return Verdict::Fails(errors);
    }
    let (n_canary, n_older, enough) = (canary.timed, older.timed, gate.min_requests);
    if n_canary.min(n_older) < enough {
        return Verdict::Waits(format!(
            "{n_canary} requests were timed in it and {n_older} in older replicas, {enough} each are compared"
        ));
    }
    let latencies = [
        ("TTFT", canary.ttft_ratio(older), gate.max_ttft_ratio, "maxTtftRatio"),
        ("ITL", canary.itl_ratio(older), gate.max_itl_ratio, "maxItlRatio"),
    ];
    let known = || latencies.into_iter().filter_map(|(name, ratio, bound, field)| Some((name, ratio?, bound, field)));
    let said = known().map(|(name, ratio, ..)| format!("{name} is {ratio:.2} times that of older replicas"));
    let measured = format!("{} after {n_canary} requests", said.collect::<Vec<_>>().join(" and "));
    match known().find(|(_, ratio, bound, _)| ratio > bound) {
        Some((name, _, bound, field)) => Verdict::Slow(format!(
            "{measured}; {name} may be {bound} times: change what made it slower, or raise rollout.canary.analysis.traffic.{field}"
        )),
        None => Verdict::Passes(measured),
    }
}

/// Too many errors, even if all of the first requests that are still to come went well.
fn errors(gate: &TrafficGate, canary: &Tally, older: &Tally) -> Option<String> {
    let of = canary.requests.max(gate.min_requests);
    let percent = canary.failed as f64 * 100.0 / of as f64;
    let allowed = older.error_percent().unwrap_or_default() + gate.max_error_percent;
    (canary.failed >= FAILED_MIN && percent > allowed).then(|| {
        format!(
            "{} of {} requests ended in an error, {allowed:.1} % of {of} may ({} of {} did in older replicas): change what made them \
             fail, or raise rollout.canary.analysis.traffic.maxErrorPercent",
            canary.failed, canary.requests, older.failed, older.requests
        )
    })
}

/// The numbers, for the status.
pub fn measured(gate: &Gate, finding: &Finding) -> CanaryMeasured {
    let Finding { prompts, canary, older, .. } = finding;
    let drift = match prompts {
        Compared::By(drift) => Some(drift),
        Compared::NotYet | Compared::Not(_) | Compared::Failed(_) => None,
    };
    let of_traffic = CanaryMeasured {
        requests: Some(i64::try_from(canary.requests).unwrap_or(i64::MAX)),
        error_percent: canary.error_percent().map(short),
        ttft_ratio: canary.ttft_ratio(older).map(short),
        itl_ratio: canary.itl_ratio(older).map(short),
        ..CanaryMeasured::default()
    };
    CanaryMeasured {
        mean_drift: drift.map(|drift| short(drift.mean)),
        max_drift: drift.map(|drift| short(drift.max)),
        equal_percent: drift.map(|drift| short(drift.equal as f64 * 100.0 / drift.tokens.max(1) as f64)),
        ..gate.traffic.map(|_| of_traffic).unwrap_or_default()
    }
}

/// Three decimals: what is written must equal what is read back.
fn short(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use proptest::{
        prelude::*,
        test_runner::{RngAlgorithm, TestRng},
    };

    use super::*;
    use crate::canary::traffic::Sample;

    const PROMPTS: fn() -> PromptsGate = || PromptsGate { max_mean_drift: 0.1, texts: vec!["One".into()] };
    const TRAFFIC: TrafficGate =
        TrafficGate { min_requests: 50, max_ttft_ratio: 1.5, max_itl_ratio: 1.5, max_error_percent: 1.0 };

    fn both() -> Gate {
        Gate { prompts: Some(PROMPTS()), traffic: Some(TRAFFIC) }
    }

    fn compared(mean: f64) -> Compared {
        Compared::By(Drift { tokens: 100, equal: 98, mean, max: mean * 4.0 })
    }

    fn tally(ended: u64, failed: u64, ttft: f64, itl: f64) -> Tally {
        let mut tally = Tally::default();
        tally.note(Sample { ended, failed, ttft_seconds: Some(ttft), itl_seconds: Some(itl) });
        tally
    }

    fn finding(prompts: Compared, canary: Tally) -> Finding {
        Finding { pod_uid: "u".into(), prompts, canary, older: tally(500, 1, 0.2, 0.02) }
    }

    /// One word for a verdict, and what it says.
    fn said(gate: &Gate, finding: &Finding) -> (&'static str, String) {
        match judge(gate, finding) {
            Verdict::Unknown => ("unknown", String::new()),
            Verdict::Waits(why) => ("waits", why),
            Verdict::Passes(why) => ("passes", why),
            Verdict::Slow(why) => ("slow", why),
            Verdict::Fails(why) => ("fails", why),
        }
    }

    #[test]
    fn verdicts_by_what_was_found() {
        let good = || tally(60, 0, 0.22, 0.021);
        for (prompts, canary, verdict, words) in [
            (
                compared(0.02),
                good(),
                "passes",
                "0.020 nats in the mean and 0.080 at most, 98 of 100 tokens to 1 prompts are equal; TTFT is 1.10 times",
            ),
            (compared(0.1), good(), "passes", "0.100 nats"),
            (compared(0.11), good(), "fails", "the mean may be 0.1"),
            (
                compared(0.02),
                tally(49, 0, 9.0, 9.0),
                "passes",
                "49 requests were timed in it and 500 in older replicas, 50 each are compared",
            ),
            (compared(0.02), tally(50, 0, 0.31, 0.02), "slow", "TTFT may be 1.5 times"),
            (compared(0.02), tally(50, 0, 0.2, 0.031), "slow", "ITL may be 1.5 times"),
            (compared(0.02), tally(60, 2, 0.2, 0.02), "passes", "TTFT is 1.00 times"),
            (
                compared(0.02),
                tally(10, 3, 0.2, 0.02),
                "fails",
                "3 of 10 requests ended in an error, 1.2 % of 50 may (1 of 500 did in older replicas)",
            ),
            (compared(0.02), tally(1000, 10, 0.2, 0.02), "passes", "TTFT is 1.00 times"),
            (compared(0.02), tally(1000, 13, 0.2, 0.02), "fails", "maxErrorPercent"),
            (compared(0.2), tally(60, 0, 9.0, 9.0), "fails", "maxMeanDrift"),
            (Compared::NotYet, good(), "unknown", ""),
            (Compared::NotYet, tally(60, 0, 9.0, 0.02), "slow", "TTFT is 45.00 times"),
            (Compared::Not("answered 401".into()), good(), "waits", "cannot be compared: answered 401"),
            (Compared::Failed("answered 500".into()), good(), "fails", "end in an error: answered 500"),
        ] {
            let (found, why) = said(&both(), &finding(prompts, canary));
            assert!(found == verdict && why.contains(words), "{found} and not {verdict}: {why}");
        }
    }

    #[test]
    fn with_one_part_the_other_says_nothing() {
        let by_traffic = Gate { prompts: None, ..both() };
        assert_eq!(said(&by_traffic, &finding(compared(9.0), tally(60, 0, 0.2, 0.02))).0, "passes");
        assert_eq!(said(&by_traffic, &finding(compared(0.0), Tally::default())).0, "waits", "nobody asks");
        let by_prompts = Gate { traffic: None, ..both() };
        assert_eq!(said(&by_prompts, &finding(compared(0.0), tally(60, 60, 9.0, 9.0))).0, "passes");
        assert_eq!(measured(&by_prompts, &finding(compared(0.0), tally(60, 60, 9.0, 9.0))).requests, None);
        let nothing = Gate { prompts: None, traffic: None };
        assert_eq!(said(&nothing, &finding(compared(9.0), Tally::default())).0, "waits");
    }

    /// A world in which a canary is so many times as slow: whether its gate calls it slow in every look of a whole minute, within so many
    /// minutes. Each minute an agent's median is of requests whose times differ as those of short and long prompts do.
    fn is_stopped(slowness: f64, minutes: usize, seed: u8) -> bool {
        const LOOKS_A_MINUTE: usize = 12;
        let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
        let mut median = |requests: usize, scale: f64| {
            let mut times: Vec<f64> = (0..requests)
                .map(|_| {
                    // A sum of twelve is nearly normal, of variance 1.
                    let normal: f64 =
                        (0..12).map(|_| f64::from(random.next_u32()) / f64::from(u32::MAX)).sum::<f64>() - 6.0;
                    scale * normal.exp()
                })
                .collect();
            times.sort_by(f64::total_cmp);
            times[requests / 2]
        };
        let (mut canary, mut older, mut slow_looks) = (Tally::default(), Tally::default(), 0);
        for _ in 0..minutes {
            let (of_canary, of_older) = (median(60, 0.2 * slowness), median(540, 0.2));
            for _ in 0..LOOKS_A_MINUTE {
                canary.note(Sample { ended: 5, failed: 0, ttft_seconds: Some(of_canary), itl_seconds: None });
                older.note(Sample { ended: 45, failed: 0, ttft_seconds: Some(of_older), itl_seconds: None });
                let is_slow =
                    matches!(by_traffic(&TRAFFIC, &Finding { canary, older, ..Finding::default() }), Verdict::Slow(_));
                slow_looks = if is_slow { slow_looks + 1 } else { 0 };
                if slow_looks > LOOKS_A_MINUTE {
                    return true;
                }
            }
        }
        false
    }

    #[test]
    fn of_two_hundred_canaries_equal_ones_are_not_stopped_and_slow_ones_are() {
        let stopped = |slowness| (0..200).filter(|seed| is_stopped(slowness, 5, *seed)).count();
        let (equal, twice) = (stopped(1.0), stopped(2.0));
        println!(
            "of 200 canaries {equal} equal ones and {twice} that were twice as slow were stopped within 300 requests"
        );
        assert!(equal <= 10 && twice >= 190, "{equal} equal, {twice} twice as slow");
    }

    proptest! {
        #[test]
        fn a_worse_canary_is_never_better_off(ended in 0..400u64, failed in 0..20u64, ttft in 0.01..2.0f64, mean in 0.0..0.3f64, worse in 1.0..4.0f64) {
            let rank = |verdict: Verdict| match verdict {
                Verdict::Passes(_) => 0,
                Verdict::Unknown | Verdict::Waits(_) => 1,
                Verdict::Slow(_) => 2,
                Verdict::Fails(_) => 3,
            };
            let failed = failed.min(ended);
            let of = |factor: f64, failed: u64| judge(&both(), &finding(compared(mean * factor), tally(ended, failed.min(ended), ttft * factor, 0.02)));
            prop_assert!(rank(of(worse, failed + 1)) >= rank(of(1.0, failed)));
        }
    }
}
