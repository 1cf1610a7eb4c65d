//! JSON text that is put together from parts, some of which are JSON text already: for requests that are translated into
//! others, in which schemas and arguments keep the order of their members.

/// JSON text of an object that is made member by member, in their order.
#[derive(Default)]
pub(crate) struct Object(String);

impl Object {
    /// Adds a member; the value is JSON text.
    pub(crate) fn add(&mut self, name: &str, value: &str) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&text_json(name));
        self.0.push(':');
        self.0.push_str(value);
    }

    /// All of it.
    pub(crate) fn text(self) -> String {
        if self.0.is_empty() { "{}".to_owned() } else { self.0 + "}" }
    }
}

/// A text as JSON.
pub(crate) fn text_json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
