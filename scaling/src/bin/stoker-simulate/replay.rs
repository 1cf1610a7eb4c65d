//! Recorded decisions made again: each must come out identical, is explained, and may be asked under other settings.

use anyhow::{Result, bail};
use stoker_scaling::{DecisionRecord, Replay, explain};

use crate::settings;

/// The explanation of each record, and what the settings would have changed.
pub(crate) fn replayed(records: &[DecisionRecord], changes: &[String]) -> Result<String> {
    let mut text = String::new();
    for (idx, record) in records.iter().enumerate() {
        if let Replay::Different { decision } = record.replay() {
            let (then, now) = (record.decision.desired, decision.desired);
            bail!("record {}: the decision was {then} replicas, a replay gives {now}: the record was altered", idx + 1);
        }
        text += &explain(record);
        if !changes.is_empty() {
            let other = record.what_if(&settings::spec(record.spec.clone(), changes)?);
            text += &format!("  with {}: {}\n", changes.join(" "), other.desired);
        }
    }
    text += &format!("{} decisions replayed, each identical\n", records.len());
    Ok(text)
}
