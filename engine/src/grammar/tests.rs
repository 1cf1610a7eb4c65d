//! Grammars over real vocabularies: whatever is drawn under the masks belongs to the language.

mod limits;

use std::{fs, path::Path};

use serde_json::{Value, json};
use stoker_kernels::draw::Draw;

use super::*;
use crate::constraint::{Matcher, allows, mask_words};

fn tokenizer(file: &str) -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    Tokenizer::from_json(&fs::read(path).unwrap()).unwrap()
}

/// Tokenizers of each kind, and their end tokens.
fn tokenizers() -> [(Arc<Tokenizer>, Vec<TokenId>); 4] {
    [
        (Tokenizer::bytes(), vec![256]),
        (tokenizer("models/ember/tokenizer.json"), vec![3, 2]),
        (tokenizer("tests/goldens/tokenizers/byte-level.json"), vec![0]),
        (tokenizer("tests/goldens/tokenizers/sentence-piece.json"), vec![2]),
    ]
    .map(|(tokenizer, eos)| (Arc::new(tokenizer), eos))
}

/// A text drawn at random from what the masks allow, and whether it ended by itself.
fn walk(tokenizer: &Tokenizer, eos: &[TokenId], constraint: &Constraint, seed: u64) -> (String, bool) {
    const MAX_TOKENS: u64 = 400;
    let mut matcher: Box<dyn Matcher> = constraint.0.matcher();
    let (mut bytes, n_ids) = (Vec::new(), tokenizer.n_ids());
    for position in 0..MAX_TOKENS {
        let mut mask = vec![0; mask_words(n_ids)];
        matcher.allow(&mut mask).unwrap();
        let noise = Draw::new(seed, position);
        let allowed = (0..n_ids as TokenId).filter(|token| allows(&mask, *token));
        // End tokens sooner or later, so that languages without a bound end too.
        let weight = |token: &TokenId| noise.gumbel(*token) + if eos.contains(token) { 3.0 } else { 0.0 };
        let token = allowed.max_by(|a, b| weight(a).total_cmp(&weight(b))).expect("something is allowed");
        if eos.contains(&token) {
            return (String::from_utf8(bytes).unwrap(), true);
        }
        matcher.accept(token).unwrap();
        bytes.extend(tokenizer.token_bytes(token));
    }
    (String::from_utf8_lossy(&bytes).into_owned(), false)
}

/// Texts that ended, over all tokenizers.
fn texts(spec: &GrammarSpec) -> Vec<String> {
    let mut texts = Vec::new();
    for (tokenizer, eos) in tokenizers() {
        let (constraint, _) = GrammarCompiler::new(&tokenizer, &eos).unwrap().compile(spec).unwrap();
        let walks = (0..12).map(|seed| walk(&tokenizer, &eos, &constraint, seed));
        texts.extend(walks.filter_map(|(text, ended)| ended.then_some(text)));
    }
    assert!(texts.len() > 8, "{} of 48 ended", texts.len());
    texts
}

/// The tokens that come where a grammar has one text, and at how many of them the mask left a choice.
fn spelt(matcher: &mut dyn Matcher, eos: &[TokenId], n_ids: usize) -> (Vec<TokenId>, usize) {
    let (mut tokens, mut n_choices) = (Vec::new(), 0);
    loop {
        let mut mask = vec![0; mask_words(n_ids)];
        matcher.allow(&mut mask).unwrap();
        let allowed: Vec<TokenId> = (0..n_ids as TokenId).filter(|token| allows(&mask, *token)).collect();
        if allowed.iter().any(|token| eos.contains(token)) {
            return (tokens, n_choices);
        }
        n_choices += usize::from(allowed.len() > 1);
        matcher.accept(allowed[0]).unwrap();
        tokens.push(allowed[0]);
    }
}

