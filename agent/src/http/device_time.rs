//! What a request had of its devices' time, on its way to who accounts for it: in the marks of an answer that has some
//! (`passage.rs`), else in the head of one that is there as a whole. It is in no body: those are the same whenever they are made. What
//! neither told goes to the account of the request's tenant, if it has one (`accounts.rs`).

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use axum::http::{HeaderName, HeaderValue};

use crate::accounts::Account;

/// Of an answer: device seconds. Of a request, `marks`: marks are to tell them.
pub(crate) const DEVICE_SECONDS: HeaderName = HeaderName::from_static("x-stoker-device-seconds");

/// What the sequences of one request had so far.
#[derive(Debug, Default)]
pub(crate) struct DeviceTime {
    nanos: AtomicU64,
    /// Of these, those that the answer or an account has.
    told: AtomicU64,
    account: Option<Account>,
}

impl DeviceTime {
    /// Of a request that has had nothing yet.
    pub(crate) fn on(account: Option<Account>) -> Self {
        Self { nanos: AtomicU64::default(), told: AtomicU64::default(), account }
    }

    /// A sequence had so much more.
    pub(crate) fn add(&self, time: Duration) {
        self.nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// A mark told so much more.
    pub(crate) fn told(&self, time: Duration) {
        self.told.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The head of the answer tells it.
    pub(crate) fn header(&self) -> [(HeaderName, HeaderValue); 1] {
        let nanos = self.nanos.load(Ordering::Relaxed);
        self.told.store(nanos, Ordering::Relaxed);
        let seconds = format!("{:.6}", Duration::from_nanos(nanos).as_secs_f64());
        [(DEVICE_SECONDS, HeaderValue::from_str(&seconds).expect("digits and a point are visible ASCII"))]
    }

    /// Where what nothing tells goes.
    pub(crate) fn account(&self) -> Option<&Account> {
        self.account.as_ref()
    }

    /// Puts on account what nothing told.
    pub(crate) fn settle(&self) {
        let Some(account) = &self.account else { return };
        let nanos = self.nanos.load(Ordering::Relaxed);
        account.add(Duration::from_nanos(nanos.saturating_sub(self.told.swap(nanos, Ordering::Relaxed))));
    }
}

/// Of an answer that nobody waited for.
impl Drop for DeviceTime {
    fn drop(&mut self) {
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::accounts::Accounts;

    #[test]
    fn sequences_of_a_request_add_up() {
        let all = DeviceTime::default();
        [1_500_000, 2_000_900].into_iter().for_each(|nanos| all.add(Duration::from_nanos(nanos)));
        let [(name, value)] = all.header();
        assert_eq!((name.as_str(), value.to_str().unwrap()), ("x-stoker-device-seconds", "0.003501"));
    }

    #[test]
    fn what_nothing_told_is_on_account_once() {
        let (accounts, now) = (Accounts::default(), Instant::now());
        let micros = |tenant: &str, tell: fn(&DeviceTime)| {
            let account = accounts.of("g", tenant, now);
            tell(&DeviceTime::on(account));
            accounts.told("g", now).0[tenant]
        };
        let add = |time: &DeviceTime, micros| time.add(Duration::from_micros(micros));
        assert_eq!(micros("nothing", |_| {}), 0);
        assert_eq!(micros("left", |time| time.add(Duration::from_micros(5))), 5);
        let head = |time: &DeviceTime| {
            time.add(Duration::from_micros(5));
            time.header();
        };
        assert_eq!(micros("head", head), 0);
        let marks = |time: &DeviceTime| {
            time.add(Duration::from_micros(5));
            time.told(Duration::from_micros(3));
        };
        assert_eq!(micros("marks", marks), 2, "its last part has no mark");
        let time = DeviceTime::on(accounts.of("g", "steps", now));
        for (so_far, expected) in [(5, 5), (0, 5), (7, 12)] {
            add(&time, so_far);
            time.settle();
            assert_eq!(accounts.told("g", now).0["steps"], expected);
        }
        drop(time);
        assert_eq!(accounts.told("g", now).0["steps"], 12);
    }
}
