//! Finds stop strings in a text that arrives piece by piece, holding back what may become one.

/// What one piece of text led to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StopScan {
    /// Text that became certain.
    pub text: String,
    /// The stop string that was found; no text follows.
    pub matched: Option<String>,
}

/// The stop strings of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct StopMatcher {
    stops: Vec<String>,
    include_stop: bool,
    held: String,
}

impl StopMatcher {
    /// Looks for `stops`; the found one is part of the text if `include_stop`.
    pub fn new(stops: Vec<String>, include_stop: bool) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, include_stop, held: String::new() }
    }

    /// Adds text and looks for a stop string in what is held: the earliest wins, then the one listed first.
    pub fn push(&mut self, text: &str) -> StopScan {
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop)?, stop))).min_by_key(|(at, _)| *at);
        match found {
            Some((at, stop)) => {
                let end = if self.include_stop { at + stop.len() } else { at };
                let matched = Some(stop.clone());
                self.held.truncate(end);
                StopScan { text: std::mem::take(&mut self.held), matched }
            }
            None => StopScan { text: self.release_certain(), matched: None },
        }
    }

    /// Adds text that no stop string may end (before `min_tokens`). Nothing is held back across it.
    pub fn pass(&mut self, text: &str) -> String {
        self.held.push_str(text);
        self.finish()
    }

    /// Ends the text: what was held back is part of it.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    fn release_certain(&mut self) -> String {
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, held)
    }
}

/// Bytes of the longest end of `text` that begins `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(at, _)| at).skip(1);
    starts.filter(|len| text.ends_with(&stop[..*len])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(stops: &[&str], include_stop: bool, pieces: &[&str], text: &str, matched: Option<&str>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect(), include_stop);
        let mut seen = String::new();
        for piece in pieces {
            let scan = matcher.push(piece);
            seen.push_str(&scan.text);
            if scan.matched.is_some() {
                assert_eq!((seen.as_str(), scan.matched.as_deref()), (text, matched));
                return;
            }
        }
        seen.push_str(&matcher.finish());
        assert_eq!((seen.as_str(), None), (text, matched));
    }

    #[test]
    fn a_stop_string_split_over_pieces_is_found_and_never_shown() {
        check(&["END"], false, &["one E", "N", "D two"], "one ", Some("END"));
    }

    #[test]
    fn text_that_only_began_like_a_stop_string_is_shown() {
        check(&["END"], false, &["one EN", "T"], "one ENT", None);
        check(&["END"], false, &["one EN"], "one EN", None);
    }

    #[test]
    fn the_earliest_stop_string_wins_then_the_first_listed() {
        check(&["b", "a"], false, &["xaby"], "x", Some("a"));
        check(&["ab", "a"], false, &["xaby"], "x", Some("ab"));
    }

    #[test]
    fn the_stop_string_is_part_of_the_text_when_asked() {
        check(&["\n"], true, &["one\ntwo"], "one\n", Some("\n"));
    }

    #[test]
    fn characters_of_several_bytes_are_not_split() {
        check(&["日本"], false, &["a日", "x"], "a日x", None);
        check(&["日本"], false, &["a日", "本b"], "a", Some("日本"));
    }

    #[test]
    fn an_empty_stop_string_ends_nothing() {
        check(&[""], false, &["text"], "text", None);
    }

    #[test]
    fn text_before_min_tokens_passes_unread() {
        let mut matcher = StopMatcher::new(vec!["x".into()], false);
        assert_eq!(matcher.pass("xx"), "xx");
        assert_eq!(matcher.push("ax").matched.as_deref(), Some("x"));
    }
}