#[test]
fn where_one_text_may_come_its_tokens_are_those_of_the_tokenizer() {
    let texts = [
        "{\"customer\": {\"first_name\": null}}",
        "The parcel was delivered on Monday, 24 May.",
        "Grüße aus Zürich: 東京 🔥!",
        "<|im_end|></s>",
    ];
    for (tokenizer, eos) in tokenizers() {
        let compiler = GrammarCompiler::new(&tokenizer, &eos).unwrap();
        for text in texts {
            let (grammar, _) = compiler.compile(&GrammarSpec::Choice(vec![text.into()])).unwrap();
            let (tokens, n_choices) = spelt(&mut *grammar.0.matcher(), &eos, tokenizer.n_ids());
            assert_eq!((tokenizer.decode(&tokens).as_str(), n_choices), (text, 0), "{tokens:?}");
            let alone = tokenizer.encode(text, false).unwrap();
            let is_plain = tokenizer.decode(&alone) == text && !alone.iter().any(|token| tokenizer.is_special(*token));
            assert!(!is_plain || tokens == alone, "{text}: {tokens:?} is not {alone:?}");
            let (anyhow, n_choices) = spelt(&mut *grammar.0.any_spelling(), &eos, tokenizer.n_ids());
            assert_eq!(tokenizer.decode(&anyhow), text);
            assert!(n_choices > 0 || tokenizer.n_ids() == 257, "{text}: other spellings are allowed, too");
        }
    }
}

#[test]
fn a_key_is_left_to_its_tokenizer_and_a_value_to_the_model() {
    let (tokenizer, eos) = tokenizers().into_iter().nth(1).expect("ember is the second");
    let schema = json!({"type": "object", "properties": {"customer_name": {"type": "string"}},
                        "required": ["customer_name"], "additionalProperties": false});
    let (grammar, _) = GrammarCompiler::new(&tokenizer, &eos).unwrap().compile(&GrammarSpec::Json(schema)).unwrap();
    let mut matcher = grammar.0.matcher();
    let text = tokenizer.encode("{\"customer_name\": \"Ada\"}", false).unwrap();
    let mut n_forced = 0;
    for token in &text {
        let mut mask = vec![0; mask_words(tokenizer.n_ids())];
        matcher.allow(&mut mask).unwrap();
        assert!(allows(&mask, *token), "the tokenizer's own spelling is never forbidden: {token} of {text:?}");
        n_forced += usize::from(mask.iter().map(|word| word.count_ones()).sum::<u32>() == 1);
        matcher.accept(*token).unwrap();
    }
    assert!(n_forced >= 2 && n_forced < text.len(), "{n_forced} of {} tokens are forced", text.len());
}

/// Goes ways through a grammar, one for each seed, with masks as they are and as llguidance computes them by itself. What one way has learnt
/// the next ones know. Returns the nodes of the vocabulary that either tried on each way.
fn beside_llguidance(
    compiler: &GrammarCompiler,
    spec: &GrammarSpec,
    seeds: impl IntoIterator<Item = u64>,
) -> Vec<[usize; 2]> {
    let by_itself = compiler.factory.create_parser(spec.grammar().unwrap());
    let parsers = [compiler.parser(spec).unwrap(), by_itself.unwrap()].map(|mut parser| {
        parser.token_env = vocabulary::any_spelling(&parser.token_env);
        parser
    });
    let way = |seed| beside(parsers.each_ref().map(|parser| llguidance::Matcher::new(Ok(parser.clone()))), spec, seed);
    seeds.into_iter().map(way).collect()
}

fn beside(mut both: [llguidance::Matcher; 2], spec: &GrammarSpec, seed: u64) -> [usize; 2] {
    let mut n_tried = [0, 0];
    for position in 0..60 {
        let [mask, expected] = both.each_mut().map(|matcher| matcher.compute_mask_or_eos());
        // llguidance's own limits end a way; ends that are ours are another test's.
        let (Ok(mask), Ok(expected)) = (mask, expected) else { break };
        assert!(mask == expected, "{spec:?}, seed {seed}, token {position}");
        let tried = both.each_ref().map(|matcher| matcher.last_step_stats().unwrap().trie_nodes_walked);
        n_tried = [n_tried[0] + tried[0], n_tried[1] + tried[1]];
        let noise = Draw::new(seed, position);
        let allowed = mask.to_list().into_iter().filter(|token| (*token as usize) < mask.len());
        let token = allowed.max_by(|a, b| noise.gumbel(*a).total_cmp(&noise.gumbel(*b))).unwrap();
        let taken = both.each_mut().map(|matcher| matcher.consume_token(token).is_ok());
        assert_eq!(taken[0], taken[1], "{spec:?}, seed {seed}, token {position}");
        if both.iter().any(|matcher| matcher.is_stopped()) {
            break;
        }
    }
    n_tried
}

