//! One decision with everything it was made from, so that anybody can make it again.
//!
//! Owns the form (one line of JSON) and the replay. A record carries specification, state, signals and time; the
//! constants of the formula are those of [`FORMULA`], whose name changes with them.

use serde::{Deserialize, Serialize};
use stoker_crds::scaling::ScalingSpec;
use thiserror::Error;

use crate::{
    decide::{Decided, ScaleDecision, ScaleState, decide},
    signals::Signals,
};

/// Name of the formula and its constants. A record of another formula is not replayed.
pub const FORMULA: &str = "stoker/8";

/// See the module.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DecisionRecord {
    /// See [`FORMULA`].
    pub formula: String,
    /// When it was decided, Unix time in milliseconds.
    pub at_ms: u64,
    /// What the user had asked for.
    pub spec: ScalingSpec,
    /// State before.
    pub before: ScaleState,
    /// What was looked at.
    pub signals: Signals,
    /// What was decided.
    pub decision: ScaleDecision,
    /// State after.
    pub after: ScaleState,
}

/// What another specification would have decided, one decision after the other from the state before the first. Signals are those
/// that there were: the load of replicas that would not have been there is not known.
pub fn what_if_over<'a>(
    records: impl IntoIterator<Item = &'a DecisionRecord>,
    spec: &ScalingSpec,
) -> Vec<ScaleDecision> {
    let mut state: Option<ScaleState> = None;
    let mut decisions = Vec::new();
    for record in records {
        let before = state.unwrap_or_else(|| record.before.clone());
        let (decision, next) = decide(spec, &record.signals, &before, record.at_ms);
        decisions.push(decision);
        state = Some(next);
    }
    decisions
}

/// Why a record cannot be replayed.
#[derive(Debug, Error)]
pub enum RecordError {
    /// Not a record.
    #[error("not a decision record: {0}")]
    Form(#[from] serde_json::Error),
    /// Made by another version of the formula.
    #[error("the record was made by formula {found}, this is {FORMULA}: replay it with the version that made it")]
    Formula {
        /// The formula named in the record.
        found: String,
    },
}

/// What came out when a record was decided again.
#[derive(Clone, Debug, PartialEq)]
pub enum Replay {
    /// The same, to the last bit.
    Identical,
    /// Something else: the record was altered, or the function is not pure.
    Different {
        /// What came out this time.
        decision: Box<ScaleDecision>,
    },
}

impl DecisionRecord {
    /// Records a decision.
    pub fn new(spec: &ScalingSpec, before: &ScaleState, decided: Decided, at_ms: u64) -> Self {
        let Decided { decision, next, signals } = decided;
        Self {
            formula: FORMULA.to_owned(),
            at_ms,
            spec: spec.clone(),
            before: before.clone(),
            signals,
            decision,
            after: next,
        }
    }

    /// One line of JSON, without the newline.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).expect("a record is plain data")
    }

    /// Reads one line.
    pub fn parse(line: &str) -> Result<Self, RecordError> {
        let record: Self = serde_json::from_str(line)?;
        if record.formula != FORMULA {
            return Err(RecordError::Formula { found: record.formula });
        }
        Ok(record)
    }

    /// Decides again from what was recorded.
    pub fn replay(&self) -> Replay {
        let (decision, after) = decide(&self.spec, &self.signals, &self.before, self.at_ms);
        let again = Self { decision, after, ..self.clone() };
        // Lines are compared, not values: equality of floats would take 0.0 for -0.0.
        if again.to_line() == self.to_line() {
            Replay::Identical
        } else {
            Replay::Different { decision: Box::new(again.decision) }
        }
    }

    /// What would have been decided under another specification.
    pub fn what_if(&self, spec: &ScalingSpec) -> ScaleDecision {
        decide(spec, &self.signals, &self.before, self.at_ms).0
    }
}
