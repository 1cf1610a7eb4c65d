//! `spec.scaling`: what a user may say about scaling, with a default for everything but `max`.
//!
//! Owns the fields, their defaults and the refusal of impossible ones, each naming the field and the fix: as CEL beside
//! the fields for the API server, and as [`ScalingSpec::errors`] for settings that never meet one. Plain serde without
//! the feature `resource`. Decides nothing.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How the number of replicas of one deployment follows its load.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "resource",
    derive(schemars::JsonSchema),
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "!has(self.min) || self.min <= self.max", "message": "scaling.min is above scaling.max: raise max or lower min"},
        {"rule": "!has(self.toZero) || !has(self.mode) || self.mode != 'external'", "message": "scaling.toZero with mode external, where nothing is decided: remove toZero, or use mode native"}
    ]))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScalingSpec {
    /// Replicas kept at least, 1 to 1000; with `toZero`, while there are any. Default: 1.
    #[serde(default = "one")]
    #[cfg_attr(feature = "resource", schemars(range(min = 1, max = 1000)))]
    pub min: u32,
    /// Replicas at most, 1 to 1000.
    #[cfg_attr(feature = "resource", schemars(range(min = 1, max = 1000)))]
    pub max: u32,
    /// Who acts on the decision: `native`, the operator; `advisory`, nobody: `replicas` stands and decisions are
    /// recorded; `external`: nothing is decided, `replicas` is set through the scale subresource. Default: `native`.
    #[serde(default)]
    pub mode: ScalingMode,
    /// What a replica may carry. Default: 80 % of its KV blocks, 50 ms from one token to the next, one second of
    /// prefill waiting.
    #[serde(default)]
    pub targets: Targets,
    /// What being wrong costs, either way. Default: a hundred late answers are as bad as an hour of a replica.
    #[serde(default)]
    pub prices: Prices,
    /// How fast and how reluctantly the number follows. Default: windows of 60 s and 6 s, up at once, down reluctantly.
    #[serde(default)]
    pub behavior: Behavior,
    /// Lets an idle deployment go to zero replicas. Default: never. It takes a gateway that leads its Service: it holds the
    /// first request until a replica is back, and without one the last replica stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_zero: Option<ToZero>,
    /// Nodes with room for a further replica that keep the model in memory, 0 to 16: a replica that starts there reads no disk and no
    /// network. It takes as much of a node's memory as the model has bytes, and no GPU. For a model that nodes keep: a `model.source` that is
    /// fetched, without `model.cache.claimName`. Default: 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "resource", schemars(range(min = 0, max = 16)))]
    pub standby: u32,
}

/// Who acts on the decision.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "resource", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum ScalingMode {
    /// The operator creates and drains replicas.
    #[default]
    Native,
    /// The scale subresource belongs to a person, an HPA or KEDA; nothing is decided.
    External,
    /// Decisions are computed and recorded, and nothing changes.
    Advisory,
}

/// What a replica may carry. Each target is one term of the pressure; the largest term decides.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "resource",
    derive(schemars::JsonSchema),
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "!has(self.kv) || self.kv > 0.0 && self.kv <= 1.0", "message": "scaling.targets.kv: use a share above 0 and at most 1, such as 0.8"},
        {"rule": "!has(self.slowdown) || self.slowdown > 1.0", "message": "scaling.targets.slowdown: use a number above 1, such as 2"},
        {"rule": "!has(self.queueSeconds) || self.queueSeconds > 0.0", "message": "scaling.targets.queueSeconds: use seconds above 0, such as 1"},
        {"rule": "!has(self.preemptionsPerMinute) || self.preemptionsPerMinute > 0.0", "message": "scaling.targets.preemptionsPerMinute: use a number above 0, such as 6"},
        {"rule": "!has(self.ttftMs) || self.ttftMs > 0.0", "message": "scaling.targets.ttftMs: use milliseconds above 0, or leave it out"},
        {"rule": "!has(self.itlMs) || self.itlMs > 0.0", "message": "scaling.targets.itlMs: use milliseconds above 0, or leave it out"}
    ]))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Targets {
    /// Share of a replica's KV blocks that sequences may reference, above 0 and at most 1. Default: 0.8.
    pub kv: f64,
    /// How many times as long as alone a request may stay in a replica, above 1: bounds latency where compute runs out
    /// before KV does. Default: what `itlMs` allows; 4 where a replica does not say what its steps cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowdown: Option<f64>,
    /// Seconds of prefill that may wait in front of a replica. Default: 1.
    pub queue_seconds: f64,
    /// Preemptions per minute and replica that are still normal. Default: 6.
    pub preemptions_per_minute: f64,
    /// 95th percentile of the time to first token, in milliseconds. Default: not looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Inter-token latency that users are promised, in milliseconds. A replica that says what its steps cost is given as much as
    /// it does within that; where it is set, its 95th percentile is looked at, too. Default: 50, faster than people read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub itl_ms: Option<f64>,
}

