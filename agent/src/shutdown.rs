//! Signals, the clock of a drain and that of what the replica remembers: turns SIGTERM and SIGINT into lifecycle events. Ends nothing
//! itself, except that a second signal exits at once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use stoker_replica::history::SAMPLE_EVERY;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};

use crate::{
    lifecycle::{Departure, Event, Purpose},
    replica::Replica,
};

/// How often drains move on and latencies are published. A drain ends at most this much late.
const TICK: Duration = Duration::from_millis(100);
/// Exit code after a second signal, as a shell gives to an interrupted process.
const INTERRUPTED: i32 = 130;

/// Ticks the replica until the process ends.
pub async fn tick(replica: Arc<Replica>) {
    let mut interval = interval(TICK);
    loop {
        interval.tick().await;
        replica.tick();
    }
}

/// Lets the replica remember how it is until the process ends.
pub async fn remember(replica: Arc<Replica>) {
    let mut samples = interval(SAMPLE_EVERY);
    // A sample that was late is not made up for: there is one in each step at most.
    samples.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        samples.tick().await;
        replica.remember();
    }
}

/// The first signal drains, the second exits.
pub async fn watch_signals(replica: Arc<Replica>) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut received = 0;
    loop {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        received += 1;
        if received > 1 {
            tracing::warn!(signal = name, "second signal: exiting without waiting for open requests");
            std::process::exit(INTERRUPTED);
        }
        let window = replica.settings().drain;
        tracing::info!(signal = name, deadline_seconds = window.deadline_seconds, "draining before exit");
        replica.apply(Event::Leave(Departure::new(Purpose::Exit, Instant::now(), window)));
    }
}
