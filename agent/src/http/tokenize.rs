//! `POST /tokenize` and `/detokenize`, in vLLM's shape. Uses the engine's tokenizer and never its scheduler, so they also
//! answer while the replica drains.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde::Serialize;
use stoker_engine::TokenId;

use crate::{
    http::{error::ApiError, extract::JsonFields, fields::Fields, generate, prompt::Prompt},
    replica::{Replica, Served},
};

/// Answer of `/tokenize`.
#[derive(Serialize)]
pub(crate) struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<String>>,
}

/// Answer of `/detokenize`.
#[derive(Serialize)]
pub(crate) struct Detokenized {
    prompt: String,
}

/// Tokens of a prompt or of messages.
pub(crate) async fn tokenize(
    State(replica): State<Arc<Replica>>,
    JsonFields(mut fields): JsonFields,
) -> Result<Json<Tokenized>, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let with_texts = fields.take("return_token_strs")?.unwrap_or(false);
    let (text, specials) = text_of(&mut fields, &served)?;
    fields.finish()?;
    let tokens = generate::tokenize(&served, text, specials).await?;
    let texts = with_texts.then(|| tokens.iter().map(|token| served.engine.tokenizer().token_text(*token)).collect());
    Ok(Json(Tokenized {
        count: tokens.len(),
        max_model_len: served.engine.model().max_model_len,
        tokens,
        token_strs: texts,
    }))
}

fn text_of(fields: &mut Fields, served: &Served) -> Result<(String, generate::AddSpecials), ApiError> {
    if let Some(prompt) = fields.take("prompt")? {
        return Ok((prompt, fields.take("add_special_tokens")?.unwrap_or(true).into()));
    }
    let prompt = Prompt::take(fields)?;
    Ok((prompt.render(served)?, prompt.add_specials))
}

/// Text of tokens.
pub(crate) async fn detokenize(
    State(replica): State<Arc<Replica>>,
    JsonFields(mut fields): JsonFields,
) -> Result<Json<Detokenized>, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let tokens: Vec<TokenId> = fields.require("tokens")?;
    fields.finish()?;
    let vocab_size = served.engine.model().vocab_size;
    if let Some(token) = tokens.iter().find(|token| **token >= vocab_size) {
        let message = format!("token {token} is outside the vocabulary of {vocab_size}");
        return Err(ApiError::invalid("tokens", message));
    }
    Ok(Json(Detokenized { prompt: served.engine.tokenizer().decode(&tokens) }))
}
