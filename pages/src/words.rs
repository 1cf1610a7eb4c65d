//! Numbers and times as people read them. Short, with their unit, the same everywhere.

use jiff::Timestamp;
use maud::{Markup, html};

/// What stands where nothing is known.
pub const UNKNOWN: &str = "–";

/// Tokens a second and the like: two or three digits that matter.
pub fn rate(value: f64) -> String {
    match value {
        _ if !value.is_finite() => UNKNOWN.to_owned(),
        10_000.0.. => format!("{:.0}k", value / 1000.0),
        1_000.0.. => format!("{:.1}k", value / 1000.0),
        10.0.. => format!("{value:.0}"),
        0.05.. => format!("{value:.1}"),
        _ => "0".to_owned(),
    }
}

/// Milliseconds or seconds.
pub fn seconds(value: f64) -> String {
    match value {
        _ if !value.is_finite() => UNKNOWN.to_owned(),
        100.0.. => format!("{value:.0} s"),
        10.0.. => format!("{value:.1} s"),
        1.0.. => format!("{value:.2} s"),
        0.01.. => format!("{:.0} ms", value * 1000.0),
        _ => format!("{:.1} ms", value * 1000.0),
    }
}

/// A share in percent.
pub fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.0} %", share * 100.0) } else { UNKNOWN.to_owned() }
}

/// A number in words without zeros behind its point that say nothing: of an axis, or of a target.
pub fn rounded(words: String) -> String {
    let end = words.find(|sign: char| !sign.is_ascii_digit() && sign != '.').unwrap_or(words.len());
    let (number, unit) = words.split_at(end);
    if !number.contains('.') {
        return words;
    }
    format!("{}{unit}", number.trim_end_matches('0').trim_end_matches('.'))
}

/// Bytes in the unit that says enough.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1000.0, unit + 1);
    }
    if value < 10.0 && unit > 0 { format!("{value:.1} {}", UNITS[unit]) } else { format!("{value:.0} {}", UNITS[unit]) }
}

/// Something that may not be known, in words.
pub fn known<T>(value: Option<T>, words: impl Fn(T) -> String) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), words)
}

/// A moment as a `time` element: the time of day, with the day where it is another one than `now`'s. All times are UTC.
pub fn moment(at_ms: u64, now_ms: u64) -> Markup {
    let Some(at) = timestamp(at_ms) else { return html! { (UNKNOWN) } };
    let is_today = timestamp(now_ms).is_some_and(|now| now.strftime("%F").to_string() == at.strftime("%F").to_string());
    let form = if is_today { "%H:%M:%S" } else { "%e %b %H:%M:%S" };
    html! { time datetime=(at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()) { (at.strftime(form).to_string().trim()) } }
}

/// The time of day without seconds, for axes.
pub fn minute(at_ms: u64) -> String {
    timestamp(at_ms).map_or_else(|| UNKNOWN.to_owned(), |at| at.strftime("%H:%M").to_string())
}

fn timestamp(at_ms: u64) -> Option<Timestamp> {
    Timestamp::from_millisecond(i64::try_from(at_ms).ok()?).ok()
}

/// The beginning of a text that somebody else wrote and that may be long.
pub fn beginning(text: &str, chars: usize) -> String {
    let mut kept: String = text.chars().take(chars).collect();
    if kept.len() < text.len() {
        kept.push('…');
    }
    kept
}

/// A part of an address, as it stands in one.
pub fn encoded(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut all, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => all.push(char::from(byte)),
            _ => all.push_str(&format!("%{byte:02X}")),
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_that_matter() {
        assert_eq!([0.0, 0.26, 9.94, 214.4, 1_240.0, 34_400.0].map(rate), ["0", "0.3", "9.9", "214", "1.2k", "34k"]);
        assert_eq!([0.0042, 0.12, 1.234, 12.3, 340.0].map(seconds), ["4.2 ms", "120 ms", "1.23 s", "12.3 s", "340 s"]);
        assert_eq!([1, 999, 1_500, 16_100_000_000].map(bytes), ["1 B", "999 B", "1.5 kB", "16 GB"]);
        assert_eq!((rate(f64::NAN), percent(f64::INFINITY), seconds(f64::NAN)), ("–".into(), "–".into(), "–".into()));
    }

    #[test]
    fn a_round_number_has_no_zeros_behind_its_point() {
        let words = ["8.00 s", "4.0k", "2.50 s", "10.0 s", "100 %", "20 ms", "–"];
        assert_eq!(words.map(|words| rounded(words.to_owned())), ["8 s", "4k", "2.5 s", "10 s", "100 %", "20 ms", "–"]);
    }

    #[test]
    fn a_day_is_named_when_it_is_another_one() {
        let at_ms = 1_763_892_671_000;
        assert!(moment(at_ms, at_ms + 1000).into_string().contains(">10:11:11<"));
        assert!(moment(at_ms, at_ms + 90_000_000).into_string().contains(">23 Nov 10:11:11<"));
        assert_eq!(moment(u64::MAX, at_ms).into_string(), "–");
    }

    #[test]
    fn a_text_of_64_kilobytes_is_cut_and_says_so() {
        assert_eq!(beginning(&"ü".repeat(65_536), 3), "üüü…");
        assert_eq!(beginning("üü", 2), "üü");
    }

    #[test]
    fn nothing_leaves_its_part_of_an_address() {
        assert_eq!(encoded("a b/ü?&\"<"), "a%20b%2F%C3%BC%3F%26%22%3C");
    }
}