#[test]
fn what_is_known_of_words_changes_no_mask() {
    let regexes = [
        r"(https?://[a-z0-9.-]{1,60}(/[A-Za-z0-9_-]{1,30}){0,8},? ?){1,20}",
        r"[a-z]{3,9}(-[a-z]{1,4}){0,5}",
        r"([a-f]+|[A-Za-z]{2,18}!)+",
        r"(?i)[a-z_]+(, [a-z_]+)*",
        r"(?:[a-z]{0,6}x[a-z]{0,20}){1,4}",
        r"[^\n]{0,40}\n",
    ];
    let schema = json!({"type": "object", "required": ["email", "code", "kind"], "additionalProperties": false, "properties": {
        "email": {"type": "string", "format": "email"}, "code": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}[0-9]*$"},
        "kind": {"enum": ["alpha", "beta", "betamax"]}, "note": {"type": "string", "maxLength": 12}}});
    let lark = r#"start: WORD ("-" WORD)* /[a-z ]+/ "." "#.to_owned() + "\nWORD: /[a-z]{2,12}/ | \"to\"";
    let specs = regexes.map(|regex| GrammarSpec::Regex(regex.into())).into_iter();
    let specs: Vec<_> = specs.chain([GrammarSpec::Json(schema), GrammarSpec::Lark(lark)]).collect();
    for (tokenizer, eos) in tokenizers() {
        let compiler = GrammarCompiler::new(&tokenizer, &eos).unwrap();
        for spec in &specs {
            beside_llguidance(&compiler, spec, 0..4);
        }
    }
}

/// Grammars made at random of what lexemes can be: counted, lazy, ended by a text that is theirs or not, special tokens, and JSON.
struct Made(u64, u64);

impl Made {
    fn one_of<'a>(&mut self, parts: &[&'a str]) -> &'a str {
        self.1 += 1;
        let noise = Draw::new(self.0, self.1);
        let idx = (0..parts.len() as u32).max_by(|a, b| noise.gumbel(*a).total_cmp(&noise.gumbel(*b)));
        parts[idx.expect("there are some") as usize]
    }

    fn regex(&mut self, n_nested: u32) -> String {
        let (class, times) = (
            self.one_of(&[
                "[a-z]",
                "[A-Za-z0-9_-]",
                "[a-z0-9.]",
                "[^\"\\n]",
                "[^x]",
                "[ a-f]",
                "(.|\\n)",
                "[à-ÿ]",
                "th",
                "ü",
                "=",
                "foo",
            ]),
            self.one_of(&["", "?", "*", "+", "{1,3}", "{2,9}", "{1,30}", "{17,60}"]),
        );
        let (first, second) = match n_nested {
            0 => return format!("({class}){times}"),
            _ => (self.regex(n_nested - 1), self.regex(n_nested - 1)),
        };
        match self.one_of(&["row", "or", "often"]) {
            "row" => format!("{first}{second}"),
            "or" => format!("({first}|{second})"),
            _ => format!("({first}{second}){times}"),
        }
    }

    fn rule(&mut self, name: &str) -> String {
        let text = self.one_of(&["(.|\\n)*", "[a-z ,;]*", "[^x]{0,30}"]);
        let end = self.one_of(&["foo", "\\n", " the", "ing", "<end>"]);
        match self.one_of(&["regex", "regex", "lazy", "stop", "suffix", "special", "json"]) {
            "regex" => format!("{name}: /{}/", self.regex(2)),
            "lazy" => format!("{name}[lazy]: /{text}{end}/"),
            "stop" => format!("{name}[stop=/{end}/]: /{text}/"),
            "suffix" => format!("{name}[suffix=/{end}/]: /{text}/"),
            "special" => format!("{name}: {}", self.one_of(&["<[5]>", "<[3-9]>", "<[2]> /a+/"])),
            _ => {
                let email = r#"%json {"type": "string", "format": "email"}"#;
                let short = r#"%json {"type": "string", "maxLength": 20}"#;
                let words = r#"%json {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,20}$"}}"#;
                format!("{name}: {}", self.one_of(&[email, short, words]))
            }
        }
    }

    fn lark(&mut self) -> String {
        let rules: Vec<String> = ["one", "two", "three"].map(|name| self.rule(name)).into();
        let mut item =
            || self.one_of(&["one", "two", "three", "one*", "two+", "three?", "\", \"", "\"foo\""]).to_owned();
        let [a, b, c, d] = [(); 4].map(|()| item());
        let blanks = self.one_of(&["", "%ignore /[ \\t]+/"]);
        format!("start: ({a} {b} | {c} {d})+\n{}\n{blanks}", rules.join("\n"))
    }
}