impl Default for Targets {
    fn default() -> Self {
        Self { kv: 0.8, slowdown: None, queue_seconds: 1.0, preemptions_per_minute: 6.0, ttft_ms: None, itl_ms: None }
    }
}

/// What being wrong costs, in any currency: how many replicas are kept spare follows from the ratio of the two.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "resource",
    derive(schemars::JsonSchema),
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "!has(self.lateAnswer) || self.lateAnswer >= 0.0", "message": "scaling.prices.lateAnswer: use a number of at least 0; 0 keeps no replica spare"},
        {"rule": "!has(self.replicaHour) || self.replicaHour > 0.0", "message": "scaling.prices.replicaHour: use a number above 0, such as 3"}
    ]))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Prices {
    /// An answer that is later than `targets` say, at least 0. Default: 0.03.
    pub late_answer: f64,
    /// A replica for an hour, above 0: its GPUs times what an hour of one costs. Default: 3.
    pub replica_hour: f64,
}

impl Default for Prices {
    fn default() -> Self {
        Self { late_answer: 0.03, replica_hour: 3.0 }
    }
}

/// How fast and how reluctantly the number of replicas follows the pressure.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "resource",
    derive(schemars::JsonSchema),
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "(has(self.panicWindowSeconds) ? self.panicWindowSeconds : 6) <= (has(self.stableWindowSeconds) ? self.stableWindowSeconds : 60)", "message": "scaling.behavior.panicWindowSeconds is above stableWindowSeconds: lower the one or raise the other"},
        {"rule": "!has(self.downPressure) || self.downPressure > 0.0 && self.downPressure <= 0.95", "message": "scaling.behavior.downPressure: use a share above 0 and at most 0.95, such as 0.9"}
    ]))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Behavior {
    /// Seconds over which load is averaged when nothing sudden happens, 2 to 600. Default: 60.
    #[cfg_attr(feature = "resource", schemars(range(min = 2, max = 600)))]
    pub stable_window_seconds: u32,
    /// Seconds over which a sudden rise is judged, 2 to stableWindowSeconds. Default: 6.
    #[cfg_attr(feature = "resource", schemars(range(min = 2, max = 600)))]
    pub panic_window_seconds: u32,
    /// Pressure the remaining replicas may have after a step down, above 0 and at most 0.95. Default: 0.95.
    pub down_pressure: f64,
    /// Seconds the lower number must have been enough before replicas go, 0 to 86400. Default: 600, and twice that for hours after
    /// going down was regretted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "resource", schemars(range(min = 0, max = 86_400)))]
    pub down_stabilization_seconds: Option<u32>,
    /// Replicas kept beyond what load needs, 0 to 100: what meets a jump of load, or the loss of a replica, until others have
    /// started. Default: as many as late answers would cost more than they do, by `prices`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "resource", schemars(range(min = 0, max = 100)))]
    pub spare_replicas: Option<u32>,
    /// How much one decision may add. Default: 4 replicas or 400 %.
    pub up: StepLimit,
    /// How much one decision may remove. Default: 1 replica or 50 %.
    pub down: StepLimit,
    /// Share of the serving replicas whose readings must be fresh. Default: half to go up, all to go down.
    pub quorum: Quorum,
}

impl Default for Behavior {
    fn default() -> Self {
        Self {
            stable_window_seconds: 60,
            panic_window_seconds: 6,
            down_pressure: 0.95,
            down_stabilization_seconds: None,
            spare_replicas: None,
            up: StepLimit { replicas: 4, percent: 400 },
            down: StepLimit { replicas: 1, percent: 50 },
            quorum: Quorum::default(),
        }
    }
}

/// The larger of two bounds on one step.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "resource", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StepLimit {
    /// Replicas one decision may always move, 1 to 1000.
    #[cfg_attr(feature = "resource", schemars(range(min = 1, max = 1000)))]
    pub replicas: u32,
    /// Percent of the replicas wanted so far that one decision may move, 0 to 10000.
    #[cfg_attr(feature = "resource", schemars(range(min = 0, max = 10_000)))]
    pub percent: u32,
}

