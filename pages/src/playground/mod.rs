//! The playground: a form for the API beside which it is served, a conversation, and what a browser needs to make one of the other.
//! Its script talks to `v1/…` of the same server and to nobody else. Knows no model: names are asked for by the page.

use maud::{Markup, html};

use crate::{
    assets::{Asset, ICON, STYLE},
    layout::{Page, Step},
};

/// Where its assets are: no endpoint of the API begins like this.
pub const ASSETS_PATH: &str = "/_";

/// What this page has beyond [`STYLE`].
pub static PLAYGROUND_STYLE: Asset =
    Asset::new("playground", "css", "text/css; charset=utf-8", include_str!("playground.css"));
/// What makes requests of the form.
pub static SCRIPT: Asset =
    Asset::new("playground", "js", "text/javascript; charset=utf-8", include_str!("playground.js"));
/// All that is served under [`ASSETS_PATH`].
pub static ASSETS: [&Asset; 4] = [&STYLE, &ICON, &PLAYGROUND_STYLE, &SCRIPT];

/// Colours of tokens, each with the highest probability that has it: as `token` of the script has them.
const LIKELY: [(&str, u32); 4] = [("p1", 95), ("p2", 70), ("p3", 40), ("p4", 15)];
const SIDES: [(&str, &str); 2] = [("a", "A"), ("b", "B")];

/// One option of the API, by its name there.
struct Number {
    name: &'static str,
    words: &'static str,
    min: &'static str,
    max: &'static str,
    step: &'static str,
    hint: &'static str,
}

const NUMBERS: [Number; 9] = [
    number("temperature", "Temperature", ["0", "2", "any"], "0 always takes the likeliest token"),
    number("top_p", "Top p", ["0", "1", "any"], "Only the likeliest tokens that together have this probability"),
    number("top_k", "Top k", ["-1", "", "1"], "Only this many of the likeliest tokens"),
    number("min_p", "Min p", ["0", "1", "any"], "Only tokens at least this likely, relative to the likeliest"),
    number("presence_penalty", "Presence penalty", ["-2", "2", "any"], "Taken off tokens that have come"),
    number("frequency_penalty", "Frequency penalty", ["-2", "2", "any"], "Taken off tokens each time they have come"),
    number("repetition_penalty", "Repetition penalty", ["0", "2", "any"], "Divides what has come, the prompt included"),
    number("max_tokens", "Max tokens", ["1", "", "1"], "The longest answer"),
    number("seed", "Seed", ["", "", "1"], "The same seed and request give the same answer"),
];

const fn number(
    name: &'static str,
    words: &'static str,
    [min, max, step]: [&'static str; 3],
    hint: &'static str,
) -> Number {
    Number { name, words, min, max, step, hint }
}

/// The page. `root` leads from its address to where the API's paths begin: see [`root_of`].
pub fn page(root: &str) -> String {
    let trail = [Step { name: "Playground".into(), href: None }];
    let main = html! {
        div #playground data-root=(root) {
            noscript { p.note.wait { "This page needs JavaScript. The API beside it does not: see GET v1/models." } }
            (settings())
            (conversation())
            (code())
            div #tip role="tooltip" hidden {}
        }
    };
    let page = Page {
        title: "Playground",
        trail: &trail,
        aside: html! { span { "OpenAI’s API: " code #base { (root) "v1" } } },
        main,
        styles: &[&PLAYGROUND_STYLE],
        scripts: &[&SCRIPT],
    };
    page.render_below(&format!("{root}{}", ASSETS_PATH.trim_start_matches('/')))
}

/// The way from the page at `path` to where its server's paths begin, relative, so that it also holds behind a proxy that shows the
/// server below a path of its own: `""` from `/` and `/llm/`, `llm/` from `/llm`.
pub fn root_of(path: &str) -> String {
    match path.rsplit('/').next() {
        None | Some("") => String::new(),
        Some(last) => format!("{last}/"),
    }
}

fn conversation() -> Markup {
    html! {
        section.talk aria-label="Conversation" {
            div #welcome {
                h1 { "Talk to " span #welcome-model { "a model" } }
                p.quiet { "What you write goes to the server that this page came from, and nowhere else." }
                ul.tries {
                    @for words in ["Who are you?", "Tell me a story about the sea.", "What is the capital of France?"] {
                        li { button.plain type="button" data-try { (words) } }
                    }
                }
            }
            ol #turns.turns {}
            p #status.hidden role="status" {}
            form #composer.composer {
                label #draft-label.hidden for="draft" { "Message" }
                textarea #draft rows="1" placeholder="Write a message" autocomplete="off" {}
                div.row {
                    button #send.first type="submit" { "Send" }
                    button #stop type="button" hidden { "Stop" }
                    button #show-code.plain type="button" { "Code" }
                    button #clear.plain type="button" { "Clear" }
                    span.keys.quiet { kbd { "Enter" } " sends, " kbd { "Shift Enter" } " new line, " kbd { "Esc" } " stops" }
                }
            }
        }
    }
}

fn settings() -> Markup {
    html! {
        details #settings.panel open {
            summary { "Settings" }
            div #server-says {}
            (switches())
            (options())
            (tools())
            (structure())
            details #key-part {
                summary { "API key" }
                div.field {
                    label for="key" { "Sent with every request, kept in this page's memory only" }
                    // Not a password to a browser, which would offer to keep it.
                    input #key.mono.secret type="text" autocomplete="off" spellcheck="false";
                }
            }
            span #models-known hidden {}
        }
    }
}

