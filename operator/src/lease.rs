//! Leader election on a coordination.k8s.io Lease: one operator writes at a time.
//!
//! [`next_step`] is pure. The runner renews; while renewals fail nobody leads ([`Leadership::holds`] turns false when
//! the Lease would have run out), and it goes on trying, as an unreachable API server elects nobody else either. Finding
//! another holder ends it: the process exits and starts anew.

use std::{
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tracing::{info, warn};

/// How long a Lease holds without renewal.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// How often the holder renews.
const RENEW_EVERY: Duration = Duration::from_secs(5);
/// How often others look, and the holder tries again.
const RETRY_EVERY: Duration = Duration::from_secs(2);
/// How long one request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// Who elects.
#[derive(Clone, Debug)]
pub struct LeaseOptions {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Who we are: unique among operators.
    pub identity: String,
}

/// Whether this process leads now. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Leadership {
    until: Arc<RwLock<Until>>,
}

#[derive(Clone, Copy, Debug, Default)]
enum Until {
    #[default]
    Never,
    Moment(Instant),
    Always,
}

impl Leadership {
    /// Leads without a Lease: for a single operator.
    pub fn always() -> Self {
        Self { until: Arc::new(RwLock::new(Until::Always)) }
    }

    /// True while no other operator can have been elected.
    pub fn holds(&self) -> bool {
        self.holds_for(Duration::ZERO)
    }

    /// True when no other operator can be elected for so long from now.
    pub fn holds_for(&self, time: Duration) -> bool {
        match *self.until.read().unwrap_or_else(PoisonError::into_inner) {
            Until::Never => false,
            Until::Moment(moment) => Instant::now() + time < moment,
            Until::Always => true,
        }
    }

    fn set(&self, until: Until) {
        *self.until.write().unwrap_or_else(PoisonError::into_inner) = until;
    }
}

/// What to do about the Lease as it was read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// Nobody made it yet.
    Create,
    /// It is free, or its holder stopped renewing.
    TakeOver,
    /// It is ours.
    Renew,
    /// Somebody else holds it.
    Wait,
}

/// Decides about a Lease that has not changed for `unchanged`, measured by our own clock: clocks of others may differ.
pub fn next_step(lease: Option<&LeaseSpec>, identity: &str, unchanged: Duration) -> Step {
    let Some(lease) = lease else { return Step::Create };
    let holder = lease.holder_identity.as_deref().unwrap_or_default();
    let seconds = lease.lease_duration_seconds.unwrap_or_default().max(1).unsigned_abs();
    match holder {
        holder if holder == identity => Step::Renew,
        "" => Step::TakeOver,
        _ if unchanged > Duration::from_secs(seconds.into()) => Step::TakeOver,
        _ => Step::Wait,
    }
}

/// Takes and renews the Lease.
#[derive(Debug)]
pub struct Elector {
    api: Api<Lease>,
    options: LeaseOptions,
    leadership: Leadership,
    /// Version of the Lease last read, and when it was first seen.
    seen: Option<(String, Instant)>,
}

impl Elector {
    /// An elector that does not lead yet.
    pub fn new(client: Client, options: LeaseOptions) -> Self {
        let api = Api::namespaced(client, &options.namespace);
        Self { api, options, leadership: Leadership::default(), seen: None }
    }

    /// Whether we lead, as it changes.
    pub fn leadership(&self) -> Leadership {
        self.leadership.clone()
    }

    /// Returns once we lead.
    pub async fn acquire(&mut self) {
        info!(lease = self.options.name, identity = self.options.identity, "waiting to lead");
        while !self.attempt().await {
            tokio::time::sleep(RETRY_EVERY).await;
        }
        info!(lease = self.options.name, "leading");
    }

    /// Renews until somebody else holds the Lease.
    pub async fn keep(&mut self) {
        loop {
            let renewed = self.attempt().await;
            if !renewed && self.lost() {
                self.leadership.set(Until::Never);
                return;
            }
            tokio::time::sleep(if renewed { RENEW_EVERY } else { RETRY_EVERY }).await;
        }
    }

