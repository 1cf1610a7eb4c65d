//! The four forms in which OpenAI's APIs take texts that are not messages.

use std::sync::Arc;

use serde::Deserialize;
use stoker_engine::TokenId;

use crate::{
    http::{
        error::ApiError,
        fields::Fields,
        generate::{self, Encoding},
        long_texts::{self, Held},
    },
    replica::Served,
};

/// Texts, or their tokens.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, an array of strings, an array of token ids or an array of arrays of token ids"
)]
pub(crate) enum WirePrompt {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

impl WirePrompt {
    /// Takes the field they are in, unless one of them cannot fit the context.
    pub(crate) async fn take(
        fields: &mut Fields,
        field: &'static str,
        served: &Arc<Served>,
        encoding: Encoding,
    ) -> Result<Self, ApiError> {
        long_texts::refuse(fields, field, Held::Prompts, served, encoding).await?;
        Ok(fields.require(field)?)
    }

    /// Prompts.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::TokenLists(lists) => lists.len(),
        }
    }

    /// As texts.
    pub(crate) fn texts(&self, served: &Served) -> Vec<String> {
        let spell = |tokens: &Vec<TokenId>| served.engine.tokenizer().decode(tokens);
        match self {
            Self::Text(text) => vec![text.clone()],
            Self::Texts(texts) => texts.clone(),
            Self::Tokens(tokens) => vec![spell(tokens)],
            Self::TokenLists(lists) => lists.iter().map(spell).collect(),
        }
    }

    /// As tokens.
    pub(crate) async fn tokens(self, served: &Arc<Served>, encoding: Encoding) -> Result<Vec<Vec<TokenId>>, ApiError> {
        match self {
            Self::Text(text) => generate::tokenize(served, vec![text], encoding).await,
            Self::Texts(texts) => generate::tokenize(served, texts, encoding).await,
            Self::Tokens(tokens) => Ok(vec![tokens]),
            Self::TokenLists(lists) => Ok(lists),
        }
    }
}
