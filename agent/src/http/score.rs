//! `POST /score`, as vLLM's: how well each pair of texts goes together.

use std::sync::Arc;

use axum::{Json, extract::State, response::IntoResponse};
use serde::Serialize;

use crate::{
    http::{
        error::ApiError,
        extract::Admitted,
        fields::Fields,
        generate::{self, Naming},
        params::request_id,
        relevance::{Comparison, Pairs, Side, WireTexts},
        usage::PromptUsage,
    },
    replica::Replica,
};

/// What clients call the two sides.
const SIDES: [[&str; 2]; 4] =
    [["text_1", "text_2"], ["queries", "documents"], ["queries", "items"], ["data_1", "data_2"]];

/// Answer of `/score`.
#[derive(Serialize)]
pub(crate) struct Scored {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Score>,
    usage: PromptUsage,
}

#[derive(Serialize)]
struct Score {
    index: usize,
    object: &'static str,
    score: f64,
}

/// Scores of all pairs, in their order.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    Admitted { open, mut fields }: Admitted,
) -> Result<impl IntoResponse, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let pairs = take_pairs(&mut fields)?;
    let comparison = Comparison::take(&mut fields, &open)?;
    let naming = Naming::new(request_id(&mut fields)?, open.passage.drawn.as_ref());
    fields.finish()?;
    let scores = comparison.scores(&served, &open, &pairs).await?;
    let score = |(index, score)| Score { index, object: "score", score };
    let scored = Scored {
        id: naming.id("score"),
        object: "list",
        created: naming.created,
        model: replica.settings().served_names[0].clone(),
        data: scores.of_pairs.into_iter().enumerate().map(score).collect(),
        usage: PromptUsage::of(scores.prompt_tokens),
    };
    Ok((open.device_time.header(), Json(scored)))
}

/// By the names that are there; those of the first if none are.
fn take_pairs(fields: &mut Fields) -> Result<Pairs, ApiError> {
    let sent = SIDES.into_iter().find(|sides| sides.iter().all(|field| fields.has(field)));
    let [first, second] = sent.unwrap_or(SIDES[0]);
    let mut side = |field| -> Result<Side, ApiError> {
        Ok(Side { field, texts: fields.require::<WireTexts>(field)?.into_texts() })
    };
    Pairs::new(side(first)?, side(second)?)
}
