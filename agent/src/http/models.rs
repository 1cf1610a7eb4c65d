//! `GET /v1/models` and `/v1/models/{id}`: the names this replica answers to. `GET /version`: what it is.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde::Serialize;

use crate::{http::error::ApiError, replica::Replica};

/// OpenAI's list form.
#[derive(Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelCard>,
}

/// OpenAI's model object, with the context length as vLLM adds it.
#[derive(Serialize)]
pub(crate) struct ModelCard {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: String,
    max_model_len: Option<u32>,
}

/// All names.
pub(crate) async fn list(State(replica): State<Arc<Replica>>) -> Json<ModelList> {
    let data = replica.settings().served_names.iter().map(|name| card(&replica, name)).collect();
    Json(ModelList { object: "list", data })
}

/// One name.
pub(crate) async fn get(
    State(replica): State<Arc<Replica>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelCard>, ApiError> {
    let names = &replica.settings().served_names;
    // A name that is no text is nobody's name.
    let id = id.map_or_else(|_| char::REPLACEMENT_CHARACTER.to_string(), |Path(id)| id);
    if names.contains(&id) { Ok(Json(card(&replica, &id))) } else { Err(ApiError::unknown_model(&id, names)) }
}

/// The release of this server, as vLLM's answers for its own.
pub(crate) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// Answer of `/version`.
#[derive(Serialize)]
pub(crate) struct Version {
    version: &'static str,
}

fn card(replica: &Replica, name: &str) -> ModelCard {
    ModelCard {
        id: name.to_owned(),
        object: "model",
        created: replica.started_unix(),
        owned_by: "stoker",
        root: replica.settings().source.clone(),
        max_model_len: replica.served().ok().map(|served| served.engine.model().max_model_len),
    }
}
