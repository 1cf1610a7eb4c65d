//! Where the bytes of a model come from beside its source: replicas that have it. What is known of each, requests to them, and who is
//! asked next. Shared by who fetches and who is told of replicas; whom to ask decides [`crate::supply`].
//!
//! A replica that says no, breaks off or stands still rests for a while; one that does so again and again, or had a part in a wrong file,
//! is left.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use reqwest::{
    Client, Response, StatusCode,
    header::{ACCEPT_ENCODING, RANGE},
    redirect::Policy,
};
use tokio::sync::watch;

use crate::{
    digest::Digest,
    supply::{Choice, Scene, Supplier},
    transport::{builder, error_chain},
};

/// For a connection to a replica, which is near or gone.
const CONNECT: Duration = Duration::from_secs(3);
/// Between two pieces of its answer.
const SILENCE: Duration = Duration::from_secs(5);
/// Failures in a row after which it is left.
const FAILURES_MAX: u32 = 3;
/// After the first of them; as long again after each more.
const REST: Duration = Duration::from_secs(1);
/// Of a source that failed, where replicas can be asked.
const SOURCE_REST: Duration = Duration::from_secs(10);
/// Between two looks for somebody who has room.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
/// Between two measurements of a stream.
const MEASURED_EVERY: Duration = Duration::from_secs(1);
/// Of fewer bytes a rate says how long asking takes.
const MEASURED_BYTES: u64 = 1 << 20;
/// What was told is asked for again after this: tickets end.
const TOLD_FOR: Duration = Duration::from_secs(300);

/// A replica that has the model.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Giver {
    /// What people know it as.
    pub name: String,
    /// Before what a file's content is called.
    pub url: String,
    /// What it is to be shown.
    pub headers: BTreeMap<&'static str, String>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Suppliers {
    known: Mutex<Known>,
    /// The first word came.
    told: watch::Sender<bool>,
    /// Until when that is waited for.
    waits_until: Option<Instant>,
    client: Option<Client>,
}

#[derive(Debug, Default)]
struct Known {
    source: Supplier,
    source_rests_until: Option<Instant>,
    givers: Vec<KnownGiver>,
    distrusted: BTreeSet<String>,
    told_at: Option<Instant>,
    asked_since: Option<Instant>,
    given: u64,
}

#[derive(Debug)]
struct KnownGiver {
    giver: Giver,
    supplier: Supplier,
    failures: u32,
    rests_until: Option<Instant>,
    is_left: bool,
}

/// What replicas that were told of are, and whether a new word is wanted.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Told {
    /// Their names, in order.
    pub names: Vec<String>,
    /// Nobody said anything yet, or not for long.
    pub asks: bool,
}

/// Why a replica gives nothing.
#[derive(Debug)]
pub(crate) enum NotGiven {
    /// It has not this file.
    Lacks,
    /// It has enough to do.
    Busy,
    /// It may be better later.
    Failed(String),
    /// It will not.
    Refused(String),
}

impl Suppliers {
    /// Nobody yet; who fetches waits until `waits_until` for the first word on who there is. Replicas are asked from this address, which is
    /// one that they know; `None`: from whichever leads to them.
    pub fn awaiting(waits_until: Instant, address: Option<IpAddr>) -> reqwest::Result<Self> {
        // They are pods beside us: a proxy that leads to hubs does not lead there.
        let client = builder().no_proxy().redirect(Policy::none()).local_address(address);
        let client = client.connect_timeout(CONNECT).read_timeout(SILENCE).build()?;
        Ok(Self { waits_until: Some(waits_until), client: Some(client), ..Self::default() })
    }

    /// These have the model, and nobody else.
    pub fn tell(&self, givers: Vec<Giver>, now: Instant) {
        let mut known = self.known();
        let before = std::mem::take(&mut known.givers);
        let supplier = |name: &str| before.iter().find(|known| known.giver.name == name).map(|known| known.supplier);
        let fresh = |giver: Giver| KnownGiver {
            supplier: supplier(&giver.name).unwrap_or_default(),
            is_left: known.distrusted.contains(&giver.name),
            giver,
            failures: 0,
            rests_until: None,
        };
        let givers = givers.into_iter().map(fresh).collect();
        known.givers = givers;
        known.told_at = Some(now);
        self.told.send_replace(true);
    }

