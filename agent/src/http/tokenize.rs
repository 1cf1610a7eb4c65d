//! `POST /tokenize` and `/detokenize`, in vLLM's shape. Uses the engine's tokenizer and never its scheduler, so they also
//! answer while the replica drains.

use std::sync::Arc;

use axum::{Json, extract::State};
use serde::Serialize;
use stoker_engine::TokenId;

use crate::{
    http::{
        error::ApiError,
        extract::JsonFields,
        generate::{self, Encoding},
        prompt::{Prompt, of_messages},
    },
    replica::Replica,
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
    let tokens = match fields.take("prompt")? {
        Some(prompt) => {
            let specials = fields.take("add_special_tokens")?.unwrap_or(true).into();
            fields.finish()?;
            generate::tokenize(&served, vec![prompt], Encoding::new(specials, None)).await?.concat()
        }
        None => {
            let prompt = Prompt::take(&mut fields, replica.settings(), &served, None).await?;
            fields.finish()?;
            prompt.tokens(&served).await.map_err(of_messages)?.tokens
        }
    };
    let texts = with_texts.then(|| tokens.iter().map(|token| served.engine.tokenizer().token_text(*token)).collect());
    Ok(Json(Tokenized {
        count: tokens.len(),
        max_model_len: served.engine.model().max_model_len,
        tokens,
        token_strs: texts,
    }))
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
