//! Messages to prompt text, by the model's own Jinja template with the dialect Hugging Face gives it. Pure: the time a
//! template may print is an argument. Knows neither tokens nor HTTP.

use std::collections::BTreeMap;

use jiff::Zoned;
use minijinja::{
    Environment, Error, ErrorKind, Value, context,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;

use crate::tool_calls;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    specials: SpecialTokens,
    writes_tool_calls: bool,
}

/// Texts of the tokens a template may print.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpecialTokens {
    /// Begin of text.
    pub bos: Option<String>,
    /// End of text.
    pub eos: Option<String>,
}

/// One message, as templates see it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Its text; empty for an assistant message that only calls tools.
    pub content: String,
    /// Name of the author, if sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Calls the assistant made.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call this `tool` message answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// One call of a tool. Templates want the arguments as an object, clients send them as JSON text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    /// Id of the call.
    pub id: String,
    /// Always `function`.
    pub r#type: &'static str,
    /// What was called.
    pub function: FunctionCall,
}

/// The function and its arguments.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// Its arguments, keys in the order the client sent.
    pub arguments: Value,
}

/// What a template renders.
#[derive(Clone, Debug)]
pub struct Conversation<'a> {
    /// The messages so far.
    pub messages: &'a [Message],
    /// Tool definitions, as sent.
    pub tools: &'a [Value],
    /// Whether the prompt ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Variables the client adds (`chat_template_kwargs`).
    pub variables: &'a BTreeMap<String, Value>,
    /// What `strftime_now` prints.
    pub now: Zoned,
}

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template itself is wrong.
    #[error("the model's chat template does not compile: {0}")]
    Compile(String),
    /// The template refused this conversation (`raise_exception`).
    #[error("{0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("the model's chat template failed on these messages: {0}")]
    Render(String),
}

const NAME: &str = "chat";
/// Marks errors of `raise_exception`, whose text is meant for the client.
const REFUSED: &str = "refused by the chat template: ";
/// Bounds a template that loops: about a second of work, far beyond any real one.
const FUEL: u64 = 20_000_000;

impl ChatTemplate {
    /// Compiles the source as Hugging Face does: block lines leave no trace, Python's string methods exist.
    pub fn compile(source: String, specials: SpecialTokens) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(compile)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment.add_test("iterable", is_iterable);
        let writes_tool_calls = tool_calls::understands(&source);
        environment.add_template_owned(NAME, without_generation_marks(&source)).map_err(compile)?;
        Ok(Self { environment, specials, writes_tool_calls })
    }

    /// Whether a model trained with this template calls tools in a format that `tool_calls` reads.
    pub fn writes_tool_calls(&self) -> bool {
        self.writes_tool_calls
    }

    /// The prompt of a conversation.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|error| TemplateError::Render(error.to_string()))?;
        let now = conversation.now.clone();
        let tools = (!conversation.tools.is_empty()).then(|| conversation.tools.to_vec());
        let own = context! {
            messages => Serde(conversation.messages),
            tools => Value::from(tools),
            documents => (),
            add_generation_prompt => conversation.add_generation_prompt,
            bos_token => self.specials.bos.as_deref().unwrap_or(""),
            eos_token => self.specials.eos.as_deref().unwrap_or(""),
            strftime_now => Value::from_function(move |format: &str| now.strftime(format).to_string()),
        };
        let variables = Value::from(conversation.variables.clone());
        template.render(context! { ..own, ..variables }).map_err(|error| refused_or_failed(&error))
    }
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

fn compile(error: Error) -> TemplateError {
    TemplateError::Compile(with_causes(&error))
}

/// As in Jinja2: a text and what is not defined are, `none` is not. Templates ask whether there are tools this way.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSED}{message}")))
}

fn refused_or_failed(error: &Error) -> TemplateError {
    match error.detail().and_then(|detail| detail.strip_prefix(REFUSED)) {
        Some(message) => TemplateError::Refused(message.to_owned()),
        None => TemplateError::Render(with_causes(error)),
    }
}