    /// What was told, for who tells; `None`: nothing would be taken.
    pub fn told(&self, now: Instant) -> Option<Told> {
        self.client.as_ref()?;
        let known = self.known();
        let names = known.givers.iter().map(|known| known.giver.name.clone()).collect();
        Some(Told { names, asks: known.told_at.is_none_or(|at| now.duration_since(at) >= TOLD_FOR) })
    }

    /// Waits for the first word on who has the model, but not for long.
    pub(crate) async fn first_word(&self) {
        let Some(until) = self.waits_until else { return };
        // Without a word the source is asked.
        let _ = tokio::time::timeout_at(until.into(), self.told.subscribe().wait_for(|told| *told)).await;
    }

    /// Begins to ask somebody, as soon as one of them has room. `may_give` is whether a replica is to be asked for this file.
    pub(crate) async fn begin(&self, may_give: impl Fn(&str) -> bool) -> Stream<'_> {
        loop {
            match self.begin_now(&may_give, Instant::now()) {
                Some(stream) => return stream,
                None => tokio::time::sleep(LOOK_PAUSE).await,
            }
        }
    }

    fn begin_now(&self, may_give: &impl Fn(&str) -> bool, now: Instant) -> Option<Stream<'_>> {
        let mut known = self.known();
        let scene = known.scene(now, may_give);
        let choice = scene.choose();
        let giver = match choice {
            Choice::Wait => return None,
            Choice::Source => None,
            Choice::Giver(place) => Some(known.givers[place].giver.clone()),
        };
        if giver.is_some() {
            known.asked_since.get_or_insert(now);
        }
        let is_alone = scene.givers.iter().all(Option::is_none);
        let stream = Stream { suppliers: self, giver, is_alone, bytes: 0, since: now };
        if let Some(supplier) = known.supplier_mut(stream.name()) {
            supplier.streams += 1;
        }
        Some(stream)
    }

    /// Asks a replica for bytes of a file.
    pub(crate) async fn ask(&self, giver: &Giver, file: &Digest, range: &Range<u64>) -> Result<Response, NotGiven> {
        let client = self.client.as_ref().ok_or(NotGiven::Lacks)?;
        let asked = client.get(format!("{}{file}", giver.url)).header(ACCEPT_ENCODING, "identity");
        let asked = asked.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
        let asked = giver.headers.iter().fold(asked, |asked, (name, value)| asked.header(*name, value));
        let answer = asked.send().await.map_err(|error| NotGiven::Failed(error_chain(&error)))?;
        match answer.status() {
            StatusCode::PARTIAL_CONTENT => Ok(answer),
            StatusCode::NOT_FOUND => Err(NotGiven::Lacks),
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => Err(NotGiven::Busy),
            StatusCode::OK => Err(NotGiven::Refused("it answers without the range that was asked for".to_owned())),
            status => Err(NotGiven::Refused(refusal(status, answer).await)),
        }
    }

    /// The source failed: as long as replicas can be asked it rests.
    pub(crate) fn source_failed(&self, now: Instant) {
        self.known().source_rests_until = Some(now + SOURCE_REST);
    }

    /// A replica gave nothing, or broke off; true when it is left for that.
    pub(crate) fn failed(&self, name: &str, how: &NotGiven, now: Instant) -> bool {
        let mut known = self.known();
        let Some(giver) = known.givers.iter_mut().find(|known| known.giver.name == name) else { return false };
        match how {
            NotGiven::Lacks => {}
            NotGiven::Busy => giver.rests_until = Some(now + REST),
            NotGiven::Failed(_) => {
                giver.failures += 1;
                giver.rests_until = Some(now + REST * giver.failures);
                giver.is_left |= giver.failures >= FAILURES_MAX;
            }
            NotGiven::Refused(_) => giver.is_left = true,
        }
        giver.is_left
    }

    /// These had a part in a wrong file: nothing is taken of them again.
    pub(crate) fn distrust(&self, names: &BTreeSet<String>) {
        let mut known = self.known();
        for giver in known.givers.iter_mut().filter(|known| names.contains(&known.giver.name)) {
            giver.is_left = true;
        }
        known.distrusted.extend(names.iter().cloned());
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a refusal says, as far as it is text for a person.
async fn refusal(status: StatusCode, mut answer: Response) -> String {
    let words = answer.chunk().await.ok().flatten().unwrap_or_default();
    let words: String = String::from_utf8_lossy(&words).chars().filter(|c| !c.is_control()).take(300).collect();
    format!("{status}: {words}")
}

impl Known {
    fn scene(&self, now: Instant, may_give: impl Fn(&str) -> bool) -> Scene {
        let here = |known: &KnownGiver| {
            let rests = known.rests_until.is_some_and(|until| now < until);
            (!known.is_left && !rests && may_give(&known.giver.name)).then_some(known.supplier)
        };
        Scene {
            source: self.source,
            source_rests: self.source_rests_until.is_some_and(|until| now < until),
            givers: self.givers.iter().map(here).collect(),
            given: self.given,
            asked_for: self.asked_since.map_or(Duration::ZERO, |since| now.duration_since(since)),
        }
    }

    /// The replica's of this name, or the source's.
    fn supplier_mut(&mut self, name: Option<&str>) -> Option<&mut Supplier> {
        match name {
            None => Some(&mut self.source),
            Some(name) => {
                self.givers.iter_mut().find(|known| known.giver.name == name).map(|known| &mut known.supplier)
            }
        }
    }
}

/// One request, to its end.
#[derive(Debug)]
pub(crate) struct Stream<'a> {
    suppliers: &'a Suppliers,
    /// Who is asked; `None`: the source.
    giver: Option<Giver>,
    /// There was nobody else to ask.
    is_alone: bool,
    /// Since it was measured.
    bytes: u64,
    since: Instant,
}

