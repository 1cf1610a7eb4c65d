//! The operator's one clock. It begins with the API server's time, which dates most of what it is compared with, and from
//! then on counts what passed here: nobody who sets this machine's clock moves a deadline, a window or a pause.
//!
//! Nothing else in this crate reads a clock that can be set (`clippy.toml` forbids it), but for the date in our Lease, which
//! only people read, and the library that dates Events.

use std::time::Instant;

use anyhow::{Context, Result};
use hyper::{Request, header::DATE};
use jiff::{SignedDuration, Timestamp, fmt::rfc2822};
use kube::{Client, client::Body};
use tracing::warn;

/// Dates of others may be ahead of ours by so much and mean nothing: clocks of one cluster differ, and ours begins with whole
/// seconds.
pub const SKEW: SignedDuration = SignedDuration::from_secs(60);

/// See the module. Copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    begun: Instant,
    begun_at: Timestamp,
}

impl Default for Clock {
    #[expect(clippy::disallowed_methods, reason = "read once, and only where no API server says the time")]
    fn default() -> Self {
        Self::starting_at(Timestamp::now())
    }
}

impl Clock {
    /// A clock that says this time now.
    pub fn starting_at(begun_at: Timestamp) -> Self {
        Self { begun: Instant::now(), begun_at }
    }

    /// A clock that agrees with the API server's; with this machine's, if that does not say its time.
    pub async fn of(client: &Client) -> Self {
        match time_of(client).await {
            Ok(time) => Self::starting_at(time),
            Err(error) => {
                warn!(%error, "the API server does not say the time, so this machine's clock is believed");
                Self::default()
            }
        }
    }

    /// The time.
    pub fn now(self) -> Timestamp {
        self.at(Instant::now())
    }

    fn at(self, instant: Instant) -> Timestamp {
        let passed = SignedDuration::try_from(instant.saturating_duration_since(self.begun));
        self.begun_at.checked_add(passed.unwrap_or(SignedDuration::MAX)).unwrap_or(Timestamp::MAX)
    }
}

/// What every HTTP server says with its answers.
async fn time_of(client: &Client) -> Result<Timestamp> {
    let answer = client.send(Request::get("/version").body(Body::empty())?).await?;
    let date = answer.headers().get(DATE).context("an answer without a date")?;
    let date = date.to_str()?;
    Ok(rfc2822::parse(date).with_context(|| format!("the date {date}"))?.timestamp())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hyper::Response;
    use tower::{BoxError, service_fn};

    use super::*;

    async fn clock_of(date: Option<&'static str>) -> Clock {
        let server = service_fn(move |_: Request<Body>| async move {
            let answer = Response::builder();
            let answer = date.into_iter().fold(answer, |answer, date| answer.header(DATE, date));
            Ok::<_, BoxError>(answer.body(Body::empty()).unwrap())
        });
        Clock::of(&Client::new(server, "default")).await
    }

    #[tokio::test]
    async fn it_begins_with_the_time_of_the_api_server_and_counts_on() {
        // RFC 9110, section 5.6.7: the date that all its examples have.
        let clock = clock_of(Some("Sun, 06 Nov 1994 08:49:37 GMT")).await;
        let started: Timestamp = "1994-11-06T08:49:37Z".parse().unwrap();
        assert_eq!(clock.at(clock.begun), started);
        assert_eq!(clock.at(clock.begun + Duration::from_millis(2500)), started + SignedDuration::from_millis(2500));
    }

    #[tokio::test]
    async fn without_a_date_it_begins_with_the_time_of_this_machine() {
        for date in [None, Some("yesterday")] {
            assert!(clock_of(date).await.now().duration_since(Clock::default().now()).abs() < SKEW);
        }
    }
}
