//! Threads that stay awake for what was announced. One that sleeps wakes up 30 to 280 us after it is called (measured on a
//! virtual machine with an H200), and a first token passes two of them: they are called when its step is about to end, and then
//! look out for it. Bounded, so that a token that is late costs no core.

use std::{
    thread,
    time::{Duration, Instant},
};

/// How long a thread looks out for what was announced: what a step computes behind its announcement, with room.
const AWAKE: Duration = Duration::from_millis(1);

/// Asks `poll` again and again until it has something; `None` after a while. Other threads may take the core.
pub(crate) fn look_out<T>(mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + AWAKE;
    loop {
        let found = poll();
        if found.is_some() || Instant::now() >= until {
            return found;
        }
        thread::yield_now();
    }
}

/// The same inside a task: others of its thread run in between. What `poll` gives is returned at once, so dropping the future
/// loses nothing.
pub(crate) async fn look_out_async<T>(mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let until = Instant::now() + AWAKE;
    loop {
        let found = poll();
        if found.is_some() || Instant::now() >= until {
            return found;
        }
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_taken_and_what_does_not_come_is_given_up() {
        assert_eq!(look_out(|| Some("token")), Some("token"));
        let begun = Instant::now();
        assert_eq!(look_out(|| None::<()>), None);
        assert!(begun.elapsed() >= AWAKE);
    }
}
