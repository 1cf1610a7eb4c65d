//! What the requests of `constrained_N` are bound to: JSON schemas, no two alike, whose answers never end by themselves. Runs nothing.

use serde_json::{Value, json};
use stoker_engine::grammar::GrammarSpec;

/// The schema of one request: an endless list of orders with numbers, words of a list, free text of bounded length and a date.
pub fn schema(n: u32) -> GrammarSpec {
    let codes: Vec<Value> = (0..50).map(|code| json!(format!("code-{}", code * 37 + n))).collect();
    let order = json!({
        format!("id_{n}"): {"type": "integer", "minimum": n, "maximum": 1_000_000 + n},
        "at": {"type": "string", "format": "date-time"},
        format!("note_{n}"): {"anyOf": [{"type": "string", "maxLength": 20 + n % 40}, {"type": "null"}]},
        "tags": {"type": "array", "maxItems": 4, "items": {"enum": codes}},
        "price": {"type": "number"},
    });
    let required: Vec<&String> = order.as_object().into_iter().flat_map(|fields| fields.keys()).collect();
    GrammarSpec::Json(json!({
        "type": "array",
        "minItems": 10_000,
        "items": {"type": "object", "properties": order, "required": required, "additionalProperties": false},
    }))
}

#[cfg(test)]
mod tests {
    use stoker_engine::{Tokenizer, grammar::GrammarCompiler};

    use super::*;

    #[test]
    fn schemas_compile_and_no_two_are_alike() {
        let compiler = GrammarCompiler::new(&Tokenizer::bytes(), &[256]).unwrap();
        let grammars: Vec<_> = (0..3).map(|n| compiler.compile(&schema(n)).unwrap().0).collect();
        assert!(grammars[0] != grammars[1] && grammars[1] != grammars[2]);
    }
}
