//! What an agent remembers of its own load, for an operator that begins to lead.

use stoker_crds::{
    contract::{AgentPhase, LoadReport},
    history::{LoadHistory, LoadSample},
};

use super::{Ring, whole_seconds};
use crate::rate::per_second;

/// See the module.
#[derive(Debug, Default)]
pub struct Memory {
    ring: Ring,
    last: Option<LoadReport>,
}

impl Memory {
    /// Takes in how it is now, which is every [`SAMPLE_EVERY`](super::SAMPLE_EVERY).
    pub fn note(&mut self, now: LoadReport) {
        self.ring.push(sample(&now, self.last.as_ref()));
        self.last = Some(now);
    }

    /// All of it, as it is told now.
    pub fn told(&self, now: &LoadReport) -> LoadHistory {
        LoadHistory {
            start_id: now.start_id.clone(),
            up_ms: now.up_ms,
            fine: self.ring.fine().collect(),
            minutes: self.ring.minutes().collect(),
        }
    }
}

fn sample(now: &LoadReport, before: Option<&LoadReport>) -> LoadSample {
    let known = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
    let tokens = before.and_then(|before| {
        let generated = now.generated_tokens?.saturating_sub(before.generated_tokens?);
        per_second(generated, now.up_ms.saturating_sub(before.up_ms))
    });
    let kv = (now.total_blocks > 0).then(|| f64::from(now.referenced_blocks) / f64::from(now.total_blocks));
    LoadSample {
        at_seconds: whole_seconds(now.up_ms),
        wanted: f32::NAN,
        serving: if now.phase == AgentPhase::Ready { 1.0 } else { 0.0 },
        kv: known(kv),
        running: now.running as f32,
        waiting: now.waiting as f32,
        tokens: known(tokens),
        ttft: known(now.ttft_p95_seconds),
        itl: known(now.itl_p95_seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::is_believable;

    #[test]
    fn an_agent_tells_what_it_was_and_is_believed() {
        let report = |seconds: u64, generated, total_blocks, phase| LoadReport {
            start_id: "a".to_owned(),
            up_ms: seconds * 1000,
            generated_tokens: Some(generated),
            referenced_blocks: total_blocks / 4,
            ttft_p95_seconds: (generated > 0).then_some(0.25),
            phase,
            ..LoadReport::idle(total_blocks)
        };
        let mut memory = Memory::default();
        memory.note(report(10, 0, 0, AgentPhase::Loading));
        memory.note(report(20, 0, 100, AgentPhase::Ready));
        memory.note(report(30, 500, 100, AgentPhase::Ready));
        let told = memory.told(&report(31, 500, 100, AgentPhase::Ready));
        assert!(is_believable(&told, "a"));
        let rows = serde_json::to_string(&told.fine).unwrap();
        let loading = "[10,0.0,null,0.0,0.0,null,null,null]";
        assert_eq!(
            rows,
            format!("[{loading},[20,1.0,0.25,0.0,0.0,0.0,null,null],[30,1.0,0.25,0.0,0.0,50.0,250.0,null]]")
        );
        assert_eq!((told.minutes.len(), told.minutes[0].at_seconds), (1, 30));
    }
}
