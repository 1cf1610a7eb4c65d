//! Traces as others publish them, read without conversion. Owns their columns and what of them becomes a request.
//!
//! | form | known by | time | a failed request |
//! |---|---|---|---|
//! | Azure LLM inference 2023, 2024 (CSV) | `TIMESTAMP,ContextTokens,GeneratedTokens` | a date and time | 0 generated tokens |
//! | BurstGPT (CSV) | `Timestamp`, `Request tokens`, `Response tokens` | seconds | 0 response tokens |
//! | Mooncake (JSON lines) | `timestamp`, `input_length`, `output_length`, `hash_ids` | milliseconds | 0 tokens of output |
//!
//! Mooncake names the blocks of 512 tokens of each prompt, and a request keeps the names. Those at its beginning that an earlier request
//! had also count as cached, for who has no cache to look into: that is a cache without end, shared by all replicas, and so the
//! best case.

use std::collections::HashSet;

use jiff::{Timestamp, civil, tz::TimeZone};
use serde::Deserialize;

use crate::{HASH_BLOCK_TOKENS, HashIds, Request, Trace, TraceError, trace::ReadTrace};

/// Rows may be this much out of order; what lies further back is a clock that jumped.
const DISORDER_SECONDS_MAX: f64 = 1.0;

/// How a file is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Form {
    /// Comma-separated with named columns.
    Csv(Columns),
    /// Mooncake's JSON lines.
    Mooncake,
}

/// Where a request's numbers stand in a row.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Columns {
    time: usize,
    is_date: bool,
    prompt: usize,
    completion: usize,
}

impl Form {
    /// By the first line; `None` when it is none of these.
    pub fn of(text: &str) -> Option<Self> {
        let first = text.lines().next()?.trim_start_matches('\u{feff}').trim();
        if first.starts_with('{') {
            return serde_json::from_str::<MooncakeRow>(first).is_ok().then_some(Self::Mooncake);
        }
        let names: Vec<&str> = first.split(',').map(str::trim).collect();
        let at = |name: &str| names.iter().position(|found| *found == name);
        let azure = || Some((at("TIMESTAMP")?, true, at("ContextTokens")?, at("GeneratedTokens")?));
        let burst_gpt = || Some((at("Timestamp")?, false, at("Request tokens")?, at("Response tokens")?));
        let (time, is_date, prompt, completion) = azure().or_else(burst_gpt)?;
        Some(Self::Csv(Columns { time, is_date, prompt, completion }))
    }
}

/// A row before its time counts from the beginning.
struct Row {
    seconds: f64,
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u32,
    hash_ids: HashIds,
}

#[derive(Deserialize)]
struct MooncakeRow {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

pub(crate) fn read(name: &str, text: &str, form: Form) -> Result<ReadTrace, TraceError> {
    let mut seen = HashSet::new();
    let (mut rows, mut left_out, mut newest) = (Vec::new(), 0, f64::NEG_INFINITY);
    let header_lines = usize::from(matches!(form, Form::Csv(_)));
    let lines = text.lines().enumerate().skip(header_lines).filter(|(_, line)| !line.trim().is_empty());
    for (idx, line) in lines {
        let refuse = |reason| TraceError::Line { line: idx + 1, reason };
        let row = match form {
            Form::Csv(columns) => csv_row(line, columns),
            Form::Mooncake => mooncake_row(line, &mut seen),
        }
        .map_err(refuse)?;
        if row.seconds < newest - DISORDER_SECONDS_MAX {
            let reason =
                format!("{:.1} s before a row above it: the clock jumped, cut the file there", newest - row.seconds);
            return Err(refuse(reason));
        }
        newest = newest.max(row.seconds);
        if row.completion_tokens == 0 || row.prompt_tokens == 0 {
            left_out += 1;
        } else {
            rows.push(row);
        }
    }
    rows.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let begin = rows.first().ok_or(TraceError::Empty)?.seconds;
    let request = |row: &Row| Request {
        arrived: row.seconds - begin,
        prompt_tokens: row.prompt_tokens,
        cached_tokens: row.cached_tokens,
        completion_tokens: row.completion_tokens,
        hash_ids: row.hash_ids.clone(),
    };
    Ok(ReadTrace::of(Trace::of(name, rows.iter().map(request).collect())?, left_out))
}

fn csv_row(line: &str, columns: Columns) -> Result<Row, String> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let cell = |idx: usize| cells.get(idx).copied().ok_or_else(|| format!("column {} is missing", idx + 1));
    let tokens = |idx: usize| {
        let text = cell(idx)?;
        text.parse().map_err(|_| format!("{text:?} is no count of tokens"))
    };
    let time = cell(columns.time)?;
    let seconds = if columns.is_date { date_seconds(time) } else { time.parse().ok() };
    let seconds = seconds.filter(|seconds: &f64| seconds.is_finite()).ok_or_else(|| format!("{time:?} is no time"))?;
    Ok(Row {
        seconds,
        prompt_tokens: tokens(columns.prompt)?,
        cached_tokens: 0,
        completion_tokens: tokens(columns.completion)?,
        hash_ids: HashIds::default(),
    })
}

/// The trace of 2023 writes no zone, that of 2024 writes one; only differences count.
fn date_seconds(text: &str) -> Option<f64> {
    let with_zone = || text.parse::<Timestamp>().ok();
    let without = || text.parse::<civil::DateTime>().ok()?.to_zoned(TimeZone::UTC).ok().map(|zoned| zoned.timestamp());
    let timestamp = with_zone().or_else(without)?;
    Some(timestamp.as_second() as f64 + f64::from(timestamp.subsec_nanosecond()) * 1e-9)
}

