//! `/v1/responses`: OpenAI's Responses API. A request is translated into the chat request that asks for the same and answered
//! as that one is; the forms of request and answer are this module's, and the responses that are kept.

mod aligned;
mod answer;
mod background;
mod owner;
mod request;
mod store;

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use axum::{
    Json,
    extract::{Path, Query, State},
    http::{HeaderValue, StatusCode},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use stoker_crds::accounts::{ACCOUNT_HEADER, ACCOUNT_TOKENS};

use crate::{
    http::{
        body::{End, streamed},
        chat::{self, Begun},
        choices::{Choices, Completion},
        error::ApiError,
        extract::Admitted,
        fields::Fields,
        neutral::Neutral,
        params::{Delivery, Generation},
        parts::Parts,
        responses::{
            aligned::Aligned,
            answer::{Events, Growing, Keeping},
            owner::Owner,
            request::Translated,
            store::{Store, Stored},
        },
        stream::AnswerHead,
        usage::{UsageBody, UsageSum},
        whole::{Writing, whole},
    },
    replica::Replica,
};

/// Responses that are kept, and their bytes.
const MAX_STORED: usize = 4096;
const MAX_STORED_BYTES: usize = 64 << 20;

/// One for the process, as there is one replica in it.
static STORE: LazyLock<Arc<Mutex<Store>>> =
    LazyLock::new(|| Arc::new(Mutex::new(Store::new(MAX_STORED, MAX_STORED_BYTES))));

/// Fields that are taken at the value that changes nothing.
pub(crate) fn neutral_fields() -> Vec<Neutral> {
    request::table()
}

/// Answers a request.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    owner: Owner,
    Admitted { open, mut fields }: Admitted,
) -> Result<Response, ApiError> {
    let previous = fields.take::<String>("previous_response_id")?;
    let before = match &previous {
        Some(id) => followed(id, owner)?,
        None => Vec::new(),
    };
    let Translated { chat, messages, echoed, store, is_waited_for } = request::translate(&mut fields, before)?;
    fields.finish()?;
    let chat = Fields::parse(chat.into())?;
    let Begun { mut choices, head, form, generation, usage, .. } =
        chat::begin(&replica, open, chat).await.map_err(in_its_words)?;
    if form.logprobs.is_some() {
        // Its last event has them all, and marks tell tokens only.
        choices.tell_no_marks();
    }
    let id = head.id.replacen("chatcmpl-", "resp_", 1);
    let growing = Growing {
        frame: frame(&id, &head, &generation, previous, echoed),
        id,
        parts: Parts::new(&head, &form),
        items: Vec::new(),
        is_open: false,
        aligned: Aligned::default(),
        keep: store.then(|| Keeping { store: Arc::clone(&STORE), owner, messages }),
    };
    if !is_waited_for {
        let is_on_account = choices.put_tokens_on_account(usage.prompt_tokens());
        let mut response = Json(background::start(choices, usage, growing)).into_response();
        if is_on_account {
            response.headers_mut().insert(ACCOUNT_HEADER, HeaderValue::from_static(ACCOUNT_TOKENS));
        }
        return Ok(response);
    }
    match generation.delivery {
        Delivery::Stream { .. } => streamed(choices, Events::new(growing), usage).await,
        Delivery::Whole => {
            let answer = move |completions, usage| response_of(growing, completions, usage);
            whole(choices, usage, Writing::of_openai(answer)).await
        }
    }
}

/// The response when it has ended.
async fn ended(mut choices: Choices, usage: UsageSum, growing: Growing) -> Result<Value, ApiError> {
    let (completions, usage) = choices.collect(usage).await?;
    Ok(response_of(growing, completions, usage))
}

/// The same of what has come.
fn response_of(mut growing: Growing, completions: Vec<Completion>, usage: UsageBody) -> Value {
    let completion = completions.into_iter().next().expect("one prompt and one completion of it");
    let end = End { reason: completion.finish_reason, stop: completion.stop };
    growing.push(completion.text, completion.logprobs, &mut |_| {});
    growing.finish(&end, &mut |_| {});
    growing.ended(&end, usage)
}

/// A response that was kept.
pub(crate) async fn get(
    owner: Owner,
    Path(id): Path<String>,
    Query(asked): Query<Vec<(String, String)>>,
) -> Result<Json<Value>, ApiError> {
    asked.iter().try_for_each(|(name, value)| as_kept(name, value))?;
    Ok(Json(stored(&id, owner, "response_id")?.response))
}