#[test]
fn grammars_made_at_random_have_the_masks_of_llguidance() {
    let mut n_compiled = 0;
    for (tokenizer, eos) in tokenizers() {
        let compiler = GrammarCompiler::new(&tokenizer, &eos).unwrap();
        for seed in 0..40 {
            let mut made = Made(seed, 0);
            for spec in [GrammarSpec::Regex(made.regex(3)), GrammarSpec::Lark(made.lark())] {
                if compiler.factory.create_parser(spec.grammar().unwrap()).is_ok() {
                    beside_llguidance(&compiler, &spec, 0..3);
                    n_compiled += 1;
                }
            }
        }
    }
    assert!(n_compiled > 200, "{n_compiled} of 320 are grammars");
}

#[test]
fn a_word_is_not_tried_token_by_token() {
    let (tokenizer, eos) = tokenizers().into_iter().nth(1).expect("ember is the second");
    let compiler = GrammarCompiler::new(&tokenizer, &eos).unwrap();
    let spec = GrammarSpec::Regex("[A-Za-z0-9_-]{200,300}".into());
    let [tried, by_itself] = beside_llguidance(&compiler, &spec, [7])[0];
    assert!(4 * tried < by_itself, "{tried} of {by_itself}");
}

#[test]
fn what_stays_in_a_lexeme_is_tried_once_for_a_state_of_the_lexer() {
    let (tokenizer, eos) = tokenizers().into_iter().nth(1).expect("ember is the second");
    let compiler = GrammarCompiler::new(&tokenizer, &eos).unwrap();
    let free_to_a_mark = "start: begun \"!\"\nbegun[lazy]: /(.|\\n)*<end>/";
    for spec in [GrammarSpec::Regex("([a-z0-9.]{40,80}/)+".into()), GrammarSpec::Lark(free_to_a_mark.into())] {
        let tried = beside_llguidance(&compiler, &spec, [7, 7]);
        let [again, by_itself] = tried[1];
        assert!(10 * again < by_itself, "{spec:?}: {tried:?}");
    }
}

fn refusal(spec: &GrammarSpec) -> String {
    GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap().compile(spec).unwrap_err().to_string()
}

#[test]
fn the_bytes_of_a_vocabulary_spell_every_text() {
    let text = "{\"naïve\": [1, -2.5e10], \"日本\": \"🔥\\n\"}  \t<tool_call>\n</think> done";
    for (tokenizer, _) in tokenizers() {
        let words = vocabulary::words(&tokenizer);
        assert_eq!(words.len(), tokenizer.n_ids());
        let tokens = tokenizer.encode(text, false).unwrap();
        let spelled: Vec<u8> = tokens.iter().flat_map(|token| words[*token as usize].clone()).collect();
        let spelled = String::from_utf8(spelled).unwrap();
        // SentencePiece puts a space in front of a text.
        assert_eq!(spelled.trim_start_matches(' '), text);
        for (token, word) in (0..).zip(&words).filter(|(token, _)| tokenizer.is_special(*token)) {
            assert_eq!(
                (word[0], &word[1..]),
                (0xff, tokenizer.token_bytes(token).as_slice()),
                "no text begins with it"
            );
        }
    }
}

