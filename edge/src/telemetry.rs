//! Logging: where it goes and in which form. Set up once by `main`.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Logs to standard error: text for a person at a terminal, one JSON object a line for a log collector.
pub fn init(filter: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter)?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // It would report a line that could not be written to the same broken pipe, and panic in whoever logged.
        .log_internal_errors(false);
    if std::io::stderr().is_terminal() {
        builder.init()
    } else {
        builder.json().flatten_event(true).init()
    }
    Ok(())
}
