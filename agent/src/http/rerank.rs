//! `POST /rerank`, as Jina's, Cohere's and vLLM's: documents in the order in which they answer a query.

use std::sync::Arc;

use axum::{Json, extract::State, response::IntoResponse};
use serde::Serialize;

use crate::{
    http::{
        error::ApiError,
        extract::Admitted,
        generate::{self, Naming},
        params::request_id,
        relevance::{Comparison, Pairs, Side, WireText, WireTexts},
        usage::PromptUsage,
    },
    replica::Replica,
};

/// Answer of `/rerank`.
#[derive(Serialize)]
pub(crate) struct Reranked {
    id: String,
    model: String,
    usage: PromptUsage,
    results: Vec<Ranked>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Ranked {
    /// Its place among the documents that were sent.
    index: usize,
    relevance_score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Document {
    text: String,
}

/// The best documents, best first.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    Admitted { open, mut fields }: Admitted,
) -> Result<impl IntoResponse, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let query = Side { field: "query", texts: vec![fields.require::<WireText>("query")?.into_text()] };
    let documents = Side { field: "documents", texts: fields.require::<WireTexts>("documents")?.into_texts() };
    let pairs = Pairs::new(query, documents)?;
    // 0 is all of them, as in vLLM.
    let top_n = fields.number("top_n", 0..=u32::MAX)?.filter(|top_n| *top_n > 0);
    let returns_documents = fields.take("return_documents")?.unwrap_or(true);
    let comparison = Comparison::take(&mut fields, &open)?;
    let naming = Naming::new(request_id(&mut fields)?, open.passage.drawn.as_ref());
    fields.finish()?;
    let scores = comparison.scores(&served, &open, &pairs).await?;
    let texts = returns_documents.then(|| pairs.documents());
    let reranked = Reranked {
        id: naming.id("rerank"),
        model: replica.settings().served_names[0].clone(),
        usage: PromptUsage::of(scores.prompt_tokens),
        results: ranked(&scores.of_pairs, top_n.map(|top_n| top_n as usize), texts),
    };
    Ok((open.device_time.header(), Json(reranked)))
}

/// Best first; of equals, who was sent first.
fn ranked(scores: &[f64], top_n: Option<usize>, texts: Option<&[String]>) -> Vec<Ranked> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(top_n.unwrap_or(scores.len()));
    let document = |index: usize| texts.map(|texts| Document { text: texts[index].clone() });
    let ranked = |index| Ranked { index, relevance_score: scores[index], document: document(index) };
    order.into_iter().map(ranked).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_equals_in_their_order() {
        let scores = [0.1, 0.9, 0.1, 0.5];
        let order = |top_n| ranked(&scores, top_n, None).iter().map(|ranked| ranked.index).collect::<Vec<_>>();
        assert_eq!(order(None), [1, 3, 0, 2]);
        assert_eq!(order(Some(2)), [1, 3]);
        assert_eq!(order(Some(9)), [1, 3, 0, 2], "there are no more");
        let texts = ["a", "b", "c", "d"].map(str::to_owned);
        let best = &ranked(&scores, Some(1), Some(&texts))[0];
        assert_eq!((best.relevance_score, &best.document), (0.9, &Some(Document { text: "b".into() })));
    }
}
