//! `POST /v1/chat/completions`: from fields to an answer. The prompt is `prompt`'s, the wire forms are `chat_answer`'s.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::Deserialize;

use crate::{
    http::{
        body::streamed,
        chat_answer::{AnswerForm, ChatCompletion, ChatShape},
        error::ApiError,
        extract::Admitted,
        fields::Fields,
        generate::{self, TokenizedRequest},
        neutral::take_neutral_of_chat,
        params::{Delivery, Generation, MAX_TOP_LOGPROBS},
        prompt::{Prompt, of_messages},
        stream::Frames,
        usage::UsageSum,
    },
    replica::Replica,
};

/// Answers one chat completion.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    Admitted { open, mut fields }: Admitted,
) -> Result<Response, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let generation = Generation::take(&mut fields, &generate::defaults(&served))?;
    let logprobs = logprobs_wanted(&mut fields)?;
    refuse_formats(&mut fields)?;
    let prompt = Prompt::take(&mut fields)?;
    take_neutral_of_chat(&mut fields)?;
    fields.finish()?;

    let form = AnswerForm { logprobs: logprobs.is_some(), tool_calls: prompt.has_tools() };
    let tokens = prompt.tokens(&served, generation.truncate).await.map_err(of_messages)?;
    let request = TokenizedRequest { prompts: vec![tokens], generation, logprobs };
    let choices = generate::start(&replica, &served, &request, open).map_err(of_messages)?;
    let head = generate::answer_head(&replica, "chatcmpl", &request.generation);
    let usage = UsageSum::new(request.generation.n);
    match request.generation.delivery {
        Delivery::Stream { include_usage } => {
            let shape = ChatShape::new(&head, form, choices.n_choices());
            streamed(choices, Frames::new(head, shape, include_usage), usage).await
        }
        Delivery::Whole => {
            let (completions, usage) = choices.collect(usage).await?;
            Ok(Json(ChatCompletion::new(head, form, completions, usage)).into_response())
        }
    }
}

#[derive(Deserialize)]
struct ResponseFormat {
    r#type: String,
}

fn refuse_formats(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.take::<ResponseFormat>("response_format")? {
        Some(format) if format.r#type != "text" => {
            let message = format!("response_format `{}` is not supported: use `text`", format.r#type);
            Err(ApiError::unsupported("response_format", message))
        }
        _ => Ok(()),
    }
}

fn logprobs_wanted(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top = fields.number("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`")),
    }
}