fn with_causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`: models were trained on Python's spacing, and no HTML escapes.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)),
    };
    written.map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    String::from_utf8(out).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// Python's separators: `", "` and `": "`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
    }

    fn render_with(source: &str, messages: &[Message], tools: &[Value]) -> Result<String, TemplateError> {
        let specials = SpecialTokens { bos: Some("<s>".into()), eos: Some("</s>".into()) };
        let now = "2026-11-21T10:03:00Z[UTC]".parse().unwrap();
        let variables = BTreeMap::from([("thinking".to_owned(), Value::from(false))]);
        let conversation = Conversation { messages, tools, add_generation_prompt: true, variables: &variables, now };
        ChatTemplate::compile(source.into(), specials)?.render(&conversation)
    }

    fn render(source: &str) -> String {
        render_with(source, &[message("system", "Be brief."), message("user", " Hi <b> ")], &[]).unwrap()
    }

    #[test]
    fn a_chatml_template_renders_with_block_lines_removed() {
        let source = "{%- for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + \
                      message.content.strip() + '<|im_end|>\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    \
                      {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n";
        assert_eq!(
            render(source),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn special_tokens_time_and_client_variables_are_visible() {
        assert_eq!(render("{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ eos_token }}"), "<s>21 Nov 2026</s>");
        assert_eq!(render("{% if thinking is defined and thinking is false %}no{% endif %}"), "no");
        assert_eq!(render("{% if tools %}tools{% else %}none{% endif %}"), "none");
        assert_eq!(
            render("{{ tools is iterable }} {{ messages is iterable }} {{ 'text' is iterable }}"),
            "False True True"
        );
    }

    #[test]
    fn tojson_writes_what_pythons_json_dumps_writes() {
        let tool: Value =
            serde_json::from_str(r#"{"zeta": [1, 2.5, true], "alpha": "<é> & 'x'", "none": null}"#).unwrap();
        let text = render_with("{{ tools[0] | tojson }}", &[], std::slice::from_ref(&tool)).unwrap();
        assert_eq!(text, r#"{"zeta": [1, 2.5, true], "alpha": "<é> & 'x'", "none": null}"#);
        let text = render_with("{{ {'a': [1]} | tojson(indent=4) }}", &[], &[]).unwrap();
        assert_eq!(text, "{\n    \"a\": [\n        1\n    ]\n}");
    }

    #[test]
    fn tool_calls_carry_their_arguments_as_an_object() {
        let arguments = serde_json::from_str(r#"{"city": "Oslo"}"#).unwrap();
        let call = ToolCall {
            id: "call_1".into(),
            r#type: "function",
            function: FunctionCall { name: "weather".into(), arguments },
        };
        let messages = [Message { tool_calls: vec![call], ..message("assistant", "") }];
        let source = "{% for call in messages[0].tool_calls %}{{ call.function | tojson }}{% endfor %}";
        let text = render_with(source, &messages, &[]).unwrap();
        assert_eq!(text, r#"{"name": "weather", "arguments": {"city": "Oslo"}}"#);
    }

    #[test]
    fn a_template_refuses_with_its_own_words() {
        let error = render_with("{{ raise_exception('roles must alternate') }}", &[], &[]).unwrap_err();
        assert_eq!(error.to_string(), "roles must alternate");
        let error = render_with("{{ 1 / 0 }}", &[], &[]).unwrap_err();
        assert!(matches!(error, TemplateError::Render(_)), "{error}");
        assert!(matches!(render_with("{% if %}", &[], &[]), Err(TemplateError::Compile(_))));
    }

    #[test]
    fn marks_for_training_mean_nothing() {
        let source = "a {%- generation -%} b {% if true %}c{% endif %} {%- endgeneration %} d {{ '{% generation' }}";
        assert_eq!(render(source), "ab c d {% generation");
    }

    #[test]
    fn an_endless_template_runs_out_of_fuel() {
        let source = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
        assert!(matches!(render_with(source, &[], &[]), Err(TemplateError::Render(_))));
    }
}