impl StepLimit {
    /// Replicas one decision may move from `desired`.
    pub fn of(self, desired: u32) -> u32 {
        let share = u64::from(desired) * u64::from(self.percent) / 100;
        self.replicas.max(u32::try_from(share).unwrap_or(u32::MAX))
    }
}

/// Shares of the serving replicas whose readings must be fresh before the number may move.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[cfg_attr(
    feature = "resource",
    derive(schemars::JsonSchema),
    schemars(extend("x-kubernetes-validations" = [
        {"rule": "!has(self.up) || self.up > 0.0 && self.up <= 1.0", "message": "scaling.behavior.quorum.up: use a share above 0 and at most 1, such as 0.5"},
        {"rule": "!has(self.down) || self.down > 0.0 && self.down <= 1.0", "message": "scaling.behavior.quorum.down: use a share above 0 and at most 1, such as 1"}
    ]))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Quorum {
    /// Share needed to go up, above 0 and at most 1. Default: 0.5.
    pub up: f64,
    /// Share needed to go down, above 0 and at most 1. Default: 1: a replica that cannot be seen may be the busy one.
    pub down: f64,
}

impl Default for Quorum {
    fn default() -> Self {
        Self { up: 0.5, down: 1.0 }
    }
}

/// When an idle deployment goes to zero replicas.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "resource", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ToZero {
    /// Seconds without any request, at any replica or gateway, before the last replica goes, 10 to 86400. Default: 600.
    #[cfg_attr(feature = "resource", schemars(range(min = 10, max = 86_400)))]
    pub after_seconds: u32,
    /// The last replica stays when its return is learned to take longer than this, 1 to 3600. Default: 40, which is what is
    /// left of the 45 s that gateways hold a request.
    #[cfg_attr(feature = "resource", schemars(range(min = 1, max = 3600)))]
    pub max_wake_seconds: u32,
}

impl Default for ToZero {
    fn default() -> Self {
        Self { after_seconds: 600, max_wake_seconds: 40 }
    }
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands out references")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Nodes on standby at most: more are not preferred by replicas to come.
pub const STANDBY_MAX: u32 = 16;

/// Seconds that `toZero` takes, by field.
const IDLE_SECONDS: RangeInclusive<u32> = 10..=86_400;
const WAKE_SECONDS: RangeInclusive<u32> = 1..=3600;

/// Why a specification cannot be followed: the field, what was asked, and what to change.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum SpecError {
    /// `min` above `max`.
    #[error("scaling.min is {min} and scaling.max is {max}: raise max or lower min")]
    MinAboveMax {
        /// What was asked for `min`.
        min: u32,
        /// What was asked for `max`.
        max: u32,
    },
    /// A bound that would keep the deployment at no replica for ever.
    #[error("scaling.{field} is 0: use at least 1, and scaling.toZero to let an idle deployment go")]
    Zero {
        /// Which bound.
        field: &'static str,
    },
    /// Nothing is decided, so nothing goes to zero.
    #[error("scaling.toZero with mode external, where nothing is decided: remove toZero, or use mode native")]
    NobodyDecides,
    /// A time that is too short or too long.
    #[error("scaling.toZero.{field} is {value}: use {least} to {most} seconds")]
    ZeroSeconds {
        /// Which time.
        field: &'static str,
        /// What was asked.
        value: u32,
        /// The shortest one accepted.
        least: u32,
        /// The longest one accepted.
        most: u32,
    },
    /// More nodes than replicas to come would look at.
    #[error("scaling.standby is {nodes}: use 0 to {STANDBY_MAX} nodes")]
    Standby {
        /// What was asked.
        nodes: u32,
    },
    /// A share outside of 0 to 1.
    #[error("scaling.{field} is {value}: use a share above 0 and at most {limit}")]
    Share {
        /// Which share.
        field: &'static str,
        /// What was asked.
        value: f64,
        /// The largest one accepted.
        limit: f64,
    },
    /// A quantity that must be above zero.
    #[error("scaling.{field} is {value}: use a number above 0")]
    NotPositive {
        /// Which quantity.
        field: &'static str,
        /// What was asked.
        value: f64,
    },
    /// A slowdown that even a request alone does not meet.
    #[error("scaling.targets.slowdown is {value}: use a number above 1, such as 2")]
    Slowdown {
        /// What was asked.
        value: f64,
    },
    /// A price below nothing.
    #[error("scaling.prices.lateAnswer is {value}: use a number of at least 0; 0 keeps no replica spare")]
    Price {
        /// What was asked.
        value: f64,
    },
    /// A step limit that never moves.
    #[error("scaling.behavior.{field} allows no step: set replicas to at least 1")]
    NoStep {
        /// Which limit.
        field: &'static str,
    },
    /// A panic window that is not inside the stable one.
    #[error(
        "scaling.behavior.panicWindowSeconds is {panic} and stableWindowSeconds is {stable}: \
         use 2 to {STABLE_WINDOW_SECONDS_MAX} seconds, panic at most stable"
    )]
    Windows {
        /// Seconds of the panic window.
        panic: u32,
        /// Seconds of the stable window.
        stable: u32,
    },
}

