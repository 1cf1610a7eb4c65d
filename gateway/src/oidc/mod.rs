//! Tenants that send a token of an issuer in place of a key ([0029](../../../docs/decisions/0029-tokens-name-tenants.md)).
//!
//! `spec` is what the file says of issuers, `jwks` their keys, `token` what a token says and whether it is believed, `follow` brings keys. Here is
//! what is known of each issuer at the moment, and of tokens that were believed before: those cost no signature.

pub mod follow;
pub mod jwks;
pub mod spec;
pub mod token;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use sha2::{Digest, Sha256};
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
    time::{Instant, timeout},
};

use self::{
    jwks::Keys,
    spec::IssuerSpec,
    token::{Identity, TokenError, Unverified},
};
use crate::metrics::Metrics;

/// Tokens that were believed and are remembered. Beyond that all are forgotten, and cost a signature again.
const REMEMBERED_MAX: usize = 8192;
/// Who sends a token by a new key waits no longer until its issuer has said so.
const PATIENCE: Duration = Duration::from_secs(5);
/// Questions to an issuer that tokens may cause at once: it may change keys more than once.
const QUESTIONS_MAX: u32 = 5;
/// One more of them comes back after this: who makes up names of keys, or signs by their names, does not make more.
const QUESTION_EVERY: Duration = Duration::from_secs(10);

/// All issuers of one file, followed for as long as this is there.
#[derive(Debug, Default)]
pub struct Issuers {
    known: Vec<Arc<Issuer>>,
    /// Where files that they name are.
    folder: PathBuf,
    remembered: Mutex<HashMap<[u8; 32], Remembered>>,
    _followers: JoinSet<()>,
}

/// An issuer, and its keys as far as they are known.
#[derive(Debug)]
pub struct Issuer {
    spec: IssuerSpec,
    state: watch::Sender<State>,
    questions: Mutex<Questions>,
    wanted: Notify,
}

/// What came of asking for keys.
#[derive(Clone, Debug, Default)]
struct State {
    /// The last that came.
    keys: Option<Arc<Keys>>,
    /// Rises when they change: tokens that were believed by others are looked at again.
    version: u64,
    n_asked: u64,
}

/// Questions that tokens may cause.
#[derive(Clone, Copy, Debug)]
struct Questions {
    spent: u32,
    /// Since when none has come back.
    since: Instant,
    /// One is on its way: others wait for the same answer.
    is_asked: bool,
}

impl Questions {
    /// Whether there is an answer to wait for, and it has to be asked for first.
    fn take(&mut self, now: Instant) -> (bool, bool) {
        if self.is_asked {
            return (true, false);
        }
        while self.spent > 0 && now.duration_since(self.since) >= QUESTION_EVERY {
            self.spent -= 1;
            self.since += QUESTION_EVERY;
        }
        if self.spent == QUESTIONS_MAX {
            return (false, false);
        }
        if self.spent == 0 {
            self.since = now;
        }
        self.spent += 1;
        self.is_asked = true;
        (true, true)
    }
}

#[derive(Debug)]
struct Remembered {
    identity: Identity,
    /// Whose, by its place, and believed by which of its keys.
    place: usize,
    version: u64,
}

/// Why a token names nobody.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Refused {
    /// It is not believed.
    Token(TokenError),
    /// Keys of this issuer have never come.
    NoKeys(String),
}

impl Refused {
    /// Whether other keys may change it: the last that came may be older than the token.
    fn may_be_late(&self) -> bool {
        matches!(self, Self::NoKeys(_) | Self::Token(TokenError::UnknownKey | TokenError::Signature))
    }
}

/// What time it is.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// To tokens, in seconds since 1970.
    pub unix_s: u64,
    /// To what is counted since something.
    pub instant: Instant,
}

impl Now {
    /// By this machine's clocks.
    pub fn read() -> Self {
        let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { unix_s, instant: Instant::now() }
    }
}

/// Whose a token is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Known {
    /// As its issuer says.
    pub identity: Identity,
    /// It was believed before, by the same key.
    pub is_remembered: bool,
}