#[test]
fn drawn_objects_have_every_required_key_and_the_types_of_the_schema() {
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
        "properties": {
            "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["a", "b", null]}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
        }
    });
    for text in texts(&GrammarSpec::Json(schema)) {
        let value: Value = serde_json::from_str(&text).expect(&text);
        assert!(value["name"].as_str().expect(&text).chars().count() <= 8, "{text}");
        assert!((0..=150).contains(&value["age"].as_i64().expect(&text)), "{text}");
        assert!(value["tags"].as_array().expect(&text).iter().all(Value::is_boolean), "{text}");
        let known = ["name", "age", "kind", "tags"];
        assert!(value.as_object().unwrap().keys().all(|key| known.contains(&key.as_str())), "{text}");
    }
}

#[test]
fn any_object_is_json_and_ends_where_it_closes() {
    for text in texts(&GrammarSpec::json_object()) {
        // Numbers may be larger than any of Rust's: they are JSON all the same.
        assert!(serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok() && text.starts_with('{'), "{text}");
    }
}

#[test]
fn choices_expressions_and_both_notations_of_grammars_hold() {
    let choices = ["red", "green light", "é\"\\\n"].map(str::to_owned).to_vec();
    for text in texts(&GrammarSpec::Choice(choices.clone())) {
        assert!(choices.contains(&text), "{text:?}");
    }
    for text in texts(&GrammarSpec::Regex(r"[a-c]{2}-[0-9]{1,3}".into())) {
        let (letters, digits) = text.split_once('-').expect(&text);
        assert!(letters.len() == 2 && (1..=3).contains(&digits.len()) && digits.parse::<u32>().is_ok(), "{text}");
    }
    let lark = "start: \"say \" WORD\nWORD: /[xy]+/";
    let ebnf = "# what is said\nroot ::= \"say \" my-word\nmy-word ::= [xy]+";
    for grammar in [lark, ebnf] {
        for text in texts(&GrammarSpec::Lark(lark_from_ebnf(grammar))) {
            let word = text.strip_prefix("say ").expect(&text);
            assert!(!word.is_empty() && word.chars().all(|c| "xy".contains(c)), "{text}");
        }
    }
}

#[test]
fn a_frame_puts_languages_together() {
    let parts = vec![("body".to_owned(), GrammarSpec::Json(json!({"type": "integer", "minimum": 7, "maximum": 7})))];
    let frame = GrammarSpec::Frame { lark: "start: \"<b>\" @body \"</b>\"".into(), parts };
    for text in texts(&frame) {
        assert_eq!(text, "<b>7</b>");
    }
}

#[test]
fn the_same_question_is_compiled_once() {
    let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap();
    let (first, source) = compiler.compile(&GrammarSpec::json_object()).unwrap();
    assert_eq!(source, Source::Compiled);
    assert_eq!(compiler.compile(&GrammarSpec::json_object()).unwrap(), (first.clone(), Source::Cached));
    for n in 0..100 {
        compiler.compile(&GrammarSpec::Choice(vec![n.to_string()])).unwrap();
    }
    let (again, source) = compiler.compile(&GrammarSpec::json_object()).unwrap();
    assert!(source == Source::Compiled && again != first, "the cache is bounded");
}

/// Rules that lead to the next one, as many as may be sent.
fn chain(rule: impl Fn(usize) -> String) -> String {
    let (mut lark, mut n) = ("start: r0".to_owned(), 0);
    while lark.len() < MAX_LARK_BYTES - 200 {
        lark += &rule(n);
        n += 1;
    }
    format!("{lark}\nr{n}: \"a\"")
}