    /// Lets go of the Lease, so that a successor need not wait for it to run out.
    pub async fn release(&mut self) {
        self.leadership.set(Until::Never);
        match tokio::time::timeout(REQUEST_TIMEOUT, self.try_release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "lease was not released; it runs out by itself"),
            Err(_) => warn!("lease was not released in time; it runs out by itself"),
        }
    }

    async fn try_release(&self) -> kube::Result<()> {
        let Some(mut lease) = self.api.get_opt(&self.options.name).await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() == Some(&self.options.identity) {
            spec.holder_identity = Some(String::new());
            self.api.replace(&self.options.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }

    /// True when the last read Lease has another holder: `seen` is cleared by our own writes.
    fn lost(&self) -> bool {
        self.seen.is_some()
    }

    /// One try; true when the Lease is ours now.
    async fn attempt(&mut self) -> bool {
        let asked = Instant::now();
        match tokio::time::timeout(REQUEST_TIMEOUT, self.try_once(asked)).await {
            Ok(Ok(true)) => {
                // Counted from before the request: others count from when the server had it.
                self.leadership.set(Until::Moment(asked + LEASE_DURATION));
                self.seen = None;
                true
            }
            Ok(Ok(false)) => false,
            Ok(Err(error)) => {
                warn!(%error, "lease");
                false
            }
            Err(_) => {
                warn!("lease: no answer within {} s", REQUEST_TIMEOUT.as_secs());
                false
            }
        }
    }

    async fn try_once(&mut self, now: Instant) -> kube::Result<bool> {
        let lease = self.api.get_opt(&self.options.name).await?;
        let version = lease.as_ref().and_then(|lease| lease.metadata.resource_version.clone()).unwrap_or_default();
        let first_seen = self.seen.as_ref().filter(|(seen, _)| *seen == version).map_or(now, |(_, since)| *since);
        let spec = lease.as_ref().and_then(|lease| lease.spec.as_ref());
        let step = next_step(spec, &self.options.identity, now.duration_since(first_seen));
        let written = match (step, lease) {
            (Step::Wait, _) => {
                self.seen = Some((version, first_seen));
                return Ok(false);
            }
            (Step::Create, _) | (_, None) => self.api.create(&PostParams::default(), &self.first_lease()).await,
            (Step::TakeOver | Step::Renew, Some(lease)) => {
                let renewed = self.renewed(lease, step);
                self.api.replace(&self.options.name, &PostParams::default(), &renewed).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            // Somebody was faster; the next try reads who.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn first_lease(&self) -> Lease {
        let metadata = ObjectMeta { name: Some(self.options.name.clone()), ..ObjectMeta::default() };
        self.renewed(Lease { metadata, ..Lease::default() }, Step::TakeOver)
    }

    /// The Lease as we write it; its resource version makes the write fail if anybody else wrote meanwhile.
    #[expect(
        clippy::disallowed_methods,
        reason = "a date for people: whether a Lease ran out is seen by who watches it"
    )]
    fn renewed(&self, mut lease: Lease, step: Step) -> Lease {
        let now = MicroTime(Timestamp::now());
        let spec = lease.spec.get_or_insert_default();
        if step == Step::TakeOver {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |transitions| transitions + 1));
        }
        spec.holder_identity = Some(self.options.identity.clone());
        spec.lease_duration_seconds = i32::try_from(LEASE_DURATION.as_secs()).ok();
        spec.renew_time = Some(now);
        lease
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_by(holder: &str) -> LeaseSpec {
        LeaseSpec { holder_identity: Some(holder.into()), lease_duration_seconds: Some(15), ..LeaseSpec::default() }
    }

    #[test]
    fn a_lease_is_taken_only_when_free_or_run_out() {
        let soon = Duration::from_secs(14);
        assert_eq!(next_step(None, "me", soon), Step::Create);
        assert_eq!(next_step(Some(&held_by("")), "me", soon), Step::TakeOver);
        assert_eq!(next_step(Some(&held_by("me")), "me", soon), Step::Renew);
        assert_eq!(next_step(Some(&held_by("you")), "me", soon), Step::Wait);
        assert_eq!(next_step(Some(&held_by("you")), "me", Duration::from_secs(16)), Step::TakeOver);
    }

    #[test]
    fn a_leader_has_time_for_a_write_whenever_its_renewals_go_well() {
        // Renewed every so often, and a renewal may take its whole time: what is left of the Lease then.
        let least_left = LEASE_DURATION - RENEW_EVERY - REQUEST_TIMEOUT;
        assert!(least_left > crate::fence::WRITE_TIMEOUT, "{least_left:?}");
    }

    #[test]
    fn nobody_leads_before_the_first_renewal() {
        assert!(!Leadership::default().holds());
        assert!(Leadership::always().holds());
    }
}
