//! What the address of a deployment's page asks for: how far back, which decision, which other settings.

use serde::{Deserialize, Deserializer};

use crate::words::encoded;

/// See the module.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct DeploymentQuery {
    /// How far back.
    #[serde(deserialize_with = "range")]
    pub range: Range,
    /// The decision made at this Unix time in milliseconds.
    #[serde(deserialize_with = "number")]
    pub at: Option<u64>,
    /// Other settings; those that are not given stay.
    #[serde(deserialize_with = "number")]
    pub min: Option<u32>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub max: Option<u32>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub kv: Option<f64>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub slowdown: Option<f64>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub queue: Option<f64>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub ttft: Option<f64>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub itl: Option<f64>,
}

/// Settings of scaling that may be tried.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Settings {
    /// `scaling.min`.
    pub min: u32,
    /// `scaling.max`.
    pub max: u32,
    /// `scaling.targets.kv`.
    pub kv: f64,
    /// `scaling.targets.slowdown`.
    pub slowdown: f64,
    /// `scaling.targets.queueSeconds`.
    pub queue: f64,
    /// `scaling.targets.ttftMs`.
    pub ttft: Option<f64>,
    /// `scaling.targets.itlMs`.
    pub itl: Option<f64>,
}

/// How far back.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Range {
    /// Ten minutes, the finest there is.
    #[default]
    Minutes,
    /// An hour.
    Hour,
    /// Six.
    SixHours,
    /// A day.
    Day,
}

impl Range {
    /// All, with what the address says and what people read.
    pub const ALL: [(Self, &'static str, &'static str); 4] = [
        (Self::Minutes, "10m", "10 minutes"),
        (Self::Hour, "1h", "1 hour"),
        (Self::SixHours, "6h", "6 hours"),
        (Self::Day, "24h", "24 hours"),
    ];

    /// How long it is.
    pub fn ms(self) -> u64 {
        match self {
            Self::Minutes => 600_000,
            Self::Hour => 3_600_000,
            Self::SixHours => 6 * 3_600_000,
            Self::Day => 24 * 3_600_000,
        }
    }

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(range, ..)| *range == self).map_or("10m", |(_, word, _)| word)
    }
}

impl DeploymentQuery {
    /// The settings in force with those of the address in their place; nothing if the address has none.
    pub fn tried(&self, in_force: Settings) -> Option<Settings> {
        let asked = self.min.is_some() || self.max.is_some();
        let targets = [self.kv, self.slowdown, self.queue, self.ttft, self.itl];
        if !asked && targets.iter().all(Option::is_none) {
            return None;
        }
        Some(Settings {
            min: self.min.unwrap_or(in_force.min),
            max: self.max.unwrap_or(in_force.max),
            kv: self.kv.unwrap_or(in_force.kv),
            slowdown: self.slowdown.unwrap_or(in_force.slowdown),
            queue: self.queue.unwrap_or(in_force.queue),
            ttft: self.ttft.or(in_force.ttft),
            itl: self.itl.or(in_force.itl),
        })
    }

    /// The address without its path.
    pub fn address(&self) -> String {
        let range = (self.range != Range::default()).then(|| self.range.word().to_owned());
        let at = self.at.map(|at| at.to_string());
        let whole = |value: Option<u32>| value.map(|value| value.to_string());
        let real = |value: Option<f64>| value.map(|value| value.to_string());
        let settings = [
            ("min", whole(self.min)),
            ("max", whole(self.max)),
            ("kv", real(self.kv)),
            ("slowdown", real(self.slowdown)),
            ("queue", real(self.queue)),
            ("ttft", real(self.ttft)),
            ("itl", real(self.itl)),
        ];
        let all = [("range", range), ("at", at)].into_iter().chain(settings);
        let said: Vec<String> = all.filter_map(|(name, value)| Some(format!("{name}={}", encoded(&value?)))).collect();
        if said.is_empty() { String::new() } else { format!("?{}", said.join("&")) }
    }

    pub(super) fn with_range(&self, range: Range) -> String {
        let address = Self { range, ..self.clone() }.address();
        if address.is_empty() { "?".to_owned() } else { address }
    }

    pub(super) fn with_decision(&self, at: Option<u64>) -> String {
        let address = Self { at, ..self.clone() }.address();
        if address.is_empty() { "?".to_owned() } else { address }
    }
}

fn range<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Range, D::Error> {
    let word = String::deserialize(deserializer)?;
    Ok(Range::ALL.iter().find(|(_, known, _)| *known == word).map(|(range, ..)| *range).unwrap_or_default())
}

/// A number, or nothing: an empty field of a form is one that was not filled in.
fn number<'de, D: Deserializer<'de>, T: std::str::FromStr>(deserializer: D) -> Result<Option<T>, D::Error> {
    Ok(String::deserialize(deserializer)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_not_given_stay() {
        let in_force = Settings { min: 1, max: 4, kv: 0.8, slowdown: 4.0, queue: 1.0, ttft: None, itl: Some(50.0) };
        assert_eq!(DeploymentQuery::default().tried(in_force), None);
        let query = DeploymentQuery { max: Some(9), ..DeploymentQuery::default() };
        assert_eq!(query.tried(in_force), Some(Settings { max: 9, ..in_force }));
    }

    #[test]
    fn a_decision_and_a_range_are_in_the_address() {
        let query = DeploymentQuery { range: Range::Day, max: Some(3), ..DeploymentQuery::default() };
        assert_eq!(query.with_decision(Some(17)), "?range=24h&at=17&max=3");
        assert_eq!(DeploymentQuery::default().with_decision(None), "?");
    }
}
