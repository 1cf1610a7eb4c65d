//! The merges of a SentencePiece vocabulary, which its files do not carry: whatever two tokens make a third is one, and
//! a better score merges first. Pure.

use std::collections::HashMap;

use serde_json::{Value, json};

/// `(left, right)` pairs, the first to be merged first. `scores` may be shorter than `tokens`.
pub(super) fn merges_of(tokens: &[&str], scores: &[f64]) -> Vec<Value> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (*token, id)).collect();
    let mut merges: Vec<Merge> = Vec::new();
    for (token, score) in tokens.iter().zip(scores) {
        let mut own: Vec<Merge> = splits(token)
            .filter_map(|(left, right)| {
                Some(Merge { left, right, score: *score, ids: (*ids.get(left)?, *ids.get(right)?) })
            })
            .collect();
        own.sort_by_key(|merge| merge.ids);
        merges.extend(own);
    }
    merges.sort_by(|a, b| b.rank().partial_cmp(&a.rank()).unwrap_or(std::cmp::Ordering::Equal));
    merges.into_iter().map(|merge| json!([merge.left, merge.right])).collect()
}

struct Merge<'a> {
    left: &'a str,
    right: &'a str,
    score: f64,
    ids: (usize, usize),
}

impl Merge<'_> {
    /// Of two with the same score the longer goes first, as where these files are made.
    fn rank(&self) -> (f64, usize, usize) {
        (self.score, self.left.chars().count(), self.right.chars().count())
    }
}

fn splits(token: &str) -> impl Iterator<Item = (&str, &str)> {
    token.char_indices().skip(1).map(|(at, _)| token.split_at(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_tokens_make_is_a_merge_and_better_scores_go_first() {
        let tokens = ["a", "b", "c", "ab", "bc", "abc"];
        let merges = merges_of(&tokens, &[0.0, 0.0, 0.0, -2.0, -1.0, -3.0]);
        assert_eq!(merges, [json!(["b", "c"]), json!(["a", "b"]), json!(["ab", "c"]), json!(["a", "bc"])]);
    }
}
