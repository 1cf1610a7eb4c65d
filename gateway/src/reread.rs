//! Files that are read again when they change, as a Secret that is mounted does: within seconds, without a restart. Decides nothing.

use std::time::Duration;

/// A kubelet takes up to a minute to change files; this is little beside it.
const EVERY: Duration = Duration::from_secs(2);

/// Reads for ever, and hands over what was read; `None`: it could not be, which a person is told once for each cause.
pub async fn reread<T>(what: &str, read: impl Fn() -> anyhow::Result<T>, learn: impl Fn(Option<T>)) {
    let mut complaint = None;
    loop {
        tokio::time::sleep(EVERY).await;
        let (found, error) = match read() {
            Ok(found) => (Some(found), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        if let Some(error) = error.as_ref().filter(|error| complaint.as_ref() != Some(*error)) {
            tracing::error!(error, "{what} stays as it was");
        }
        complaint = error;
        learn(found);
    }
}
