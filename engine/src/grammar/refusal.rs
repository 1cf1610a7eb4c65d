//! What a refusal says: where the mistake is, and of what was sent no more than what stands around it. A grammar may be long, and its
//! author has it.

use llguidance::api::ParserLimits;
use regex_syntax::{Parser, ast::Span};

use super::memory::TooMuch;

/// Longest reason in characters, and longest of its lines: llguidance repeats the grammar.
const REASON_CHARS: usize = 400;
const LINE_CHARS: usize = 100;
/// Characters of an expression that are quoted: before its mistake, and from there on.
const BEFORE_CHARS: usize = 20;
const BEHIND_CHARS: usize = 30;

/// llguidance's reason, without what it says about its own state.
pub(super) fn excerpt(reason: &str) -> String {
    let reason = reason.split("\n<state>").next().unwrap_or(reason).trim();
    let lines: Vec<String> = reason.lines().map(|line| first_chars(line, LINE_CHARS)).collect();
    first_chars(&lines.join("\n"), REASON_CHARS)
}

const SHORTER: &str = "shorten repetitions such as `{0,5000}` and long alternatives in it";
const FLATTER: &str =
    "let rules repeat with `*` or refer to themselves at their beginning, and texts have one way to be matched";

/// What a grammar needs memory for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Itself.
    Text,
    /// States of its lexer.
    Patterns,
    /// Ways to follow its rules.
    Rules,
}

/// Why a grammar has to end for the sake of the others.
pub(super) fn too_much_in_words(kind: Kind, TooMuch { max_bytes, part }: TooMuch) -> String {
    let (what, change) = match kind {
        Kind::Text => ("its text more than its part", "send a smaller one"),
        Kind::Patterns => ("its patterns more than their part", SHORTER),
        Kind::Rules => ("its rules more than their part", FLATTER),
    };
    let [max, part] = [max_bytes, part].map(|bytes| bytes as f64 / f64::from(1 << 20));
    format!(
        "the grammars of all requests need more than {max:.0} MiB, and {what} of it, {part:.1} MiB: {change}, or send fewer such \
         requests at once"
    )
}

/// Why llguidance cannot go on: where that is one of its limits, which one and what to change.
pub(super) fn limit_in_words(reason: &str, limits: &ParserLimits) -> String {
    let ParserLimits { step_lexer_fuel, max_lexer_states, step_max_items, max_items_in_row, .. } = limits;
    let is = |words: &str| reason.contains(words);
    if is("too many expressions") {
        format!("its patterns take more than {step_lexer_fuel} steps for one token: {SHORTER}")
    } else if is("too many states") {
        format!("its patterns have more than {max_lexer_states} states: {SHORTER}")
    } else if is("Too many items") {
        format!("its rules can be followed in more than {step_max_items} ways for one token: {FLATTER}")
    } else if is("Current row has") {
        format!("its rules can be followed in more than {max_items_in_row} ways at one place: {FLATTER}")
    } else {
        excerpt(reason)
    }
}

/// Where a regular expression stops being one, and why; `None` if it is one, and refused for another reason.
pub(super) fn mistake_in_regex(regex: &str) -> Option<String> {
    let (span, why) = match Parser::new().parse(regex).err()? {
        regex_syntax::Error::Parse(error) => (*error.span(), error.kind().to_string()),
        regex_syntax::Error::Translate(error) => (*error.span(), error.kind().to_string()),
        _ => return None,
    };
    Some(format!("at {}: {why}", place(regex, span)))
}

/// By characters from 1, as editors count, and what stands there.
fn place(regex: &str, Span { start, .. }: Span) -> String {
    let (before, behind) = regex.split_at(start.offset);
    let n_before = before.chars().count();
    let shown: String = before.chars().skip(n_before.saturating_sub(BEFORE_CHARS)).collect();
    let opening = if n_before > BEFORE_CHARS { "…" } else { "" };
    format!("character {} in `{opening}{shown}{}`", n_before + 1, first_chars(behind, BEHIND_CHARS))
}

fn first_chars(text: &str, n_chars: usize) -> String {
    match text.char_indices().nth(n_chars) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_counted_in_characters_and_shown_with_what_is_around_it() {
        let long = format!("{}(naïve|é{}", "ä".repeat(500), "x".repeat(500));
        let said = mistake_in_regex(&long).unwrap();
        let shown = format!("…{}(naïve|é{}…", "ä".repeat(20), "x".repeat(22));
        assert_eq!(said, format!("at character 501 in `{shown}`: unclosed group"));
        assert_eq!(mistake_in_regex("a{2,1}").unwrap().split(" in ").next(), Some("at character 2"));
        assert_eq!(mistake_in_regex("[a-z]+"), None);
    }

    #[test]
    fn a_long_line_is_cut_and_what_follows_it_is_not() {
        let said = excerpt(&format!("1(8): no such rule\nstart: {}\n<state>x", "y".repeat(1000)));
        assert!(said.starts_with("1(8): no such rule\nstart: yyy") && said.ends_with("y…"), "{said}");
        assert!(said.chars().count() < 130, "{said}");
    }
}