/// The longest stable window: the history kept of each deployment is bounded by it.
pub const STABLE_WINDOW_SECONDS_MAX: u32 = 600;

impl ScalingSpec {
    /// The smallest specification: everything but the bounds is the default.
    pub fn between(min: u32, max: u32) -> Self {
        Self {
            min,
            max,
            mode: ScalingMode::default(),
            targets: Targets::default(),
            prices: Prices::default(),
            behavior: Behavior::default(),
            to_zero: None,
            standby: 0,
        }
    }

    /// Everything that is wrong with the specification; empty when it can be followed.
    pub fn errors(&self) -> Vec<SpecError> {
        let mut errors = self.bound_errors();
        errors.extend(self.target_errors());
        errors.extend(self.behavior_errors());
        errors.extend(self.to_zero.iter().flat_map(|rule| rule.errors(self.mode)));
        errors.extend((self.standby > STANDBY_MAX).then_some(SpecError::Standby { nodes: self.standby }));
        errors
    }

    fn bound_errors(&self) -> Vec<SpecError> {
        let zeros = [("min", self.min), ("max", self.max)];
        let mut errors: Vec<_> =
            zeros.iter().filter(|(_, value)| *value == 0).map(|(field, _)| SpecError::Zero { field }).collect();
        if self.min > self.max {
            errors.push(SpecError::MinAboveMax { min: self.min, max: self.max });
        }
        errors
    }

    fn target_errors(&self) -> Vec<SpecError> {
        let targets = &self.targets;
        let quantities = [
            ("targets.queueSeconds", Some(targets.queue_seconds)),
            ("targets.preemptionsPerMinute", Some(targets.preemptions_per_minute)),
            ("targets.ttftMs", targets.ttft_ms),
            ("targets.itlMs", targets.itl_ms),
        ];
        let mut errors: Vec<_> = quantities
            .into_iter()
            .filter_map(|(field, value)| value.map(|value| (field, value)))
            .filter(|(_, value)| !(value.is_finite() && *value > 0.0))
            .map(|(field, value)| SpecError::NotPositive { field, value })
            .collect();
        errors.extend(share("targets.kv", targets.kv, 1.0));
        let slowdown = targets.slowdown.filter(|slowdown| !(slowdown.is_finite() && *slowdown > 1.0));
        errors.extend(slowdown.map(|value| SpecError::Slowdown { value }));
        let Prices { late_answer, replica_hour } = self.prices;
        if !(late_answer.is_finite() && late_answer >= 0.0) {
            errors.push(SpecError::Price { value: late_answer });
        }
        if !(replica_hour.is_finite() && replica_hour > 0.0) {
            errors.push(SpecError::NotPositive { field: "prices.replicaHour", value: replica_hour });
        }
        errors
    }

    fn behavior_errors(&self) -> Vec<SpecError> {
        let behavior = &self.behavior;
        let mut errors: Vec<_> = [
            share("behavior.downPressure", behavior.down_pressure, 0.95),
            share("behavior.quorum.up", behavior.quorum.up, 1.0),
            share("behavior.quorum.down", behavior.quorum.down, 1.0),
        ]
        .into_iter()
        .flatten()
        .collect();
        let limits = [("up", behavior.up), ("down", behavior.down)];
        errors.extend(
            limits.iter().filter(|(_, limit)| limit.replicas == 0).map(|(field, _)| SpecError::NoStep { field }),
        );
        let (panic, stable) = (behavior.panic_window_seconds, behavior.stable_window_seconds);
        if panic < 2 || panic > stable || stable > STABLE_WINDOW_SECONDS_MAX {
            errors.push(SpecError::Windows { panic, stable });
        }
        errors
    }
}

