//! What grammars make of schemas that others wrote: how many are refused, what compiling and each mask take, whether texts that a schema
//! allows and forbids are told apart, and what comes out of a model that knows nothing.
//!
//! Reads JSON files of three kinds: a schema, a schema with instances (`{"schema", "tests": [{"data", "valid"}]}`, as MaskBench has
//! them), and groups of these (JSON Schema's own test suite).

use std::{
    fs,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_engine::{
    TokenId, Tokenizer,
    constraint::{Constraint, allows, mask_words},
    grammar::{GrammarCompiler, GrammarSpec},
};

use crate::masks::{Spread, Words};

/// What is read, and what comes of it.
#[derive(Debug)]
pub struct Asked {
    /// Folder of JSON files, looked through to the bottom.
    pub directory: PathBuf,
    /// A `tokenizer.json` whose end token is `</s>`.
    pub tokenizer: PathBuf,
    /// Of each so many schemas one is taken, in the order of their paths.
    pub every: usize,
    /// Longest text that is drawn from a schema, in tokens; 0: none is.
    pub drawn_tokens: usize,
    /// Where drawn texts go, a line each: `{"schema", "text", "is_whole"}`; and refusals: `{"schema", "refused"}`.
    pub out: Option<PathBuf>,
}

/// A schema and texts that it should allow, or forbid.
struct Case {
    name: String,
    schema: Value,
    instances: Vec<(String, bool)>,
}

/// What was found.
#[derive(Debug, Default)]
struct Found {
    n_refused: usize,
    /// Instances by whether they should be allowed, then by whether they were.
    instances: [[usize; 2]; 2],
    n_drawn: usize,
    n_whole: usize,
    /// Tokens of drawn texts, and those of them that were no choice.
    n_tokens: usize,
    n_forced: usize,
    /// Texts and instances in which a grammar came to need more than it may: of which schema, and what it said.
    ended: Vec<String>,
    compiles: Vec<Duration>,
    /// On the way through instances, and through drawn texts.
    instance_masks: Vec<Duration>,
    drawn_masks: Vec<Duration>,
}

/// Goes through all schemas, and prints what was found.
pub fn run(asked: &Asked) -> Result<()> {
    let json = fs::read(&asked.tokenizer).with_context(|| format!("read {}", asked.tokenizer.display()))?;
    let tokenizer = Tokenizer::from_json(&json)?;
    let end = tokenizer.token_id("</s>").context("the vocabulary has no </s>")?;
    let walker = Walker {
        compiler: GrammarCompiler::new(&Arc::new(Tokenizer::from_json(&json)?), &[end])?,
        words: Words::of(&tokenizer),
        end,
        quote: Words::of(&tokenizer).encode("\"")?[0],
        n_tokens: tokenizer.n_ids(),
    };
    let cases = cases(&asked.directory)?;
    let taken: Vec<&Case> = cases.iter().step_by(asked.every.max(1)).collect();
    ensure!(!taken.is_empty(), "no schema in {}", asked.directory.display());
    let mut out = asked.out.as_deref().map(|path| fs::File::create(path).map(BufWriter::new)).transpose()?;
    let mut found = Found::default();
    for (idx, case) in taken.iter().enumerate() {
        if idx.is_multiple_of(200) {
            eprintln!("{idx} of {} schemas", taken.len());
        }
        let line = walker.look_at(case, asked.drawn_tokens, idx as u64, &mut found)?;
        if let (Some(out), Some(line)) = (&mut out, line) {
            writeln!(out, "{line}")?;
        }
    }
    found.print(taken.len());
    Ok(())
}

impl Found {
    fn print(self, n_schemas: usize) {
        let Self { n_refused, instances: [forbidden, allowed], n_drawn, n_whole, n_tokens, n_forced, ended, .. } = self;
        println!("schemas {n_schemas}, refused {n_refused}");
        println!("instances that a schema allows: {} taken, {} not", allowed[1], allowed[0]);
        println!("instances that a schema forbids: {} not taken, {} taken", forbidden[0], forbidden[1]);
        println!("texts drawn {n_drawn}, whole {n_whole}; of their {n_tokens} tokens {n_forced} were no choice");
        println!("ended since a grammar came to need more than it may: {}", ended.len());
        ended.iter().for_each(|line| println!("  {line}"));
        println!("{:34} {:>7} {:>9} {:>9} {:>9}", "us", "n", "p50", "p99", "most");
        let all = [self.instance_masks.clone(), self.drawn_masks.clone()].concat();
        let masks = [
            ("masks of instances", self.instance_masks),
            ("masks of drawn texts", self.drawn_masks),
            ("all masks", all),
        ];
        for (name, times) in [("compile", self.compiles)].into_iter().chain(masks) {
            if !times.is_empty() {
                println!("{}", Spread::new(name, times));
            }
        }
    }
}

/// Goes through the languages of a vocabulary.
struct Walker {
    compiler: GrammarCompiler,
    words: Words,
    end: TokenId,
    quote: TokenId,
    n_tokens: usize,
}

impl Walker {
    /// What there is to tell of a schema, in a line.
    fn look_at(&self, case: &Case, drawn_tokens: usize, seed: u64, found: &mut Found) -> Result<Option<Value>> {
        let begun = Instant::now();
        let compiled = self.compiler.compile(&GrammarSpec::Json(case.schema.clone()));
        found.compiles.push(begun.elapsed());
        let grammar = match compiled {
            Ok((grammar, _)) => grammar,
            Err(refusal) => {
                found.n_refused += 1;
                return Ok(Some(json!({"name": case.name, "schema": case.schema, "refused": refusal.to_string()})));
            }
        };
        for (text, is_valid) in &case.instances {
            match self.takes(&grammar, self.words.encode(text)?, &mut found.instance_masks) {
                Ok(is_taken) => found.instances[usize::from(*is_valid)][usize::from(is_taken)] += 1,
                Err(why) => found.ended.push(format!("{}: an instance: {why}", case.name)),
            }
        }
        if drawn_tokens == 0 {
            return Ok(None);
        }
        let (text, is_whole) = self.draw(case, &grammar, drawn_tokens, seed, found)?;
        found.n_drawn += 1;
        found.n_whole += usize::from(is_whole);
        Ok(Some(json!({"name": case.name, "schema": case.schema, "text": text, "is_whole": is_whole})))
    }

    /// Whether a text of these tokens is of the language; an error where its grammar comes to need more than it may.
    fn takes(&self, grammar: &Constraint, tokens: Vec<TokenId>, masks: &mut Vec<Duration>) -> Result<bool, String> {
        let (mut matcher, mut mask) = (grammar.0.any_spelling(), vec![0; mask_words(self.n_tokens)]);
        for token in tokens.into_iter().chain([self.end]) {
            let begun = Instant::now();
            mask.fill(0);
            matcher.allow(&mut mask)?;
            masks.push(begun.elapsed());
            if !allows(&mask, token) {
                return Ok(false);
            }
            if token != self.end {
                matcher.accept(token)?;
            }
        }
        Ok(true)
    }

    /// A text drawn by nobody in particular: any token that may come, but often the end of the text or of a string; whether it is whole.
    fn draw(
        &self,
        case: &Case,
        grammar: &Constraint,
        most: usize,
        seed: u64,
        found: &mut Found,
    ) -> Result<(String, bool)> {
        let (mut matcher, mut mask) = (grammar.0.matcher(), vec![0; mask_words(self.n_tokens)]);
        let (mut random, mut bytes) = (StdRng::seed_from_u64(seed), Vec::new());
        for _ in 0..most {
            let begun = Instant::now();
            mask.fill(0);
            if let Err(why) = matcher.allow(&mut mask) {
                found.ended.push(format!("{}: a text: {why}", case.name));
                break;
            }
            found.drawn_masks.push(begun.elapsed());
            found.n_tokens += 1;
            found.n_forced += usize::from(mask.iter().map(|word| word.count_ones()).sum::<u32>() == 1);
            let token =
                [self.end, self.quote].into_iter().find(|token| allows(&mask, *token) && random.random_bool(0.4));
            let token = token.or_else(|| any(&mask, &mut random)).context("a mask allows nothing")?;
            if token == self.end {
                return Ok((String::from_utf8_lossy(&bytes).into_owned(), true));
            }
            bytes.extend(self.words.bytes(token).unwrap_or_default());
            if let Err(why) = matcher.accept(token) {
                found.ended.push(format!("{}: a text: {why}", case.name));
                break;
            }
        }
        Ok((String::from_utf8_lossy(&bytes).into_owned(), false))
    }
}

/// One of the tokens that a mask allows.
fn any(mask: &[u32], random: &mut StdRng) -> Option<TokenId> {
    let n_allowed: u32 = mask.iter().map(|word| word.count_ones()).sum();
    let mut left = random.random_range(0..n_allowed.max(1));
    for (idx, word) in mask.iter().enumerate() {
        if left < word.count_ones() {
            let bit = (0..32).filter(|bit| word >> bit & 1 == 1).nth(left as usize)?;
            return Some((idx * 32) as TokenId + bit);
        }
        left -= word.count_ones();
    }
    None
}

/// Those of all files of a folder, by their paths.
fn cases(directory: &Path) -> Result<Vec<Case>> {
    let (mut folders, mut files) = (vec![directory.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|extension| extension == "json") => files.push(path),
                false => {}
            }
        }
    }
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        let value = serde_json::from_slice(&fs::read(&file)?).with_context(|| format!("read {}", file.display()))?;
        let name = file.strip_prefix(directory).unwrap_or(&file).display().to_string();
        cases.extend(of_file(&name, value));
    }
    Ok(cases)
}

