//! Decision records as lines of text: a file that `--record` wrote, or what the operator answers.

use anyhow::{Context, Result, ensure};
use stoker_scaling::DecisionRecord;

/// Whether a text is made of decision records, by its first line.
pub(crate) fn are_in(text: &str) -> bool {
    text.lines().next().is_some_and(|line| line.contains("\"formula\""))
}

/// Reads a line each; `source` names the text in refusals.
pub(crate) fn parse(source: &str, text: &str) -> Result<Vec<DecisionRecord>> {
    let parse = |(idx, line)| DecisionRecord::parse(line).with_context(|| format!("{source} line {}", idx + 1));
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let records = lines.map(parse).collect::<Result<Vec<_>>>()?;
    ensure!(!records.is_empty(), "{source} holds no decision");
    Ok(records)
}