fn switches() -> Markup {
    html! {
        fieldset.segments {
            legend.hidden { "What is asked for" }
            label { input type="radio" name="mode" value="chat" checked autocomplete="off"; span { "Chat" } }
            label { input type="radio" name="mode" value="completion" autocomplete="off"; span { "Completion" } }
        }
        label.switch { input #compare type="checkbox" autocomplete="off"; " Two answers side by side" }
        label.switch { input #probabilities type="checkbox" autocomplete="off"; " Probability of each token" }
        p.scale.says { "Likely at most" @for (bin, most) in LIKELY { " " span class=(bin) { (most) " %" } } }
    }
}

fn options() -> Markup {
    html! {
        div.options role="group" aria-label="Options" {
            div.option.heads aria-hidden="true" { span {} span { "A" } span.side-b { "B" } }
            div.option {
                span.words { "Model" }
                @for (side, name) in SIDES {
                    select data-option="model" data-side=(side) aria-label=(labelled("Model", name)) autocomplete="off" {}
                }
            }
            div.option.wide data-of="chat" {
                span.words { "System prompt" }
                @for (side, name) in SIDES {
                    textarea data-option="system" data-side=(side) rows="2" aria-label=(labelled("System prompt", name)) autocomplete="off" {}
                }
            }
            @for option in &NUMBERS { (number_row(option)) }
            p.says { "What is left empty is up to the model" span.side-b { ", in B up to A" } "." }
            div.option.wide {
                span.words title="The answer ends before any of these" { "Stop texts, one a line" }
                @for (side, name) in SIDES {
                    textarea.mono data-option="stop" data-side=(side) rows="1" aria-label=(labelled("Stop texts, one a line", name)) autocomplete="off" {}
                }
            }
        }
    }
}

fn labelled(words: &str, side: &str) -> String {
    format!("{words}, {side}")
}

fn number_row(option: &Number) -> Markup {
    let Number { name, words, min, max, step, hint } = option;
    let bound = |bound: &'static str| (!bound.is_empty()).then_some(bound);
    html! {
        div.option {
            span.words title=(hint) { (words) }
            @for (side, side_name) in SIDES {
                input type="number" data-option=(name) data-side=(side) min=[bound(min)] max=[bound(max)] step=(step)
                    aria-label=(labelled(words, side_name)) title=(hint) autocomplete="off";
            }
        }
    }
}

fn tools() -> Markup {
    html! {
        details data-of="chat" {
            summary { "Tools" }
            div.field {
                label for="tools" { "Functions, as the API takes them" }
                textarea #tools.mono rows="8" spellcheck="false" autocomplete="off" aria-describedby="tools-says"
                    placeholder="[{\"type\": \"function\", \"function\": {\"name\": …}}]" {}
                p #tools-says.says {}
            }
            div.field {
                label for="tool-choice" { "The model" }
                select #tool-choice autocomplete="off" {
                    option value="" { "may call one" }
                    option value="required" { "must call one" }
                    option value="none" { "may call none" }
                }
            }
        }
    }
}

fn structure() -> Markup {
    html! {
        details {
            summary { "Structured answer" }
            div.field {
                label for="structure" { "The answer is" }
                select #structure autocomplete="off" {
                    option value="" { "text" }
                    option value="json" { "any JSON object" }
                    option value="schema" { "JSON of a schema" }
                }
            }
            div #schema-part.field hidden {
                label for="schema" { "JSON schema" }
                textarea #schema.mono rows="8" spellcheck="false" autocomplete="off" aria-describedby="schema-says"
                    placeholder="{\"type\": \"object\", \"properties\": …}" {}
                p #schema-says.says {}
            }
        }
    }
}

fn code() -> Markup {
    html! {
        dialog #code-dialog aria-labelledby="code-title" {
            h2 #code-title { "The request as code" }
            fieldset.segments {
                legend.hidden { "Language" }
                label { input type="radio" name="language" value="curl" checked autocomplete="off"; span { "curl" } }
                label { input type="radio" name="language" value="python" autocomplete="off"; span { "Python" } }
                label { input type="radio" name="language" value="javascript" autocomplete="off"; span { "JavaScript" } }
            }
            pre #code tabindex="0" aria-label="Code" {}
            div.row {
                button #copy-code.first type="button" { "Copy" }
                button #close-code type="button" { "Close" }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_relative_to_the_page() {
        let ways = ["/", "/llm", "/llm/", "/a/b"].map(root_of);
        assert_eq!(ways, ["", "llm/", "", "b/"]);
        assert!(page("llm/").contains(r#"href="llm/_/style-"#), "assets are below it, too");
        assert!(page("\"><script>").contains("&quot;&gt;&lt;script&gt;"), "whatever a path says");
    }

    #[test]
    fn all_of_it_is_less_than_100_kb() {
        let assets: usize = ASSETS.iter().map(|asset| asset.text.len()).sum();
        assert!(assets + page("").len() < 100_000, "{assets}");
    }

    #[test]
    fn nothing_is_inline_and_nothing_is_elsewhere() {
        let page = page("");
        for what in ["<style", " style=", " onclick", "javascript:", "http:", "https:"] {
            assert!(!page.contains(what), "{what}");
        }
        assert_eq!(page.matches("<script").count(), 1, "the one that is loaded");
        let script = SCRIPT.text;
        for what in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "localStorage",
            "sessionStorage",
            "http:",
            "https:",
        ] {
            assert!(!script.contains(what), "{what}");
        }
    }

    #[test]
    fn every_element_that_the_script_names_is_there_once() {
        let page = page("");
        let named = SCRIPT.text.split("$(\"").skip(1).filter_map(|rest| rest.split('"').next());
        for id in named {
            assert_eq!(page.matches(&format!(" id=\"{id}\"")).count(), 1, "{id}");
        }
    }
}
