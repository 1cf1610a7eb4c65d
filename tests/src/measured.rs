//! What a benchmark learns about an operator from outside: its writes, from the API server's own audit log, and how long its
//! rounds took, from its metrics.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};
use jiff::Timestamp;
use serde_json::Value;
use stoker_cluster::ControlPlane;

use crate::operator::Operator;

const OPERATOR_USER: &str = "system:serviceaccount:stoker-system:stoker-operator";
const ROUNDS: &str = "stoker_operator_reconcile_duration_seconds";

/// Requests of the operator that changed something, by verb and resource.
#[derive(Clone, Debug, Default)]
pub struct Writes(BTreeMap<String, u64>);

impl Writes {
    /// All so far, of a control plane that records requests.
    pub fn read(control_plane: &ControlPlane) -> Result<Self> {
        let log = fs::read_to_string(control_plane.audit_log())?;
        // Most of a large log is about others, and parsing takes its time.
        let entries = log.lines().filter(|line| line.contains(OPERATOR_USER));
        let entries = entries.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut counts = BTreeMap::new();
        for entry in
            entries.filter(|entry| entry["user"]["username"] == OPERATOR_USER && entry["stage"] == "ResponseComplete")
        {
            let verb = entry["verb"].as_str().unwrap_or_default();
            if !["get", "list", "watch"].contains(&verb) {
                let resource = entry["objectRef"]["resource"].as_str().unwrap_or_default();
                *counts.entry(format!("{verb} {resource}")).or_default() += 1;
            }
        }
        Ok(Self(counts))
    }

    /// Those that came after `before`.
    pub fn since(&self, before: &Self) -> Self {
        let grown = self.0.iter().map(|(what, count)| (what.clone(), count - before.0.get(what).unwrap_or(&0)));
        Self(grown.filter(|(_, count)| *count > 0).collect())
    }

    /// Of the Lease.
    pub fn of_lease(&self) -> u64 {
        self.0.iter().filter(|(what, _)| what.ends_with(" leases")).map(|(_, count)| count).sum()
    }

    /// Of everything else.
    pub fn of_others(&self) -> u64 {
        self.0.values().sum::<u64>() - self.of_lease()
    }
}

/// Requests of the operator that the API server has answered, watches left out: where the time of its rounds goes.
#[derive(Clone, Debug, Default)]
pub struct Requests(BTreeMap<String, Vec<f64>>);

impl Requests {
    /// All so far, of a control plane that records requests.
    pub fn read(control_plane: &ControlPlane) -> Result<Self> {
        let log = fs::read_to_string(control_plane.audit_log())?;
        let entries = log.lines().filter(|line| line.contains(OPERATOR_USER));
        let entries = entries.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut millis: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for entry in entries.filter(|entry| entry["stage"] == "ResponseComplete" && entry["verb"] != "watch") {
            let moment = |field: &str| entry[field].as_str().and_then(|text| text.parse::<Timestamp>().ok());
            let (begun, ended) = (moment("requestReceivedTimestamp"), moment("stageTimestamp"));
            let (begun, ended) = begun.zip(ended).context("a request has a beginning and an end")?;
            let about = &entry["objectRef"];
            let what =
                [&entry["verb"], &about["resource"], &about["subresource"]].map(|word| word.as_str().unwrap_or(""));
            let took = ended.duration_since(begun).as_secs_f64() * 1e3;
            millis.entry(what.join(" ").trim().to_owned()).or_default().push(took);
        }
        Ok(Self(millis))
    }

    /// A line for each kind that came after `before`: how many, their seconds together, and milliseconds of the median and the
    /// 99th of a hundred.
    pub fn since(&self, before: &Self) -> Vec<String> {
        let line = |(what, millis): (&String, &Vec<f64>)| {
            let mut new = millis[before.0.get(what).map_or(0, Vec::len)..].to_vec();
            new.sort_by(f64::total_cmp);
            let (n, total) = (new.len(), new.iter().sum::<f64>() / 1e3);
            let (median, late) = (new.get(n / 2)?, new.get(n * 99 / 100)?);
            Some(format!("{what}: {n}, {total:.1} s, p50 {median:.1} ms, p99 {late:.1} ms"))
        };
        self.0.iter().filter_map(line).collect()
    }
}

/// What an operator tried to write about objects whose names begin so, refused writes included, in the order of the API
/// server's own log.
pub fn writes_about(control_plane: &ControlPlane, operator: &Operator, name: &str) -> Result<Vec<String>> {
    let log = fs::read_to_string(control_plane.audit_log())?;
    let by = operator.identity();
    let entries = log.lines().filter(|line| line.contains(&by));
    let entries = entries.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let writes = entries.filter(|entry| {
        let ours = entry["userAgent"].as_str().is_some_and(|agent| agent.contains(&by));
        let reads = ["get", "list", "watch"].contains(&entry["verb"].as_str().unwrap_or_default());
        ours && !reads && entry["objectRef"]["name"].as_str().is_some_and(|about| about.starts_with(name))
    });
    Ok(writes.map(|entry| format!("{} {}", entry["verb"], entry["requestURI"])).collect())
}

/// The operator's histogram of rounds.
#[derive(Debug)]
pub struct Rounds {
    /// Upper bound in seconds and number of rounds up to it.
    buckets: Vec<(f64, f64)>,
}

impl Rounds {
    /// All so far.
    pub fn read(operator: &Operator) -> Result<Self> {
        let text = operator.metrics()?;
        let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("{ROUNDS}_bucket{{le=\"")));
        let buckets = lines.map(|line| {
            let (bound, count) = line.split_once("\"} ").context("a bucket has a count")?;
            Ok((bound.replace("+Inf", "inf").parse()?, count.parse()?))
        });
        Ok(Self { buckets: buckets.collect::<Result<_>>()? })
    }

    /// The rounds that came after `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let buckets = self.buckets.iter().zip(&earlier.buckets);
        Self { buckets: buckets.map(|((bound, count), (_, before))| (*bound, count - before)).collect() }
    }

    /// How many.
    pub fn count(&self) -> f64 {
        self.buckets.last().map_or(0.0, |(_, count)| *count)
    }

    /// The upper bound of the bucket that holds the 99th percentile: never better than the truth.
    pub fn p99_seconds(&self) -> f64 {
        let total = self.count();
        let within = self.buckets.iter().find(|(_, count)| *count >= 0.99 * total);
        within.map_or(f64::INFINITY, |(bound, _)| *bound)
    }
}