impl Stream<'_> {
    /// The replica, if one is asked.
    pub(crate) fn giver(&self) -> Option<&Giver> {
        self.giver.as_ref()
    }

    /// So many bytes came; true when somebody else would bring the rest much sooner.
    pub(crate) fn came(&mut self, bytes: usize, now: Instant) -> bool {
        self.bytes += bytes as u64;
        if now.duration_since(self.since) < MEASURED_EVERY {
            return false;
        }
        let rate = self.measure(now);
        let known = self.suppliers.known();
        let own = match self.name() {
            None => Choice::Source,
            Some(name) => {
                let place = known.givers.iter().position(|known| known.giver.name == name);
                // Who is not among those that have the model any more is left.
                let Some(place) = place else { return true };
                Choice::Giver(place)
            }
        };
        !self.is_alone && known.scene(now, |_| true).outdoes(rate, own)
    }

    /// Takes the rate since the last time into what is known.
    fn measure(&mut self, now: Instant) -> f64 {
        let rate = self.bytes as f64 / now.duration_since(self.since).as_secs_f64().max(1e-6);
        if let Some(supplier) = self.suppliers.known().supplier_mut(self.name()) {
            supplier.rate = Some(supplier.rate.map_or(rate, |before| (before + rate) / 2.0));
        }
        self.count();
        self.since = now;
        rate
    }

    /// Who gave something has not failed in a row.
    fn count(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let Some(name) = self.name().filter(|_| bytes > 0) else { return };
        let mut known = self.suppliers.known();
        known.given += bytes;
        known.givers.iter_mut().filter(|known| known.giver.name == name).for_each(|known| known.failures = 0);
    }

    fn name(&self) -> Option<&str> {
        self.giver.as_ref().map(|giver| giver.name.as_str())
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        if self.bytes >= MEASURED_BYTES {
            self.measure(Instant::now());
        }
        self.count();
        let mut known = self.suppliers.known();
        if let Some(supplier) = known.supplier_mut(self.name()) {
            // Who was told of anew keeps what is under way.
            supplier.streams = supplier.streams.saturating_sub(1);
        }
    }
}
