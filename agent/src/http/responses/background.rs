//! Responses that nobody waits for: asked for with `background`, made while nobody is connected, read later by their id. Each is
//! kept from its beginning, so the number of those that wait and run is admission's.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

use serde_json::Value;
use tokio::task::AbortHandle;

use super::{answer::Growing, ended, store, store::Stored};
use crate::http::{choices::Choices, usage::UsageSum};

/// Those that are being made.
static UNDER_WAY: LazyLock<Mutex<HashMap<String, AbortHandle>>> = LazyLock::new(Mutex::default);

/// Begins to make a response; what is to be answered now.
pub(super) fn start(choices: Choices, usage: UsageSum, growing: Growing) -> Value {
    let id = growing.id.clone();
    let response = with_status(growing.begun(), "queued");
    let keeping = growing.keep.as_ref().expect("what nobody waits for is kept");
    let queued = Stored { owner: keeping.owner, response, messages: keeping.messages.clone() };
    store().put(id.clone(), queued.clone());
    // Before the work can end, and so before it can be taken out.
    let mut under_way = under_way();
    let work = tokio::spawn(make(choices, usage, growing, queued.clone()));
    under_way.insert(id, work.abort_handle());
    queued.response
}

async fn make(mut choices: Choices, usage: UsageSum, growing: Growing, queued: Stored) {
    let id = growing.id.clone();
    choices.begin().await;
    keep_while_under_way(&id, Stored { response: growing.begun(), ..queued.clone() });
    let failed = growing.begun();
    // It keeps itself when it has ended well.
    if let Err(error) = ended(choices, usage, growing).await {
        let mut response = with_status(failed, "failed");
        response["error"] = serde_json::json!({"code": error.code, "message": error.message});
        keep_while_under_way(&id, Stored { response, ..queued });
    }
    under_way().remove(&id);
}

/// Who was stopped meanwhile stays as it was left.
fn keep_while_under_way(id: &str, stored: Stored) {
    let under_way = under_way();
    if under_way.contains_key(id) {
        store().put(id.to_owned(), stored);
    }
}

/// Ends a response that is being made; whether one was.
pub(super) fn stop(id: &str) -> bool {
    let stopped = under_way().remove(id);
    stopped.inspect(AbortHandle::abort).is_some()
}

/// The same with another status.
pub(super) fn with_status(mut response: Value, status: &str) -> Value {
    response["status"] = status.into();
    response
}

fn under_way() -> MutexGuard<'static, HashMap<String, AbortHandle>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}
