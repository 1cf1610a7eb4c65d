//! Where a request stands among others, and with whom it shares cached prompts.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::http::fields::{FieldError, Fields};

/// The field that says how long a request may wait.
pub(crate) const DEADLINE: &str = "deadline_ms";
/// A day.
const MAX_DEADLINE_MS: u32 = 24 * 60 * 60 * 1000;
/// Longest salt.
const MAX_SALT_BYTES: usize = 1024;

/// Where a request that generates nothing stands among others, and with whom it shares cached prompts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing {
    /// The smaller, the sooner.
    pub(crate) priority: i32,
    /// It begins by then, or not at all.
    pub(crate) deadline: Option<Instant>,
    /// Who may find the prompt's keys and values: those who know it.
    pub(crate) cache_salt: Option<Arc<str>>,
}

impl Standing {
    /// Takes it out of `fields`; `salt` is what the gateway says, and `now` when the request came.
    pub(crate) fn take(fields: &mut Fields, salt: Option<&Arc<str>>, now: Instant) -> Result<Self, FieldError> {
        Ok(Self {
            priority: priority(fields)?,
            deadline: begins_within(fields)?.map(|within| now + within),
            cache_salt: both_salts(salt, cache_salt(fields)?),
        })
    }
}

/// Among waiting and running requests.
pub(super) fn priority(fields: &mut Fields) -> Result<i32, FieldError> {
    let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
    let sent = fields.checked::<i64>("priority", "a 32-bit integer", |sent| range.contains(sent))?;
    Ok(sent.map_or(0, |sent| sent as i32))
}

/// From now: what it waited for in front of this replica is not known here.
pub(super) fn begins_within(fields: &mut Fields) -> Result<Option<Duration>, FieldError> {
    let sent = fields.number(DEADLINE, 1..=MAX_DEADLINE_MS)?;
    Ok(sent.map(|ms: u32| Duration::from_millis(ms.into())))
}

/// What a client tells its cached prompts apart by.
pub(super) fn cache_salt(fields: &mut Fields) -> Result<Option<Arc<str>>, FieldError> {
    let is_salt = |salt: &String| (1..=MAX_SALT_BYTES).contains(&salt.len());
    let sent = fields.checked("cache_salt", "a text of 1 to 1024 bytes", is_salt)?;
    Ok(sent.map(Arc::from))
}

/// Two pairs never look alike: a header has no NUL.
pub(super) fn both_salts(outer: Option<&Arc<str>>, own: Option<Arc<str>>) -> Option<Arc<str>> {
    match (outer, own) {
        (Some(outer), own) => Some(format!("{outer}\0{}", own.as_deref().unwrap_or_default()).into()),
        (None, own) => own,
    }
}
