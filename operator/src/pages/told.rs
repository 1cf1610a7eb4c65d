//! The last Events that this operator published, by deployment: the page shows them without a right to read Events, and without a
//! request. What another operator told before is not here, and the page says since when this one leads.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use kube::runtime::events::{Event, EventType};
use stoker_pages::{deployment::Told, view::Tone};

use crate::readings::millis;

/// Events kept of one deployment.
const KEPT: usize = 30;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Diary {
    by_deployment: Mutex<HashMap<String, VecDeque<Told>>>,
}

impl Diary {
    pub(super) fn note(&self, uid: &str, event: &Event, now: Timestamp) {
        let tone = match event.type_ {
            EventType::Warning => Tone::Bad,
            EventType::Normal => Tone::Idle,
        };
        let note = event.note.clone().unwrap_or_default();
        let mut all = self.lock();
        let own = all.entry(uid.to_owned()).or_default();
        own.push_front(Told { at_ms: millis(now), tone, reason: event.reason.clone(), note });
        own.truncate(KEPT);
    }

    /// Newest first.
    pub(super) fn of(&self, uid: &str) -> Vec<Told> {
        self.lock().get(uid).map(|own| own.iter().cloned().collect()).unwrap_or_default()
    }

    pub(super) fn keep_only(&self, uids: &HashSet<String>) {
        self.lock().retain(|uid, _| uids.contains(uid));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, VecDeque<Told>>> {
        self.by_deployment.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
