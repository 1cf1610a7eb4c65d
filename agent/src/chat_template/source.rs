//! A template's text, brought from Hugging Face's dialect into the one that is compiled. Evaluates nothing.

/// The text to compile.
pub(super) fn compiled_from(source: &str) -> String {
    // As Jinja2 reads every template, whatever system it was written on.
    let lines = source.replace("\r\n", "\n").replace('\r', "\n");
    with_format_calls(&without_generation_marks(&lines))
}

/// Hugging Face's dialect marks the assistant's text for training by `{% generation %}`; here the marks mean nothing. They
/// become a block that is always there, so that their white-space control still acts.
fn without_generation_marks(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let tag = &rest[start..start + len];
        plain.push_str(&rest[..start]);
        plain.push_str(&match tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['-', '+']).trim() {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.to_owned(),
        });
        rest = &rest[start + len..];
    }
    plain + rest
}

/// Python formats a text by `'%s and %s' % (a, b)`; here a text has no operator `%`, and a filter does the same.
fn with_format_calls(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{{").into_iter().chain(rest.find("{%")).min() {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag_len(tag);
        push_tag(&mut out, &tag[..end]);
        rest = &tag[end..];
    }
    out + rest
}

/// Bytes of a tag, in whose texts brackets end nothing.
fn tag_len(tag: &str) -> usize {
    let mut at = 2;
    while at < tag.len() {
        match tag.as_bytes()[at] {
            b'\'' | b'"' => at += text_len(&tag[at..]),
            b'%' | b'}' if tag[at + 1..].starts_with('}') => return at + 2,
            _ => at += 1,
        }
    }
    tag.len()
}

/// Bytes of the literal text that begins here, quotes included.
fn text_len(literal: &str) -> usize {
    let quote = literal.as_bytes()[0];
    let mut is_escaped = false;
    for (at, byte) in literal.bytes().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            _ if byte == quote => return at + 1,
            _ => {}
        }
    }
    literal.len()
}

fn push_tag(out: &mut String, tag: &str) {
    let mut rest = tag;
    while let Some(start) = rest.find(['\'', '"']) {
        let len = text_len(&rest[start..]);
        let (text, behind) = rest.split_at(start + len);
        out.push_str(text);
        rest = behind;
        let Some(operand) = behind.trim_start().strip_prefix('%').filter(|operand| !operand.starts_with('}')) else {
            continue;
        };
        let operand = operand.trim_start();
        let len = operand_len(operand);
        if len > 0 {
            let in_brackets = operand[..len].strip_prefix('(').and_then(|inner| inner.strip_suffix(')'));
            out.push_str("|format(");
            push_tag(out, in_brackets.unwrap_or(&operand[..len]));
            out.push(')');
            rest = &operand[len..];
        }
    }
    out.push_str(rest);
}

/// Bytes of a name, number, text or bracket, with what is called or looked up in it.
fn operand_len(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        match text.as_bytes()[at] {
            b'\'' | b'"' => {
                at += text_len(&text[at..]);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' if depth > 0 => depth -= 1,
            byte if depth > 0 || byte == b'.' || byte == b'_' || byte.is_ascii_alphanumeric() => {}
            _ => break,
        }
        at += 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_with_a_percent_sign_behind_it_is_formatted() {
        for (source, compiled) in [
            ("{{ '%s %d' % (a, 1) }} 5 % 3", "{{ '%s %d'|format(a, 1) }} 5 % 3"),
            ("{{ \"%s\" % a.b['%'](c) + 'x' }}", "{{ \"%s\"|format(a.b['%'](c)) + 'x' }}"),
            ("{% set x = '%s' % ('%s' % y) %}", "{% set x = '%s'|format('%s'|format(y)) %}"),
            ("{%- if a == 'b' %}{{ 7 % 2 }}{% endif %}", "{%- if a == 'b' %}{{ 7 % 2 }}{% endif %}"),
            (
                "don't '%s' % x {{ 'it\\'s %}' }} {% if x == 'y' -%}",
                "don't '%s' % x {{ 'it\\'s %}' }} {% if x == 'y' -%}",
            ),
        ] {
            assert_eq!(with_format_calls(source), compiled);
        }
    }
}