fn of_file(name: &str, value: Value) -> Vec<Case> {
    match value {
        Value::Array(groups) => groups.into_iter().flat_map(|group| of_file(name, group)).collect(),
        Value::Object(mut fields) if fields.contains_key("schema") && fields.contains_key("tests") => {
            let instances = fields["tests"].as_array().into_iter().flatten();
            let instance = |test: &Value| Some((test.get("data")?.to_string(), test.get("valid")?.as_bool()?));
            let instances = instances.filter_map(instance).collect();
            let schema = fields.remove("schema").unwrap_or_default();
            vec![Case { name: name.to_owned(), schema, instances }]
        }
        schema => vec![Case { name: name.to_owned(), schema, instances: Vec::new() }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_three_kinds_are_read() {
        let test = json!({"description": "a test", "schema": {"type": "null"},
                          "tests": [{"data": {"b": 1, "a": [2]}, "valid": false}, {"data": null, "valid": true}]});
        for (value, n_cases, n_instances) in
            [(json!({"type": "null"}), 1, 0), (test.clone(), 1, 2), (json!([test.clone(), test]), 2, 4)]
        {
            let cases = of_file("f", value);
            assert!(cases.iter().all(|case| case.schema == json!({"type": "null"})));
            assert_eq!(
                (cases.len(), cases.iter().map(|case| case.instances.len()).sum::<usize>()),
                (n_cases, n_instances)
            );
            if let Some(case) = cases.iter().find(|case| !case.instances.is_empty()) {
                assert_eq!(case.instances, [("{\"b\":1,\"a\":[2]}".to_owned(), false), ("null".to_owned(), true)]);
            }
        }
    }

    #[test]
    fn any_token_is_one_that_the_mask_allows() {
        let mut mask = vec![0u32; 4];
        for token in [3, 64, 127] {
            mask[token / 32] |= 1 << (token % 32);
        }
        let mut random = StdRng::seed_from_u64(7);
        let drawn: std::collections::BTreeSet<_> = (0..200).filter_map(|_| any(&mask, &mut random)).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [3, 64, 127]);
        assert_eq!(any(&[0, 0], &mut random), None);
    }
}
