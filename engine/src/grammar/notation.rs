//! EBNF as llama.cpp and xgrammar write it (GBNF), rewritten as Lark: the same rules in another spelling.

/// A text as a literal of Lark.
pub fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("text is always JSON")
}

/// Whether a grammar is EBNF rather than Lark, by the sign that defines a rule.
fn is_ebnf(grammar: &str) -> bool {
    grammar.contains("::=")
}

/// Lark for a grammar in EBNF, whose first rule is `root`; a grammar in Lark as it is.
pub fn lark_from_ebnf(grammar: &str) -> String {
    if !is_ebnf(grammar) {
        return grammar.to_owned();
    }
    let mut lark = String::with_capacity(grammar.len());
    let mut rest = grammar;
    while let Some(c) = rest.chars().next() {
        let n = match c {
            '"' => literal_len(rest, '"'),
            '[' => {
                let len = literal_len(rest, ']');
                lark.push('/');
                lark.push_str(&rest[..len].replace('/', "\\/"));
                lark.push('/');
                rest = &rest[len..];
                continue;
            }
            '#' => {
                let len = rest.find('\n').unwrap_or(rest.len());
                rest = &rest[len..];
                continue;
            }
            ':' if rest.starts_with("::=") => {
                lark.push(':');
                rest = &rest[3..];
                continue;
            }
            _ if is_name(c) => {
                let len = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
                lark.push_str(&rule_name(&rest[..len]));
                rest = &rest[len..];
                continue;
            }
            '{' => {
                let len = rest.find('}').map_or(rest.len(), |at| at + 1);
                lark.push_str(&rest[..len]);
                rest = &rest[len..];
                continue;
            }
            '.' => {
                lark.push_str("/(?s:.)/");
                rest = &rest[1..];
                continue;
            }
            c => c.len_utf8(),
        };
        lark.push_str(&rest[..n]);
        rest = &rest[n..];
    }
    lark
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Lark's rules are lower case, and where a grammar begins is called `start`.
fn rule_name(name: &str) -> String {
    match name {
        "root" => "start".to_owned(),
        name => format!("r_{}", name.to_ascii_lowercase().replace('-', "_")),
    }
}

/// Bytes of a literal up to its unescaped end, which is included.
fn literal_len(text: &str, end: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == end => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}
