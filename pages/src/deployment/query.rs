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
    /// See `min`; inside, nothing means what it means in the object.
    #[serde(deserialize_with = "optional")]
    pub slowdown: Option<Option<f64>>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub queue: Option<f64>,
    /// See `slowdown`.
    #[serde(deserialize_with = "optional")]
    pub ttft: Option<Option<f64>>,
    /// See `slowdown`.
    #[serde(deserialize_with = "optional")]
    pub itl: Option<Option<f64>>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub late: Option<f64>,
    /// See `min`.
    #[serde(deserialize_with = "number")]
    pub hour: Option<f64>,
    /// See `slowdown`.
    #[serde(deserialize_with = "optional")]
    pub spare: Option<Option<u32>>,
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
    /// `scaling.targets.slowdown`; `None` is as much as the inter-token latency allows.
    pub slowdown: Option<f64>,
    /// `scaling.targets.queueSeconds`.
    pub queue: f64,
    /// `scaling.targets.ttftMs`.
    pub ttft: Option<f64>,
    /// `scaling.targets.itlMs`.
    pub itl: Option<f64>,
    /// `scaling.prices.lateAnswer`.
    pub late: f64,
    /// `scaling.prices.replicaHour`.
    pub hour: f64,
    /// `scaling.behavior.spareReplicas`; `None` is as many as prices say.
    pub spare: Option<u32>,
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
        let bounds = self.min.is_some() || self.max.is_some();
        let targets = [self.kv, self.queue, self.late, self.hour].iter().any(Option::is_some);
        let optional = [self.slowdown, self.ttft, self.itl].iter().any(Option::is_some) || self.spare.is_some();
        if !(bounds || targets || optional) {
            return None;
        }
        Some(Settings {
            min: self.min.unwrap_or(in_force.min),
            max: self.max.unwrap_or(in_force.max),
            kv: self.kv.unwrap_or(in_force.kv),
            slowdown: self.slowdown.unwrap_or(in_force.slowdown),
            queue: self.queue.unwrap_or(in_force.queue),
            ttft: self.ttft.unwrap_or(in_force.ttft),
            itl: self.itl.unwrap_or(in_force.itl),
            late: self.late.unwrap_or(in_force.late),
            hour: self.hour.unwrap_or(in_force.hour),
            spare: self.spare.unwrap_or(in_force.spare),
        })
    }

    /// The address without its path.
    pub fn address(&self) -> String {
        let range = (self.range != Range::default()).then(|| self.range.word().to_owned());
        let at = self.at.map(|at| at.to_string());
        let whole = |value: Option<u32>| value.map(|value| value.to_string());
        let real = |value: Option<f64>| value.map(|value| value.to_string());
        let optional = |value: Option<Option<f64>>| value.map(|value| real(value).unwrap_or_default());
        let settings = [
            ("min", whole(self.min)),
            ("max", whole(self.max)),
            ("kv", real(self.kv)),
            ("slowdown", optional(self.slowdown)),
            ("queue", real(self.queue)),
            ("ttft", optional(self.ttft)),
            ("itl", optional(self.itl)),
            ("late", real(self.late)),
            ("hour", real(self.hour)),
            ("spare", self.spare.map(|spare| whole(spare).unwrap_or_default())),
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

/// The same of a setting that may be without a number: an empty field asks for that.
fn optional<'de, D: Deserializer<'de>, T: std::str::FromStr>(deserializer: D) -> Result<Option<Option<T>>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let number = text.trim().parse().ok();
    Ok((number.is_some() || text.trim().is_empty()).then_some(number))
}

#[cfg(test)]
mod tests {
    use serde::de::value::{Error, MapDeserializer};

    use super::*;

    const IN_FORCE: Settings = Settings {
        min: 1,
        max: 4,
        kv: 0.8,
        slowdown: Some(4.0),
        queue: 1.0,
        ttft: None,
        itl: Some(50.0),
        late: 0.03,
        hour: 3.0,
        spare: Some(1),
    };

    #[test]
    fn settings_that_are_not_given_stay() {
        assert_eq!(DeploymentQuery::default().tried(IN_FORCE), None);
        let query = DeploymentQuery { max: Some(9), ..DeploymentQuery::default() };
        assert_eq!(query.tried(IN_FORCE), Some(Settings { max: 9, ..IN_FORCE }));
        let query = DeploymentQuery { late: Some(0.0), spare: Some(Some(0)), ..DeploymentQuery::default() };
        assert_eq!(query.tried(IN_FORCE), Some(Settings { late: 0.0, spare: Some(0), ..IN_FORCE }));
    }

    #[test]
    fn an_empty_field_takes_away_what_may_be_without_a_number_and_leaves_the_rest() {
        let fields = [("kv", ""), ("slowdown", " "), ("itl", "soon"), ("spare", "")];
        let fields = MapDeserializer::<_, Error>::new(fields.into_iter());
        let query = DeploymentQuery::deserialize(fields).expect("a query is text");
        assert_eq!(query.tried(IN_FORCE), Some(Settings { slowdown: None, spare: None, ..IN_FORCE }));
        assert_eq!(query.address(), "?slowdown=&spare=");
    }

    #[test]
    fn a_decision_and_a_range_are_in_the_address() {
        let query = DeploymentQuery { range: Range::Day, max: Some(3), ..DeploymentQuery::default() };
        assert_eq!(query.with_decision(Some(17)), "?range=24h&at=17&max=3");
        assert_eq!(DeploymentQuery::default().with_decision(None), "?");
    }
}
