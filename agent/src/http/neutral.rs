//! Fields that other servers know and that nothing here acts on. Clients send them at the value that changes nothing, which is
//! taken; at any other value they are refused with the reason, and never ignored.

use serde_json::{Value, json};

use crate::http::{error::ApiError, fields::Fields};

/// A field and what is said about it.
pub(crate) struct Neutral {
    pub(crate) field: &'static str,
    /// Values that change nothing.
    pub(crate) values: Vec<Value>,
    /// Why another is refused.
    why: &'static str,
}

/// Takes those of every endpoint that generates.
pub(crate) fn take_neutral(fields: &mut Fields) -> Result<(), ApiError> {
    take_all(fields, table())
}

/// Takes those of chat only.
pub(crate) fn take_neutral_of_chat(fields: &mut Fields) -> Result<(), ApiError> {
    take_all(fields, table_of_chat())
}

/// Takes all of a table.
pub(crate) fn take_all(fields: &mut Fields, table: Vec<Neutral>) -> Result<(), ApiError> {
    table.into_iter().try_for_each(|neutral| take(fields, neutral))
}

fn take(fields: &mut Fields, Neutral { field, values, why }: Neutral) -> Result<(), ApiError> {
    match fields.take::<Value>(field)? {
        Some(value) if !values.iter().any(|neutral| is_same(neutral, &value)) => {
            let instead =
                values.first().map_or("remove it".to_owned(), |neutral| format!("use {neutral} or remove it"));
            Err(ApiError::unsupported(field, format!("`{field}` is not supported ({why}): {instead}")))
        }
        _ => Ok(()),
    }
}

/// `1` and `1.0` are one number to clients.
fn is_same(neutral: &Value, sent: &Value) -> bool {
    neutral == sent || matches!((neutral.as_f64(), sent.as_f64()), (Some(neutral), Some(sent)) if neutral == sent)
}

/// An entry of a table.
pub(crate) fn neutral<const N: usize>(field: &'static str, values: [Value; N], why: &'static str) -> Neutral {
    Neutral { field, values: values.into(), why }
}

/// Of every endpoint that generates.
pub(crate) fn table() -> Vec<Neutral> {
    const NO_BEAMS: &str = "tokens are sampled, never searched for by beams";
    const NO_CODE: &str = "no code of a client runs here";
    vec![
        neutral("modalities", [json!(["text"])], "answers are text"),
        neutral("store", [json!(false)], "nothing is stored here"),
        neutral("use_beam_search", [json!(false)], NO_BEAMS),
        neutral("length_penalty", [json!(1)], NO_BEAMS),
        neutral("early_stopping", [json!(false)], NO_BEAMS),
        neutral("logits_processors", [json!([])], NO_CODE),
        neutral("vllm_xargs", [json!({})], NO_CODE),
        neutral("mm_processor_kwargs", [json!({})], "only text is read"),
        neutral("kv_transfer_params", [json!({})], "keys and values are not handed over"),
        neutral("repetition_detection", [], "a text that repeats itself is not ended"),
        neutral("spaces_between_special_tokens", [json!(true), json!(false)], "text is what the tokens spell"),
    ]
}

/// Of chat only.
pub(crate) fn table_of_chat() -> Vec<Neutral> {
    const TOOLS: &str = "this is the older form of `tools` and `tool_choice`";
    vec![
        neutral("functions", [json!([])], TOOLS),
        neutral("function_call", [json!("none"), json!("auto")], TOOLS),
        neutral("audio", [], "answers are text"),
        neutral("prediction", [], "no answer is given in advance"),
        neutral("web_search_options", [], "nothing is searched for"),
        neutral("verbosity", [json!("medium")], "the model decides how much it says"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_both(json: &str) -> Result<(), ApiError> {
        let mut fields = Fields::parse(json.to_owned().into())?;
        take_neutral(&mut fields)?;
        take_neutral_of_chat(&mut fields)?;
        Ok(fields.finish()?)
    }

    #[test]
    fn every_field_is_taken_at_its_neutral_values_and_refused_at_others() {
        for Neutral { field, values, .. } in table().into_iter().chain(table_of_chat()) {
            for value in values.iter().chain([&Value::Null]) {
                assert_eq!(take_both(&json!({field: value}).to_string()), Ok(()), "{field} = {value}");
            }
            let refused = take_both(&json!({field: "something else"}).to_string()).unwrap_err();
            assert_eq!(refused.param.as_deref(), Some(field));
            assert!(refused.message.starts_with(&format!("`{field}` is not supported (")), "{}", refused.message);
        }
        assert_eq!(take_both(r#"{"length_penalty": 1.0}"#), Ok(()));
    }
}
