//! What the requests of `constrained_N` and `required_N` are bound to: JSON schemas, no two alike, whose answers never end by
//! themselves. Runs nothing.

use serde_json::{Value, json};
use stoker_engine::{
    TokenId,
    constraint::{Constraint, Grammar, Matcher},
    grammar::GrammarSpec,
};

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

/// What an application asks about a parcel: many keys, all of them required, and little to say of each.
const REQUIRED: [&str; 16] = [
    "tracking_number",
    "sender_name",
    "recipient_name",
    "delivery_address",
    "postal_code",
    "country_code",
    "weight_in_grams",
    "is_insured",
    "declared_value",
    "currency",
    "shipping_method",
    "estimated_delivery_date",
    "requires_signature",
    "customs_category",
    "number_of_items",
    "special_instructions",
];

/// The schema of one request: an endless list of parcels, of which a model says numbers of a digit, and yes or no.
pub fn required(n: u32) -> GrammarSpec {
    let kinds = [json!({"type": "integer", "minimum": 0, "maximum": 9}), json!({"type": "boolean"})];
    let names: Vec<String> = REQUIRED.iter().map(|name| format!("{name}_{n}")).collect();
    let properties: serde_json::Map<String, Value> = names.iter().cloned().zip(kinds.into_iter().cycle()).collect();
    let parcel = json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false});
    GrammarSpec::Json(json!({"type": "array", "minItems": 10_000, "items": parcel}))
}

/// A grammar of the same masks of which no token is known ahead: an end token may come beside each, in a request whose
/// `min_tokens` forbids it.
#[derive(Debug)]
pub struct TokenByToken {
    /// The grammar.
    pub inner: Constraint,
    /// The end token.
    pub end: TokenId,
}

#[derive(Debug)]
struct TokenByTokenMatcher {
    inner: Box<dyn Matcher>,
    end: TokenId,
}

impl Grammar for TokenByToken {
    fn matcher(&self) -> Box<dyn Matcher> {
        Box::new(TokenByTokenMatcher { inner: self.inner.0.matcher(), end: self.end })
    }
}

impl Matcher for TokenByTokenMatcher {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        self.inner.allow(mask)?;
        mask[self.end as usize / 32] |= 1 << (self.end % 32);
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        self.inner.accept(token)
    }
}

/// A grammar that leaves it to the model how texts that must come are spelt.
#[derive(Debug)]
pub struct AnySpelling(pub Constraint);

impl Grammar for AnySpelling {
    fn matcher(&self) -> Box<dyn Matcher> {
        self.0.0.any_spelling()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use stoker_engine::{Tokenizer, grammar::GrammarCompiler};

    use super::*;

    #[test]
    fn schemas_compile_and_no_two_are_alike() {
        let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap();
        for schema in [schema, required] {
            let grammars: Vec<_> = (0..3).map(|n| compiler.compile(&schema(n)).unwrap().0).collect();
            assert!(grammars[0] != grammars[1] && grammars[1] != grammars[2]);
        }
    }
}
