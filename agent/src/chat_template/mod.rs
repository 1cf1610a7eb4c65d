//! Messages to prompt text, by the model's own Jinja template with the dialect Hugging Face gives it. Pure: the time a
//! template may print is an argument. Knows neither tokens nor HTTP.

mod json;
mod python;
mod source;

use std::collections::BTreeMap;

use jiff::Zoned;
use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig, value::Serde};
use serde::Serialize;

use crate::answer::{CallFormat, ReasoningFormat};

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    specials: SpecialTokens,
    calls: Option<CallFormat>,
    reasoning: Option<ReasoningFormat>,
    /// What was compiled, for what it mentions.
    sources: Vec<String>,
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
    /// What the assistant thought before it answered.
    #[serde(flatten, serialize_with = "under_both_names")]
    pub reasoning_content: Option<String>,
}

/// Most templates read what was thought by the one name, gpt-oss's by the other.
fn under_both_names<S: serde::Serializer>(reasoning: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    let names = if reasoning.is_some() { &["reasoning_content", "thinking"][..] } else { &[] };
    serializer.collect_map(names.iter().map(|name| (name, reasoning)))
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
    /// Texts to answer from, for templates that read them.
    pub documents: &'a [Value],
    /// Where the prompt ends.
    pub end: PromptEnd,
    /// Variables the client adds (`chat_template_kwargs`).
    pub variables: &'a BTreeMap<String, Value>,
    /// What `strftime_now` prints.
    pub now: Zoned,
}

/// Where a prompt ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PromptEnd {
    /// Behind the opening of the assistant's turn.
    AssistantsTurn,
    /// Behind the last message, which is closed.
    LastMessage,
    /// Behind the last words of the last message, which is not closed: the model goes on with it.
    InsideLastMessage,
}

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template itself is wrong.
    #[error("the chat template does not compile: {0}")]
    Compile(String),
    /// The template refused this conversation (`raise_exception`).
    #[error("{0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("the chat template failed on these messages: {0}")]
    Render(String),
}

const NAME: &str = "chat";
/// The name that publishers give to the other.
const TOOL_USE: &str = "tool_use";
/// Stands behind words that are to be continued, with a space that is gone where a template trims.
const OPEN_END: &str = "OPEN_END_OF_FINAL_MESSAGE ";
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
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", json::to_json);
        python::add_to(&mut environment);
        let mut template = Self { environment, specials, calls: None, reasoning: None, sources: Vec::new() };
        template.add(NAME, &source)?;
        Ok(template)
    }

    /// Adds the template that the model's publisher wrote for conversations with tools.
    pub fn with_tool_use(mut self, source: &str) -> Result<Self, TemplateError> {
        self.add(TOOL_USE, source)?;
        Ok(self)
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<(), TemplateError> {
        self.calls = CallFormat::of_template(source).or(self.calls);
        self.reasoning = ReasoningFormat::of_template(source).or(self.reasoning);
        self.environment.add_template_owned(name, source::compiled_from(source)).map_err(compile)?;
        self.sources.push(source.to_owned());
        Ok(())
    }

    /// The format in which a model trained with this template calls tools, if it is one of those known.
    pub fn call_format(&self) -> Option<CallFormat> {
        self.calls
    }

    /// The format in which a model trained with this template thinks.
    pub fn reasoning_format(&self) -> Option<ReasoningFormat> {
        self.reasoning
    }

    /// Whether the template mentions a variable of this name. Templates assign variables that they also read, so no more
    /// than a word is looked for.
    pub fn reads(&self, variable: &str) -> bool {
        let is_name = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let is_whole = |source: &str, at: usize| {
            !is_name(source[..at].chars().next_back()) && !is_name(source[at + variable.len()..].chars().next())
        };
        let mentions = |source: &String| source.match_indices(variable).any(|(at, _)| is_whole(source, at));
        !variable.is_empty() && self.sources.iter().any(mentions)
    }

    /// The prompt of a conversation.
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<String, TemplateError> {
        match conversation.end {
            PromptEnd::AssistantsTurn | PromptEnd::LastMessage => self.render_whole(conversation),
            PromptEnd::InsideLastMessage => self.render_open(conversation),
        }
    }

    /// The prompt up to the end of the last message's words. A mark behind them, which is cut off again with all that the
    /// template put behind it, says where that is.
    fn render_open(&self, conversation: &Conversation<'_>) -> Result<String, TemplateError> {
        let mut messages = conversation.messages.to_vec();
        let Some(last) = messages.last_mut() else {
            return Err(TemplateError::Render("there is no message to continue".into()));
        };
        last.content.push_str(OPEN_END);
        let whole = self.render_whole(&Conversation { messages: &messages, ..conversation.clone() })?;
        let mark = OPEN_END.trim_end();
        let Some(end) = whole.rfind(mark) else {
            return Err(TemplateError::Render(
                "the final message is not part of the prompt, so nothing can continue it".into(),
            ));
        };
        let open = &whole[..end];
        // A template that trims messages took the space behind the mark: it would have taken the message's own.
        Ok(if whole[end..].starts_with(OPEN_END) { open } else { open.trim_end() }.to_owned())
    }

    fn render_whole(&self, conversation: &Conversation<'_>) -> Result<String, TemplateError> {
        let for_tools = || self.environment.get_template(TOOL_USE).ok().filter(|_| !conversation.tools.is_empty());
        let template = match for_tools() {
            Some(template) => template,
            None => self.environment.get_template(NAME).map_err(|error| TemplateError::Render(error.to_string()))?,
        };
        let now = conversation.now.clone();
        let tools = (!conversation.tools.is_empty()).then(|| conversation.tools.to_vec());
        let own = context! {
            messages => Serde(conversation.messages),
            tools => Value::from(tools),
            documents => Value::from((!conversation.documents.is_empty()).then(|| conversation.documents.to_vec())),
            add_generation_prompt => conversation.end == PromptEnd::AssistantsTurn,
            // A token that the model has not is not defined, which some templates ask.
            bos_token => self.specials.bos.as_deref().map_or(Value::UNDEFINED, Value::from),
            eos_token => self.specials.eos.as_deref().map_or(Value::UNDEFINED, Value::from),
            strftime_now => Value::from_function(move |format: &str| now.strftime(format).to_string()),
        };
        let variables = Value::from(conversation.variables.clone());
        template.render(context! { ..own, ..variables }).map_err(|error| refused_or_failed(&error))
    }
}

fn compile(error: Error) -> TemplateError {
    TemplateError::Compile(with_causes(&error))
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
        let (documents, end) = (&[][..], PromptEnd::AssistantsTurn);
        let conversation = Conversation { messages, tools, documents, end, variables: &variables, now };
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
