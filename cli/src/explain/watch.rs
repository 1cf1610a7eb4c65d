//! The live loop: every decision as it is made, for as long as somebody looks.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use stoker_scaling::DecisionRecord;

use super::{
    journal::Journal,
    source::Source,
    words::{self, Verdict},
};

/// The operator decides as often.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Watches until a decision does not come out again, or the process is stopped. An operator that cannot be asked is
/// named once and asked again: it may be restarting.
pub(super) async fn watch(source: &Source, mut journal: Option<&mut Journal>) -> Result<ExitCode> {
    let mut seen = source.records(0).await?;
    let mut last: Option<DecisionRecord> = None;
    let mut complaint = String::new();
    loop {
        if let Some(journal) = &mut journal {
            journal.append(&seen)?;
        }
        // Of what was there before, the newest says enough.
        let shown = if last.is_none() { seen.len().saturating_sub(1) } else { 0 };
        for record in &seen[shown..] {
            println!("{}", words::live(last.as_ref(), record));
            last = Some(record.clone());
        }
        let verdict = Verdict::of(&seen);
        if !verdict.is_reproduced() {
            println!("{verdict}");
            return Ok(verdict.exit_code());
        }
        tokio::time::sleep(LOOK_EVERY).await;
        seen = look(source, last.as_ref(), &mut complaint).await;
    }
}

async fn look(source: &Source, last: Option<&DecisionRecord>, complaint: &mut String) -> Vec<DecisionRecord> {
    match source.records(last.map_or(0, |record| record.at_ms)).await {
        Ok(records) => {
            complaint.clear();
            records
        }
        Err(error) => {
            let words = format!("{error:#}");
            if *complaint != words {
                eprintln!("{words}; asking again");
                *complaint = words;
            }
            Vec::new()
        }
    }
}