fn mooncake_row(line: &str, seen: &mut HashSet<u64>) -> Result<Row, String> {
    let mut row: MooncakeRow = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let cached_blocks = row.hash_ids.iter().take_while(|id| seen.contains(id)).count() as u32;
    seen.extend(&row.hash_ids);
    let cached = cached_blocks.saturating_mul(HASH_BLOCK_TOKENS);
    row.hash_ids.truncate(row.input_length.div_ceil(HASH_BLOCK_TOKENS) as usize);
    Ok(Row {
        seconds: row.timestamp / 1000.0,
        prompt_tokens: row.input_length,
        cached_tokens: cached.min(row.input_length.saturating_sub(1)),
        completion_tokens: row.output_length,
        hash_ids: row.hash_ids.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(text: &str) -> Vec<(f64, u32, u32, u32)> {
        let read = Trace::read("x", text).unwrap();
        let rounded = |seconds: f64| (seconds * 1000.0).round() / 1000.0;
        let tuple = |r: &Request| (rounded(r.arrived), r.prompt_tokens, r.cached_tokens, r.completion_tokens);
        read.trace.requests.iter().map(tuple).collect()
    }

    #[test]
    fn azure_of_2023_has_windows_line_ends_and_no_zone() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n\
                    2023-11-16 18:17:04.0319600,3180,8\r\n";
        assert_eq!(arrivals(text), [(0.0, 4808, 0, 10), (0.052, 3180, 0, 8)]);
    }

    #[test]
    fn azure_of_2024_names_its_zone() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n\
                    2024-05-10 00:00:01.017335+00:00,2399,6\n";
        assert_eq!(arrivals(text), [(0.0, 2162, 0, 5), (1.007, 2399, 0, 6)]);
    }

    #[test]
    fn burst_gpt_is_read_by_its_columns_and_its_failures_are_left_out_and_told() {
        let text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                    5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n\
                    118,GPT-4,417,276,693,API log\n";
        assert_eq!(arrivals(text), [(0.0, 472, 0, 18), (113.0, 417, 0, 276)]);
        let mut told = String::new();
        Trace::read("x", text).unwrap().tell(|text| told = text);
        assert_eq!(told, "x: 1 requests without an answer are left out");
        let newer = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                     5.5,a,1.5,ChatGPT,472,18,490,Conversation log\n";
        assert_eq!(arrivals(newer), [(0.0, 472, 0, 18)]);
    }

    #[test]
    fn mooncake_caches_what_an_earlier_prompt_began_with_and_keeps_the_names() {
        let text = "{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 500, \"hash_ids\": [0, 1, 2]}\n\
                    {\"timestamp\": 3000, \"input_length\": 1500, \"output_length\": 3, \"hash_ids\": [0, 1, 9]}\n\
                    {\"timestamp\": 3000, \"input_length\": 900, \"output_length\": 3, \"hash_ids\": [7, 1]}\n";
        assert_eq!(arrivals(text), [(0.0, 1100, 0, 500), (3.0, 1500, 1024, 3), (3.0, 900, 0, 3)]);
        let read = Trace::read("x", text).unwrap();
        let named: Vec<&[u64]> = read.trace.requests.iter().map(|request| request.hash_ids.as_slice()).collect();
        assert_eq!(named, [&[0, 1, 2][..], &[0, 1, 9], &[7, 1]]);
    }

    /// Each form, with a clock that goes back by more than disorder, and one that jumps ahead by two days.
    #[test]
    fn a_clock_that_jumps_is_refused_or_shortened_in_every_form() {
        let azure_2023 = |day: u32, hour: u32| format!("2023-11-{day} {hour}:17:03.9,4808,10");
        let azure_2024 = |day: u32, hour: u32| format!("2024-05-{day} {hour}:00:00.009930+00:00,2162,5");
        let seconds = |day: u32, hour: u32| f64::from(day * 24 + hour) * 3600.0;
        let burst_gpt = |day: u32, hour: u32| format!("{},GPT-4,417,276,693,API log", seconds(day, hour));
        let mooncake = |day: u32, hour: u32| {
            let ms = seconds(day, hour) * 1000.0;
            format!("{{\"timestamp\": {ms}, \"input_length\": 1100, \"output_length\": 500, \"hash_ids\": []}}")
        };
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        let gpt = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n";
        type Row<'a> = &'a dyn Fn(u32, u32) -> String;
        let forms = [(azure, &azure_2023 as Row<'_>), (azure, &azure_2024), (gpt, &burst_gpt), ("", &mooncake)];
        for (head, row) in forms {
            let back = format!("{head}{}\n{}\n", row(16, 18), row(16, 17));
            let refusal = Trace::read("x", &back).unwrap_err().to_string();
            assert!(
                refusal.contains("3600.0 s before a row above it: the clock jumped, cut the file there"),
                "{refusal}"
            );
            let ahead = format!("{head}{}\n{}\n", row(16, 18), row(18, 18));
            let read = Trace::read("x", &ahead).unwrap();
            assert_eq!((read.gaps.n, read.trace.seconds), (1, 601.0), "{ahead}");
        }
    }

    #[test]
    fn a_row_that_is_none_and_a_clock_that_jumps_are_refused_with_their_line() {
        let head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,4808,10\n";
        let refusal = |row: &str| Trace::read("x", &format!("{head}{row}\n")).unwrap_err().to_string();
        assert_eq!(refusal("yesterday,1,1"), "line 3: \"yesterday\" is no time");
        assert_eq!(refusal("2023-11-16 18:17:04.9,-1,1"), "line 3: \"-1\" is no count of tokens");
        assert_eq!(refusal("2023-11-16 18:17:04.9,1"), "line 3: column 3 is missing");
        assert!(refusal("2023-11-16 17:17:03.9,1,1").starts_with("line 3: 3600.0 s before a row above it"));
    }
}