impl ToZero {
    fn errors(&self, mode: ScalingMode) -> Vec<SpecError> {
        let seconds = [
            ("afterSeconds", self.after_seconds, IDLE_SECONDS),
            ("maxWakeSeconds", self.max_wake_seconds, WAKE_SECONDS),
        ];
        let wrong = seconds.into_iter().filter(|(_, value, range)| !range.contains(value));
        let wrong = wrong.map(|(field, value, range)| {
            let (least, most) = range.into_inner();
            SpecError::ZeroSeconds { field, value, least, most }
        });
        (mode == ScalingMode::External).then_some(SpecError::NobodyDecides).into_iter().chain(wrong).collect()
    }
}

fn share(field: &'static str, value: f64, limit: f64) -> Option<SpecError> {
    let fits = value.is_finite() && value > 0.0 && value <= limit;
    (!fits).then_some(SpecError::Share { field, value, limit })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(spec: &ScalingSpec) -> Vec<String> {
        spec.errors().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_smallest_specification_is_one_number() {
        let spec: ScalingSpec = serde_json::from_str(r#"{"max": 4}"#).unwrap();
        assert_eq!(spec, ScalingSpec::between(1, 4));
        assert!(spec.errors().is_empty());
    }

    #[test]
    fn an_unknown_field_is_refused() {
        assert!(serde_json::from_str::<ScalingSpec>(r#"{"max": 4, "targets": {"cpu": 0.5}}"#).is_err());
    }

    #[test]
    fn each_impossible_value_is_named_with_its_field_and_the_fix() {
        let mut spec = ScalingSpec::between(5, 2);
        spec.targets.kv = 1.2;
        spec.targets.queue_seconds = -1.0;
        spec.targets.slowdown = Some(1.0);
        spec.prices = Prices { late_answer: -1.0, replica_hour: 0.0 };
        spec.targets.itl_ms = Some(f64::NAN);
        spec.behavior.down_pressure = 0.0;
        spec.behavior.panic_window_seconds = 90;
        spec.behavior.down.replicas = 0;
        assert_eq!(
            messages(&spec),
            [
                "scaling.min is 5 and scaling.max is 2: raise max or lower min",
                "scaling.targets.queueSeconds is -1: use a number above 0",
                "scaling.targets.itlMs is NaN: use a number above 0",
                "scaling.targets.kv is 1.2: use a share above 0 and at most 1",
                "scaling.targets.slowdown is 1: use a number above 1, such as 2",
                "scaling.prices.lateAnswer is -1: use a number of at least 0; 0 keeps no replica spare",
                "scaling.prices.replicaHour is 0: use a number above 0",
                "scaling.behavior.downPressure is 0: use a share above 0 and at most 0.95",
                "scaling.behavior.down allows no step: set replicas to at least 1",
                "scaling.behavior.panicWindowSeconds is 90 and stableWindowSeconds is 60: use 2 to 600 seconds, panic \
                 at most stable",
            ]
        );
    }

    #[test]
    fn zero_replicas_are_a_matter_of_to_zero() {
        let fixes = messages(&ScalingSpec::between(0, 0));
        assert_eq!(fixes.len(), 2);
        assert!(fixes[0].contains("scaling.toZero"), "{fixes:?}");
    }

    #[test]
    fn going_to_zero_takes_somebody_who_decides_and_times_that_make_sense() {
        let mut spec = ScalingSpec { to_zero: Some(ToZero::default()), ..ScalingSpec::between(2, 4) };
        assert!(spec.errors().is_empty(), "min is kept while there are replicas");
        spec.mode = ScalingMode::External;
        spec.to_zero = Some(ToZero { after_seconds: 9, max_wake_seconds: 0 });
        assert_eq!(
            messages(&spec),
            [
                "scaling.toZero with mode external, where nothing is decided: remove toZero, or use mode native",
                "scaling.toZero.afterSeconds is 9: use 10 to 86400 seconds",
                "scaling.toZero.maxWakeSeconds is 0: use 1 to 3600 seconds",
            ]
        );
    }

    #[test]
    fn as_many_nodes_stand_by_as_replicas_would_look_at() {
        let with = |standby| messages(&ScalingSpec { standby, ..ScalingSpec::between(1, 4) });
        assert_eq!((with(16), with(17)), (vec![], vec!["scaling.standby is 17: use 0 to 16 nodes".to_owned()]));
    }

    #[test]
    fn a_step_limit_is_the_larger_of_its_two_bounds() {
        let limit = StepLimit { replicas: 2, percent: 50 };
        assert_eq!([0, 3, 10, 100].map(|desired| limit.of(desired)), [2, 2, 5, 50]);
    }
}