/// A kept response is told as it was made: what would tell it otherwise is refused.
fn as_kept(name: &str, value: &str) -> Result<(), ApiError> {
    let why = match (name, value) {
        ("stream", "false") | ("include_obfuscation", _) => return Ok(()),
        ("stream" | "starting_after", _) => {
            "events of a response are not kept: leave it out, and ask again until `status` says that it has ended"
        }
        ("include" | "include[]", _) => "a response is kept as it was made: ask for this when it is made",
        _ => "is not known: leave it out",
    };
    Err(ApiError::invalid(name.trim_end_matches("[]"), format!("`{name}`: {why}")))
}

/// Ends a response that is made in the background; one that has ended stays as it is.
pub(crate) async fn cancel(owner: Owner, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    let kept = stored(&id, owner, "response_id")?;
    if kept.response["background"] != true {
        let message =
            "Cannot cancel a synchronous response. It has ended; to end one that is being made, close its connection";
        return Err(ApiError::invalid("response_id", message));
    }
    if background::stop(&id) {
        let response = background::with_status(kept.response, "cancelled");
        store().put(id, Stored { response: response.clone(), ..kept });
        return Ok(Json(response));
    }
    Ok(Json(stored(&id, owner, "response_id")?.response))
}

/// Forgets a response, and ends it if it is still being made.
pub(crate) async fn delete(owner: Owner, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    stored(&id, owner, "response_id")?;
    background::stop(&id);
    store().delete(&id);
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

fn store() -> MutexGuard<'static, Store> {
    STORE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A response of whoever asks. One of somebody else is not told from none.
fn stored(id: &str, owner: Owner, param: &str) -> Result<Stored, ApiError> {
    store().get(id).filter(|stored| stored.owner == owner).cloned().ok_or_else(|| not_kept(id, param))
}

/// The conversation up to the end of a response.
fn followed(id: &str, owner: Owner) -> Result<Vec<String>, ApiError> {
    let Stored { response, messages, .. } = stored(id, owner, "previous_response_id")?;
    match response["status"].as_str() {
        Some("completed" | "incomplete") => Ok(messages),
        status => {
            let status = status.unwrap_or_default();
            let message = format!("response `{id}` is `{status}` and has no answer to follow: wait until it has ended");
            Err(ApiError::invalid("previous_response_id", message))
        }
    }
}

fn not_kept(id: &str, param: &str) -> ApiError {
    let message = format!(
        "Response with id `{id}` not found. This replica keeps its own newest {MAX_STORED} that were asked for with `store: true`, each for the key it was asked with"
    );
    ApiError { param: Some(param.to_owned()), ..ApiError::new(StatusCode::NOT_FOUND, "response_not_found", message) }
}

/// All of a response that is known when it begins.
fn frame(
    id: &str,
    head: &AnswerHead,
    generation: &Generation,
    previous: Option<String>,
    echoed: Vec<(&'static str, Value)>,
) -> Value {
    let mut frame = json!({
        "id": id, "object": "response", "created_at": head.created, "model": head.model, "error": null,
        "incomplete_details": null, "previous_response_id": previous, "background": false, "truncation": "disabled",
        "max_output_tokens": null, "parallel_tool_calls": true, "service_tier": "default", "user": null,
        "temperature": generation.sampling.temperature, "top_p": generation.sampling.top_p, "top_logprobs": 0,
        "presence_penalty": generation.sampling.presence_penalty, "frequency_penalty": generation.sampling.frequency_penalty,
        "max_tool_calls": null, "completed_at": null, "safety_identifier": null, "prompt_cache_key": null});
    for (field, value) in echoed {
        if field != "stream" {
            frame[field] = value;
        }
    }
    frame["model"] = head.model.as_str().into();
    frame
}

/// Fields of a chat request by the names that this API has for them.
fn in_its_words(error: ApiError) -> ApiError {
    error.in_words_of(|param| {
        Some(match param {
            "max_completion_tokens" => "max_output_tokens".to_owned(),
            "messages" | "prompt" => "input".to_owned(),
            "response_format" => "text.format".to_owned(),
            "reasoning_effort" => "reasoning.effort".to_owned(),
            "verbosity" => "text.verbosity".to_owned(),
            "tool_choice.function.name" => "tool_choice.name".to_owned(),
            _ if param.starts_with("response_format.") => {
                param.replacen("response_format", "text.format", 1).replacen(".json_schema", "", 1)
            }
            _ if param.starts_with("tools[") => param.replacen(".function", "", 1),
            _ if param.starts_with("tool_choice.allowed_tools.") => param.replacen(".allowed_tools", "", 1),
            _ => return None,
        })
    })
}