impl Issuers {
    /// Follows these; files that they name are in this folder.
    pub fn follow(specs: &[IssuerSpec], folder: &Path, metrics: &Arc<Metrics>) -> Self {
        let known: Vec<Arc<Issuer>> = specs.iter().cloned().map(|spec| Arc::new(Issuer::new(spec))).collect();
        for issuer in &known {
            // Who sends a token of another one is not told.
            tracing::info!(issuer = issuer.spec.issuer, audiences = ?issuer.spec.audiences, "tokens of this issuer are accepted");
        }
        let mut followers = JoinSet::new();
        for issuer in &known {
            followers.spawn(follow::follow(Arc::clone(issuer), folder.to_owned(), Arc::clone(metrics)));
        }
        Self { known, folder: folder.to_owned(), remembered: Mutex::default(), _followers: followers }
    }

    /// Whether they are these.
    pub fn are(&self, specs: &[IssuerSpec], folder: &Path) -> bool {
        self.folder == folder && self.known.iter().map(|issuer| &issuer.spec).eq(specs)
    }

    /// Whose a token is now. Waits for keys where the token names one that is not known, or that did not sign it: an issuer may have changed it under
    /// its name.
    pub async fn identify(&self, token: &[u8], now: Now) -> Result<Known, Refused> {
        let now_s = now.unix_s;
        let hash = Sha256::digest(token).into();
        if let Some(identity) = self.remembered(&hash, now_s) {
            return Ok(Known { identity, is_remembered: true });
        }
        let read = Unverified::read(token).map_err(Refused::Token)?;
        let is_its = |issuer: &Arc<Issuer>| read.issuer() == Some(&issuer.spec.issuer);
        let place = self.known.iter().position(is_its).ok_or(Refused::Token(TokenError::Issuer))?;
        let issuer = &self.known[place];
        let (version, judged) = match issuer.judge(&read, now_s) {
            (_, Err(refused)) if refused.may_be_late() && issuer.ask_again(now.instant).await => {
                issuer.judge(&read, now_s)
            }
            judged => judged,
        };
        let identity = judged?;
        self.remember(hash, Remembered { identity: identity.clone(), place, version }, now_s);
        Ok(Known { identity, is_remembered: false })
    }

    fn remembered(&self, hash: &[u8; 32], now_s: u64) -> Option<Identity> {
        let mut all = self.lock();
        let Remembered { identity, place, version } = all.get(hash)?;
        if now_s < identity.until_s && *version == self.known[*place].state.borrow().version {
            return Some(identity.clone());
        }
        all.remove(hash);
        None
    }

    fn remember(&self, hash: [u8; 32], token: Remembered, now_s: u64) {
        let mut all = self.lock();
        if all.len() >= REMEMBERED_MAX {
            all.retain(|_, old| now_s < old.identity.until_s);
        }
        if all.len() >= REMEMBERED_MAX {
            all.clear();
        }
        all.insert(hash, token);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 32], Remembered>> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Issuer {
    fn new(spec: IssuerSpec) -> Self {
        let questions = Questions { spent: 0, since: Instant::now(), is_asked: false };
        Self { spec, state: watch::Sender::default(), questions: Mutex::new(questions), wanted: Notify::new() }
    }

    /// With the version of the keys that it was judged by.
    fn judge(&self, token: &Unverified<'_>, now_s: u64) -> (u64, Result<Identity, Refused>) {
        let State { keys, version, .. } = self.state.borrow().clone();
        let judged = match keys {
            Some(keys) => token.verified(&self.spec, &keys, now_s).map_err(Refused::Token),
            None => Err(Refused::NoKeys(self.spec.issuer.clone())),
        };
        (version, judged)
    }

    /// Has keys read again, unless tokens have caused enough of that; whether they were.
    async fn ask_again(&self, now: Instant) -> bool {
        let mut states = self.state.subscribe();
        let before = states.borrow_and_update().n_asked;
        let (is_awaited, is_new) = self.questions().take(now);
        if is_new {
            self.wanted.notify_one();
        }
        is_awaited && matches!(timeout(PATIENCE, states.wait_for(|state| state.n_asked > before)).await, Ok(Ok(_)))
    }

    fn questions(&self) -> MutexGuard<'_, Questions> {
        self.questions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What came of asking; nothing leaves what was known.
    fn learn(&self, keys: Option<Keys>) {
        self.questions().is_asked = false;
        self.state.send_modify(|state| {
            state.n_asked += 1;
            let Some(keys) = keys.filter(|keys| state.keys.as_deref() != Some(keys)) else { return };
            state.keys = Some(Arc::new(keys));
            state.version += 1;
        });
    }
}

#[cfg(test)]
mod tests;
