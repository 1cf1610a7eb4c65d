//! `POST /v1/embeddings`, as OpenAI's: a vector for each text, made as the model's own files say.

use std::{sync::Arc, time::Instant};

use axum::{Json, extract::State, response::IntoResponse};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};
use stoker_engine::{Request, RequestEvent, SamplingParams, StopParams};

use crate::{
    http::{
        error::ApiError,
        extract::{Admitted, Arrival},
        fields::Fields,
        generate::{self, Encoding},
        params::{Standing, truncation},
        stream::{has_failed, stopped},
        usage::PromptUsage,
        wire_prompt::WirePrompt,
    },
    replica::{Replica, Served},
};

/// Texts of one request, OpenAI's bound.
const MAX_TEXTS: usize = 2048;
/// Texts of one request that the engine has at a time: enough to fill its steps, few enough to leave room for others.
const AT_ONCE: usize = 16;

/// How numbers are written.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Encoded {
    #[default]
    Float,
    /// Of little-endian `f32`s. What OpenAI's Python client asks for.
    Base64,
}

/// What becomes of a vector.
#[derive(Clone, Copy, Debug)]
struct Finish {
    dimensions: Option<usize>,
    normalizes: bool,
    encoded: Encoded,
}

/// Answer of `/v1/embeddings`.
#[derive(Serialize)]
pub(crate) struct Embeddings {
    object: &'static str,
    data: Vec<Entry>,
    model: String,
    usage: PromptUsage,
}

#[derive(Serialize)]
struct Entry {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Vector {
    Floats(Vec<f32>),
    Base64(String),
}

/// Vectors of all texts.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    Admitted { open, mut fields }: Admitted,
) -> Result<impl IntoResponse, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let finish = Finish::take(&mut fields, &served)?;
    let truncate = truncation(&mut fields)?;
    let specials = fields.take("add_special_tokens")?.unwrap_or(true).into();
    let encoding = Encoding::new(specials, truncate);
    let input = WirePrompt::take(&mut fields, "input", &served, encoding).await?;
    fields.take::<String>("user")?;
    let standing = Standing::take(&mut fields, open.passage.salt.as_ref(), Instant::now())?;
    let template = request(&served, standing);
    fields.finish()?;
    check_number(input.len())?;
    let mut prompts = input.tokens(&served, encoding).await.map_err(of_input)?;
    for prompt in &mut prompts {
        generate::keep(prompt, truncate, served.engine.model().max_model_len);
    }
    let n_tokens = prompts.iter().map(Vec::len).sum();
    let vectors = prompts.into_iter().map(|prompt| vector_of(&served, &open, Request { prompt, ..template.clone() }));
    let vectors: Vec<Vec<f32>> = stream::iter(vectors).buffered(AT_ONCE).try_collect().await?;
    let entry = |(index, vector)| Entry { object: "embedding", index, embedding: finish.of(vector) };
    let embeddings = Embeddings {
        object: "list",
        data: vectors.into_iter().enumerate().map(entry).collect(),
        model: replica.settings().served_names[0].clone(),
        usage: PromptUsage::of(n_tokens),
    };
    Ok((open.device_time.header(), Json(embeddings)))
}

fn check_number(n_texts: usize) -> Result<(), ApiError> {
    if n_texts <= MAX_TEXTS {
        return Ok(());
    }
    let message = format!("`input` has {n_texts} texts, at most {MAX_TEXTS} are taken at once: send fewer");
    Err(ApiError::invalid("input", message))
}

/// What asks for the vector of a prompt that is still to be named.
pub(crate) fn request(served: &Served, Standing { priority, deadline, cache_salt }: Standing) -> Request {
    Request {
        priority,
        deadline,
        cache_salt,
        pooling: Some(served.engine.model().embedding.pooling),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        // The step that reads the end of a prompt samples a token, which nobody is told.
        stop: StopParams { max_tokens: 1, ..StopParams::default() },
        ..Request::default()
    }
}

/// One text, from its tokens to what the engine makes of them.
pub(crate) async fn vector_of(served: &Served, open: &Arrival, request: Request) -> Result<Vec<f32>, ApiError> {
    let submitted = served.engine.submit(request);
    let mut events = submitted.map_err(|reason| of_input(reason.into()))?;
    let mut vector = None;
    while let Some(event) = events.next().await {
        match event {
            RequestEvent::Embedding(made) => vector = Some(made),
            RequestEvent::Finished { reason, .. } if has_failed(&reason) => return Err(open.failed(&reason)),
            RequestEvent::Prompt(_) | RequestEvent::Delta { .. } | RequestEvent::Finished { .. } => {}
        }
    }
    open.device_time.add(events.device_time());
    vector.ok_or_else(|| open.failed(&stopped()))
}

/// The prompts were `input`, the field that the client knows.
fn of_input(error: ApiError) -> ApiError {
    match error.param.as_deref() {
        Some("input") => {
            let message = "the device that serves this model does not compute embeddings: ask a replica on CPUs";
            ApiError::unsupported("input", message)
        }
        Some("prompt") => ApiError { param: Some("input".into()), ..error },
        _ => error,
    }
}

impl Finish {
    fn take(fields: &mut Fields, served: &Served) -> Result<Self, ApiError> {
        let model = served.engine.model();
        let dimensions = fields.number("dimensions", 1..=model.hidden_size)?;
        Ok(Self {
            dimensions: dimensions.map(|dimensions| dimensions as usize),
            normalizes: model.embedding.normalizes,
            encoded: fields.take("encoding_format")?.unwrap_or_default(),
        })
    }

    /// Cut first, so that what is left has the length 1 too.
    fn of(self, mut vector: Vec<f32>) -> Vector {
        vector.truncate(self.dimensions.unwrap_or(vector.len()));
        if self.normalizes {
            normalize(&mut vector);
        }
        match self.encoded {
            Encoded::Float => Vector::Floats(vector),
            Encoded::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
                Vector::Base64(BASE64_STANDARD.encode(bytes))
            }
        }
    }
}

/// Makes the length 1. A vector of zeros has no direction and stays.
fn normalize(vector: &mut [f32]) {
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_cut_then_normalized_then_written() {
        let finish = Finish { dimensions: Some(2), normalizes: true, encoded: Encoded::Float };
        assert_eq!(finish.of(vec![3.0, 4.0, 12.0]), Vector::Floats(vec![0.6, 0.8]));
        let as_is = Finish { dimensions: None, normalizes: false, ..finish };
        assert_eq!(as_is.of(vec![3.0, 4.0]), Vector::Floats(vec![3.0, 4.0]));
        assert_eq!(finish.of(vec![0.0, 0.0]), Vector::Floats(vec![0.0, 0.0]));
        // 1.0 and -2.0 as bytes: 00 00 80 3f, 00 00 00 c0.
        let written = Finish { encoded: Encoded::Base64, ..as_is }.of(vec![1.0, -2.0]);
        assert_eq!(written, Vector::Base64("AACAPwAAAMA=".into()));
    }
}
