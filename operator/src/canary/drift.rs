//! How far two replicas are apart on the same prompts: distances of log-probabilities of the older one's greedy tokens. Pure.
//!
//! Up to the first token that differs both have read the same, so the canary's numbers are about the same question; what comes behind it
//! is about another one and is not compared. At that token the older one's is looked for among the canary's likeliest.

/// One token of a greedy continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// Its name, the same in both replicas.
    pub token: String,
    /// Its log-probability, in nats.
    pub logprob: f64,
    /// The likeliest tokens there with theirs.
    pub likeliest: Vec<(String, f64)>,
}

/// How far apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// Tokens that were compared.
    pub tokens: usize,
    /// Of these, tokens that both said.
    pub equal: usize,
    /// Mean distance, in nats.
    pub mean: f64,
    /// The greatest one.
    pub max: f64,
}

/// Compares the continuations of each prompt, in order; `None`: nothing could be compared.
pub fn drift(older: &[Vec<Position>], canary: &[Vec<Position>]) -> Option<Drift> {
    let pairs = older.iter().zip(canary).flat_map(|(older, canary)| up_to_difference(older, canary));
    let (mut tokens, mut equal, mut sum, mut max) = (0, 0, 0.0, 0.0_f64);
    for (older, canary) in pairs {
        let distance = distance(older, canary);
        tokens += 1;
        equal += usize::from(older.token == canary.token);
        sum += distance;
        max = max.max(distance);
    }
    (tokens > 0).then(|| Drift { tokens, equal, mean: sum / tokens as f64, max })
}

fn up_to_difference<'a>(
    older: &'a [Position],
    canary: &'a [Position],
) -> impl Iterator<Item = (&'a Position, &'a Position)> {
    let n_equal = older.iter().zip(canary).take_while(|(older, canary)| older.token == canary.token).count();
    older.iter().zip(canary).take(n_equal + 1)
}

/// Between what both give to the older one's token. One that is none of the canary's likeliest is less likely than all of them: the
/// distance is at least as far as to the last.
fn distance(older: &Position, canary: &Position) -> f64 {
    let named = canary.likeliest.iter().find(|(token, _)| *token == older.token).map(|(_, logprob)| *logprob);
    let said = (canary.token == older.token).then_some(canary.logprob).or(named);
    let last = || canary.likeliest.iter().map(|(_, logprob)| *logprob).fold(canary.logprob, f64::min);
    match said {
        Some(logprob) => (older.logprob - logprob).abs(),
        None => (older.logprob - last()).max(0.0),
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use proptest::prelude::*;

    use super::*;

    fn said(token: &str, logprob: f64, others: &[(&str, f64)]) -> Position {
        let all = [&[(token, logprob)], others].concat();
        let likeliest = all.into_iter().map(|(token, logprob)| (token.to_owned(), logprob));
        Position { token: token.to_owned(), logprob, likeliest: likeliest.collect() }
    }

    #[test]
    fn equal_tokens_are_compared_and_the_first_other_one_is_the_last() {
        let older = vec![said("a", -0.5, &[]), said("b", -0.2, &[("c", -2.0)]), said("d", -0.1, &[])];
        let same = drift(from_ref(&older), from_ref(&older)).unwrap();
        assert_eq!(same, Drift { tokens: 3, equal: 3, mean: 0.0, max: 0.0 });
        let other = vec![said("a", -0.7, &[]), said("c", -0.4, &[("b", -1.2)]), said("d", -9.0, &[])];
        let Drift { tokens, equal, mean, max } = drift(&[older], &[other]).unwrap();
        assert_eq!((tokens, equal), (2, 1));
        assert!((mean - 0.6).abs() < 1e-9 && (max - 1.0).abs() < 1e-9, "{mean} {max}");
    }

    #[test]
    fn a_token_that_is_none_of_the_likeliest_is_farther_than_the_last_of_them() {
        let older = vec![said("a", -0.1, &[])];
        let other = vec![said("b", -0.2, &[("c", -3.1)])];
        assert!((drift(&[older], &[other]).unwrap().max - 3.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_said_is_nothing_compared() {
        assert_eq!(drift(&[], &[]), None);
        assert_eq!(drift(&[vec![]], &[vec![said("a", -1.0, &[])]]), None);
    }

    fn continuation() -> impl Strategy<Value = Vec<Position>> {
        let position = (0..3u8, -20.0..0.0f64, -20.0..0.0f64);
        prop::collection::vec(position, 0..12).prop_map(|positions| {
            let position = |(token, logprob, other): (u8, f64, f64)| said(&token.to_string(), logprob, &[("x", other)]);
            positions.into_iter().map(position).collect()
        })
    }

    proptest! {
        #[test]
        fn a_drift_is_between_nothing_and_its_greatest_part(older in continuation(), canary in continuation()) {
            let own = drift(from_ref(&older), from_ref(&older));
            prop_assert!(own.is_none_or(|own| own.mean == 0.0 && own.equal == own.tokens));
            let compared = older.len().min(canary.len());
            match drift(&[older], &[canary]) {
                None => prop_assert_eq!(compared, 0),
                Some(found) => {
                    prop_assert!(found.tokens <= compared && found.tokens - found.equal <= 1, "{:?}", found);
                    prop_assert!(found.mean >= 0.0 && found.mean <= found.max + 1e-9 && found.max <= 20.0, "{:?}", found);
                }
            }
        }
    }
}
