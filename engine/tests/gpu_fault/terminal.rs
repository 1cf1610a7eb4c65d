//! What a request hears of a GPU that fails.

use std::{sync::mpsc, thread, time::Duration};

use stoker_engine::{RequestEvent, RequestStream};

/// A hang would be the worst outcome of all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The stream's last event, or nothing if it does not end in time.
pub(crate) fn terminal(mut stream: RequestStream) -> Option<RequestEvent> {
    let (send, received) = mpsc::channel();
    thread::spawn(move || {
        while let Some(event) = stream.blocking_next() {
            if matches!(event, RequestEvent::Finished { .. }) {
                let _ = send.send(event);
            }
        }
    });
    received.recv_timeout(PATIENCE).ok()
}