#[test]
fn the_longest_chains_of_rules_and_references_are_compiled_or_refused() {
    let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap();
    let (open, close) = ("(".repeat(25), ")".repeat(25));
    let links = 8000;
    let defs: serde_json::Map<String, Value> =
        (0..links).map(|n| (format!("a{n}"), json!({"$ref": format!("#/$defs/a{}", n + 1)}))).collect();
    let defs = defs.into_iter().chain([(format!("a{links}"), json!({"type": "null"}))]).collect::<Value>();
    for spec in [
        GrammarSpec::Lark(chain(|n| format!("\nr{n}: r{}", n + 1))),
        GrammarSpec::Lark(chain(|n| format!("\nr{n}: {open}r{}{close}", n + 1))),
        GrammarSpec::Json(json!({"$ref": "#/$defs/a0", "$defs": defs})),
    ] {
        // Each overflowed the stack of an ordinary thread, and ended the process.
        compiler.compile(&spec).unwrap();
    }
    for (lark, word) in [
        ("start: start", "nothing matches it"),
        ("start: WORD\nWORD: \"a\" WORD | \"b\"", "circular reference"),
        (&format!("start: {}\"a\"{}", "(".repeat(9000), ")".repeat(9000)), "too deeply nested"),
    ] {
        let reason = refusal(&GrammarSpec::Lark(lark.into()));
        assert!(reason.contains(word), "{reason}");
    }
    for schema in [
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        json!({"allOf": (0..30).map(|n| json!({"anyOf": [{"properties": {format!("a{n}"): {"type": "null"}}},
            {"properties": {format!("b{n}"): {"type": "null"}}}]})).collect::<Vec<_>>()}),
    ] {
        assert!(refusal(&GrammarSpec::Json(schema)).len() < 2000);
    }
}

#[test]
fn a_rule_of_as_many_literals_as_a_grammar_has_room_for_is_followed_to_its_end() {
    // The shortest that are all different: eight bytes each with their quotes and bars.
    let literals: Vec<String> = (0..15_000).map(|n| format!("\"{n:x}\"")).collect();
    let lark = format!("start: {}", literals.join(" | "));
    assert!(lark.len() < MAX_LARK_BYTES);
    let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap();
    let mut matcher = compiler.compile(&GrammarSpec::Lark(lark)).unwrap().0.0.matcher();
    for byte in *b"3a9" {
        let mut mask = [0; 9];
        matcher.allow(&mut mask).unwrap();
        assert!(mask[usize::from(byte) / 32] & 1 << (byte % 32) != 0, "{mask:x?}");
        matcher.accept(byte.into()).unwrap();
    }
}

#[test]
fn what_cannot_be_compiled_is_refused_with_a_reason() {
    let many = (0..10_000).map(|n| n.to_string()).collect();
    assert_eq!(refusal(&GrammarSpec::Choice(many)), "it has 10000 choices, the limit is 4096: send a smaller one");
    assert!(refusal(&GrammarSpec::Choice(vec![])).contains("at least one"));
    assert!(refusal(&GrammarSpec::Lark("x".repeat(MAX_LARK_BYTES + 1))).contains("the limit is 131072"));
    assert!(refusal(&GrammarSpec::Regex("x".repeat(MAX_GRAMMAR_BYTES))).contains("the limit is 262144"));
    for (spec, word) in [
        (GrammarSpec::Json(json!({"type": "strin"})), "strin"),
        (GrammarSpec::Json(json!(false)), ""),
        (GrammarSpec::Json(json!({"type": "object", "required": ["x"], "properties": {"x": false}})), "x"),
        (GrammarSpec::Json(json!({"not": {"type": "string"}})), "not"),
        (GrammarSpec::Json(json!({"$ref": "#/$defs/missing"})), "missing"),
        (GrammarSpec::Json(json!({"$ref": "https://example.com/a.json"})), ""),
        (GrammarSpec::Regex("ab(unclosed".into()), "at character 3 in `ab(unclosed`: unclosed group"),
        (GrammarSpec::Regex("(".repeat(100_000)), "at character 100000 in `…(((("),
        (GrammarSpec::Lark("start: other".into()), "other"),
        (GrammarSpec::Lark("nonsense".into()), ""),
    ] {
        let reason = refusal(&spec);
        assert!(reason.contains(word) && reason.chars().count() <= 401, "{spec:?}: {reason}");
        println!("{spec:?}\n    {reason}");
    }
}
