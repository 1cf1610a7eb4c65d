//! Parts of a page that change while it is open. The server renders a part anew, and the script puts it in the place of the
//! element of the same id. Without the script the page is a still picture of when it was asked for.

use crate::assets::{Asset, STYLE};
use maud::{Markup, html};

/// What listens, and replaces parts.
pub static SCRIPT: Asset = Asset::new("live", "js", "text/javascript; charset=utf-8", include_str!("static/live.js"));
/// The id of the element that says whether the page is live.
const SIGN: &str = "live";

/// One part, as it is now.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Fragment {
    /// Of the element that it replaces, and of its own outermost one.
    pub id: String,
    /// The element.
    pub html: String,
}

impl Fragment {
    /// The part with this id.
    pub fn new(id: impl Into<String>, markup: Markup) -> Self {
        Self { id: id.into(), html: markup.into_string() }
    }

    /// As it travels: the id, a line break, the element.
    pub fn message(&self) -> String {
        format!("{}\n{}", self.id, self.html)
    }
}

/// Says in the header whether what is seen is of now; `events` is where changes come from.
pub fn sign(events: &str) -> Markup {
    html! { span #(SIGN) role="status" data-events=(events) data-build=(build()) { "as of when it was asked for" } }
}

/// Changes with what pages are made of: a page of another build has to be asked for again.
pub fn build() -> String {
    format!("{}{}", STYLE.name(), SCRIPT.name())
}
