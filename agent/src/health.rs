//! What liveness means: the process makes progress. Pure; `/healthz` and the watchdog ask the same function, so that what
//! the log says is what the kubelet sees.

use crate::lifecycle::Engine;

/// How long standing still is normal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Patience {
    /// Seconds without a completed step while work waits.
    pub step_seconds: f64,
    /// Seconds without progress of loading.
    pub load_seconds: f64,
}

impl Default for Patience {
    /// A step on the slowest supported machine (512 tokens of an 8 B model on two cores) takes under 60 s; network
    /// volumes pause for minutes while they fail over.
    fn default() -> Self {
        Self { step_seconds: 120.0, load_seconds: 600.0 }
    }
}

/// What was read off the process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Seconds since the last completed step while work was waiting; 0 when idle.
    pub stalled_seconds: f64,
    /// Seconds since loading last reported progress.
    pub load_idle_seconds: f64,
}

/// Whether the process is alive.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unhealthy {
    /// Work waits and no step completes.
    #[error("no step completed for {seconds:.0} s while work was waiting")]
    Hung {
        /// For how long.
        seconds: f64,
    },
    /// Loading does not move.
    #[error("loading made no progress for {seconds:.0} s")]
    LoadHung {
        /// For how long.
        seconds: f64,
    },
    /// The engine stopped; a restart may help.
    #[error("the engine stopped: {0}")]
    Died(String),
}

/// A model that cannot be loaded is healthy on purpose: it is tried again anyway, and restarting would hide the reason. A try
/// that stands still is not.
pub fn check(engine: &Engine, progress: Progress, patience: Patience) -> Result<(), Unhealthy> {
    match engine {
        Engine::Loading | Engine::LoadFailed(_) if progress.load_idle_seconds > patience.load_seconds => {
            Err(Unhealthy::LoadHung { seconds: progress.load_idle_seconds })
        }
        Engine::Running if progress.stalled_seconds > patience.step_seconds => {
            Err(Unhealthy::Hung { seconds: progress.stalled_seconds })
        }
        Engine::Died(reason) => Err(Unhealthy::Died(reason.clone())),
        Engine::Loading | Engine::Running | Engine::LoadFailed(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(engine: &Engine, stalled_seconds: f64, load_idle_seconds: f64) -> Result<(), Unhealthy> {
        check(engine, Progress { stalled_seconds, load_idle_seconds }, Patience::default())
    }

    #[test]
    fn an_engine_that_completes_no_step_while_work_waits_is_hung() {
        assert_eq!(after(&Engine::Running, 0.0, 1e6), Ok(()), "idle is healthy however long");
        let error = after(&Engine::Running, 121.0, 0.0).unwrap_err();
        assert_eq!(error.to_string(), "no step completed for 121 s while work was waiting");
    }

    #[test]
    fn a_load_that_moves_is_healthy_and_one_that_stands_still_is_not() {
        assert_eq!(after(&Engine::Loading, 0.0, 599.0), Ok(()));
        assert!(after(&Engine::Loading, 0.0, 601.0).is_err());
        assert!(after(&Engine::LoadFailed("no file".into()), 0.0, 601.0).is_err(), "the next try stands still");
    }

    #[test]
    fn only_failures_that_a_restart_may_mend_are_unhealthy() {
        assert_eq!(after(&Engine::LoadFailed("no file".into()), 0.0, 301.0), Ok(()), "the longest pause");
        assert!(after(&Engine::Died("step panicked".into()), 0.0, 0.0).is_err());
    }
}
