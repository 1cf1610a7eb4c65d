//! What a request had of its devices' time, on its way to who accounts for it: in the marks of an answer that has some
//! (`passage.rs`), else in the head of one that is there as a whole. It is in no body: those are the same whenever they are made.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use axum::http::{HeaderName, HeaderValue};

/// Of an answer: device seconds. Of a request, `marks`: marks are to tell them.
pub(crate) const DEVICE_SECONDS: HeaderName = HeaderName::from_static("x-stoker-device-seconds");

/// What the sequences of one request had that have ended.
#[derive(Debug, Default)]
pub(crate) struct DeviceTime {
    nanos: AtomicU64,
}

impl DeviceTime {
    /// One more sequence had this.
    pub(crate) fn add(&self, time: Duration) {
        self.nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The head of the answer tells it.
    pub(crate) fn header(&self) -> [(HeaderName, HeaderValue); 1] {
        let time = Duration::from_nanos(self.nanos.load(Ordering::Relaxed));
        let seconds = format!("{:.6}", time.as_secs_f64());
        [(DEVICE_SECONDS, HeaderValue::from_str(&seconds).expect("digits and a point are visible ASCII"))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_of_a_request_add_up() {
        let all = DeviceTime::default();
        [1_500_000, 2_000_900].into_iter().for_each(|nanos| all.add(Duration::from_nanos(nanos)));
        let [(name, value)] = all.header();
        assert_eq!((name.as_str(), value.to_str().unwrap()), ("x-stoker-device-seconds", "0.003501"));
    }
}
