//! The frame of every page: head, the way here, what is on it. Owns no content.

use maud::{DOCTYPE, Markup, html};

use crate::assets::{ASSETS_PATH, Asset, ICON, STYLE};

/// What a page puts into the frame.
#[derive(Debug)]
pub struct Page<'a> {
    /// What the browser's tab says, before the product's name.
    pub title: &'a str,
    /// Where this page stands, from the outside in.
    pub trail: &'a [Step],
    /// What stands at the right end of the header: a state, a switch. May be empty.
    pub aside: Markup,
    /// What the page is for.
    pub main: Markup,
    /// More style than [`STYLE`], for parts that only this page has.
    pub styles: &'a [&'a Asset],
    /// What it needs to be live; it must work as a still picture without.
    pub scripts: &'a [&'a Asset],
}

/// One step of the way to a page.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its words.
    pub name: String,
    /// Where it leads; none for the page itself.
    pub href: Option<String>,
}

impl Page<'_> {
    /// The whole document.
    pub fn render(&self) -> String {
        self.render_below(ASSETS_PATH)
    }

    /// The whole document, with its assets below another path.
    pub fn render_below(&self, assets: &str) -> String {
        let href = |asset: &Asset| format!("{assets}/{}", asset.name());
        let document = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { (self.title) " · Stoker" }
                    link rel="icon" type="image/svg+xml" href=(href(&ICON));
                    link rel="stylesheet" href=(href(&STYLE));
                    @for style in self.styles { link rel="stylesheet" href=(href(style)); }
                    @for script in self.scripts { script defer src=(href(script)) {} }
                }
                body {
                    a.skip href="#main" { "Skip to content" }
                    header.top {
                        (trail(self.trail))
                        div.aside { (self.aside) }
                    }
                    main #main tabindex="-1" { (self.main) }
                }
            }
        };
        document.into_string()
    }
}

/// A page that only says something.
pub fn message(title: &str, words: &str) -> String {
    let trail = [Step { name: "Stoker".to_owned(), href: Some("/".to_owned()) }];
    let main = html! { h1 { (title) } p { (words) } };
    Page { title, trail: &trail, aside: html! {}, main, styles: &[], scripts: &[] }.render()
}

fn trail(steps: &[Step]) -> Markup {
    html! {
        nav.trail aria-label="You are here" {
            ol {
                @for step in steps {
                    li {
                        @match &step.href {
                            Some(href) => a href=(href) { (step.name) },
                            None => span aria-current="page" { (step.name) },
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_escaped_wherever_they_stand() {
        let evil = "</title><script>alert(1)</script>\"'&";
        let page = Page {
            title: evil,
            trail: &[
                Step { name: evil.into(), href: Some(format!("/\"{evil}")) },
                Step { name: evil.into(), href: None },
            ],
            aside: html! {},
            main: html! { p { (evil) } },
            styles: &[],
            scripts: &[],
        };
        let text = page.render();
        assert!(!text.contains("<script>") && !text.contains("/\"<"), "{text}");
        assert_eq!(text.matches("&lt;script&gt;alert(1)").count(), 5, "{text}");
    }
}
