//! Rules that others ship, with all their own knobs, by name: `kpa:target=70,scaleDownDelay=300`.
//!
//! Owns the spelling and the defaults. `target` is the knob that decides how dear a rule is; where it is not given, a
//! comparison looks for the best one.

use std::str::FromStr;

use thiserror::Error;

use crate::{
    fleet::Rule,
    rules::{HpaQueue, Kpa, Wva, WvaV2},
};

/// Which rule.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// See [`HpaQueue`].
    HpaQueue,
    /// See [`Kpa`].
    Kpa,
    /// See [`Wva`].
    Wva,
    /// See [`WvaV2`].
    WvaV2,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::HpaQueue, Self::Kpa, Self::Wva, Self::WvaV2];

    /// Its name in commands and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::HpaQueue => "hpa-queue",
            Self::Kpa => "kpa",
            Self::Wva => "wva",
            Self::WvaV2 => "wva-v2",
        }
    }

    /// Its knobs and what they are by default in the product; `target` first.
    fn knobs(self) -> &'static [(&'static str, f64)] {
        match self {
            Self::HpaQueue => HpaQueue::KNOBS,
            Self::Kpa => Kpa::KNOBS,
            Self::Wva => Wva::KNOBS,
            Self::WvaV2 => WvaV2::KNOBS,
        }
    }

    /// Targets from the dearest to the cheapest that make sense.
    pub fn range(self) -> (f64, f64) {
        match self {
            Self::HpaQueue => (0.1, 500.0),
            Self::Kpa => (3.0, 300.0),
            Self::Wva => (0.101, 1.0),
            Self::WvaV2 => (0.01, 1.0),
        }
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerRule {
    /// Which rule.
    pub kind: Kind,
    given: Vec<(&'static str, f64)>,
}

/// Not a rule.
#[derive(Debug, Error, PartialEq)]
pub enum PeerRuleError {
    /// No such rule.
    #[error(
        "no rule is called {0:?}: use hpa-queue, kpa, wva or wva-v2, with knobs such as kpa:target=70,scaleDownDelay=300"
    )]
    Name(String),
    /// No such knob.
    #[error("{rule} has no knob {knob:?}: it has {known}")]
    Knob {
        /// The rule.
        rule: &'static str,
        /// What was asked for.
        knob: String,
        /// What there is.
        known: String,
    },
    /// Not a number above zero.
    #[error("{knob} is {value:?}: use a number of at least 0, and a target above 0")]
    Value {
        /// The knob.
        knob: String,
        /// What was asked.
        value: String,
    },
}

/// The values of a rule's knobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Knobs<'a> {
    rival: &'a PeerRule,
    target: f64,
}

impl Knobs<'_> {
    /// What was given, or the default.
    pub(crate) fn get(self, name: &str) -> f64 {
        if name == "target" {
            return self.target;
        }
        let by_name = |(known, value): &(&str, f64)| (*known == name).then_some(*value);
        let given = self.rival.given.iter().find_map(by_name);
        given.or_else(|| self.rival.kind.knobs().iter().find_map(by_name)).expect("a rule asks for its own knobs")
    }
}

impl PeerRule {
    /// A rule with its product's defaults, and a target to be looked for.
    pub fn plain(kind: Kind) -> Self {
        Self { kind, given: Vec::new() }
    }

    /// The target, if it was given.
    pub fn target(&self) -> Option<f64> {
        self.given.iter().find(|(name, _)| *name == "target").map(|(_, value)| *value)
    }

    /// Its name and what was given, but for the target, which tables show by itself.
    pub fn label(&self) -> String {
        let knobs = self.given.iter().filter(|(name, _)| *name != "target");
        let knobs: Vec<String> = knobs.map(|(name, value)| format!("{name}={value}")).collect();
        if knobs.is_empty() { self.kind.name().to_owned() } else { format!("{}:{}", self.kind.name(), knobs.join(",")) }
    }

    /// The rule at a target.
    pub fn rule(&self, target: f64) -> Box<dyn Rule> {
        let knobs = Knobs { rival: self, target };
        match self.kind {
            Kind::HpaQueue => Box::new(HpaQueue::new(knobs)),
            Kind::Kpa => Box::new(Kpa::new(knobs)),
            Kind::Wva => Box::new(Wva::new(knobs)),
            Kind::WvaV2 => Box::new(WvaV2::new(knobs)),
        }
    }
}

impl FromStr for PeerRule {
    type Err = PeerRuleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, knobs) = text.split_once(':').unwrap_or((text, ""));
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == name);
        let kind = kind.ok_or_else(|| PeerRuleError::Name(name.to_owned()))?;
        let given = knobs.split(',').filter(|knob| !knob.is_empty()).map(|knob| given(kind, knob));
        Ok(Self { kind, given: given.collect::<Result<_, _>>()? })
    }
}

fn given(kind: Kind, text: &str) -> Result<(&'static str, f64), PeerRuleError> {
    let (knob, value) = text.split_once('=').unwrap_or((text, ""));
    let known = kind.knobs().iter().map(|(name, _)| *name);
    let name = known.clone().find(|name| *name == knob).ok_or_else(|| PeerRuleError::Knob {
        rule: kind.name(),
        knob: knob.to_owned(),
        known: known.collect::<Vec<_>>().join(", "),
    })?;
    let number = value.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    let number = number.filter(|number| name != "target" || *number > 0.0);
    number
        .map(|number| (name, number))
        .ok_or_else(|| PeerRuleError::Value { knob: knob.to_owned(), value: value.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knobs_are_the_rules_own_and_the_rest_stays_at_its_default() {
        let rival: PeerRule = "kpa:target=70,scaleDownDelay=300".parse().unwrap();
        assert_eq!(
            (rival.kind, rival.target(), rival.label().as_str()),
            (Kind::Kpa, Some(70.0), "kpa:scaleDownDelay=300")
        );
        let knobs = Knobs { rival: &rival, target: 70.0 };
        assert_eq!(["target", "scaleDownDelay", "stableWindow"].map(|name| knobs.get(name)), [70.0, 300.0, 60.0]);
        assert_eq!("wva-v2".parse(), Ok(PeerRule::plain(Kind::WvaV2)));
    }

    #[test]
    fn what_is_no_rule_says_what_there_is() {
        let refusal = |text: &str| text.parse::<PeerRule>().unwrap_err().to_string();
        assert!(refusal("keda").starts_with("no rule is called \"keda\": use hpa-queue, kpa, wva or wva-v2"));
        assert!(refusal("kpa:delay=3").starts_with("kpa has no knob \"delay\": it has target, stableWindow"));
        assert_eq!(refusal("kpa:target=0"), "target is \"0\": use a number of at least 0, and a target above 0");
        assert!(refusal("wva:interval=nan").starts_with("interval is \"nan\""));
    }
}
