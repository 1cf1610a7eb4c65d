//! Pages in a real headless Chromium: open, wait, click, type, read, look at in both themes and several widths, and ask axe what
//! keeps people out. Knows no page.
//!
//! Chromium is Debian's, and is spoken to by its own protocol: no driver process stands between. A click lands where a person would
//! click, so a button that something covers cannot be clicked. Everything is waited for, nothing is slept for.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use chromiumoxide::{
    Page,
    cdp::{
        browser_protocol::{
            emulation::{MediaFeature, SetDeviceMetricsOverrideParams, SetEmulatedMediaParams},
            input::{DispatchKeyEventParams, DispatchKeyEventType, InsertTextParams},
            log::EventEntryAdded,
        },
        js_protocol::runtime::{EvaluateParams, EventExceptionThrown},
    },
    layout::Point,
};
use futures::StreamExt;
use serde_json::{Value, json};
use stoker_cluster::Keeper;
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::{
    axe,
    cluster::Waited,
    picture,
    process::{PATIENCE, choose_crypto},
    skip::skip,
};

const CHROMIUM: &str = "/usr/bin/chromium";
const WINDOW_HEIGHT: u32 = 900;
const POLL: Duration = Duration::from_millis(25);

/// What the reader's system prefers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Theme {
    /// Dark letters.
    Light,
    /// Light letters.
    Dark,
}

impl Theme {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Light, Self::Dark];

    /// As CSS says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Light => "light",
            Self::Dark => "dark",
        }
    }
}

/// A key that writes nothing, or not only that.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Key {
    /// Return.
    Enter,
    /// With the shift key held.
    ShiftEnter,
    /// Leave.
    Escape,
    /// To the next field.
    Tab,
}

/// A browser with one page open.
pub struct Browser {
    page: Page,
    patience: Duration,
    complaints: Arc<Mutex<Vec<String>>>,
    tasks: Vec<JoinHandle<()>>,
    chromium: Child,
    // In this order: the processes end before their folder does.
    _keeper: Keeper,
    _home: TempDir,
}

impl Browser {
    /// Starts one; `None`, said and counted, where there is none.
    pub async fn start(test: &str) -> Result<Option<Self>> {
        if !Path::new(CHROMIUM).is_file() {
            skip(test, &format!("no {CHROMIUM}: apt-get install chromium"));
            return Ok(None);
        }
        choose_crypto();
        let (keeper, home) = (Keeper::start().context("start the keeper")?, TempDir::new()?);
        keeper.remove_at_end(home.path());
        let mut chromium = keeper
            .command(Path::new(CHROMIUM))?
            .args(arguments(home.path()))
            // It writes beside its profile, too.
            .env("HOME", home.path())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let address = tokio::task::block_in_place(|| listening(&mut chromium))?;
        let (connection, mut events) = chromiumoxide::Browser::connect(address).await.context("speak to Chromium")?;
        // An event of a younger Chromium than the protocol's crate is an error of one item and ends nothing.
        let mut tasks = vec![tokio::spawn(async move { while events.next().await.is_some() {} })];
        let page = connection.new_page("about:blank").await?;
        let complaints = Arc::default();
        tasks.extend(listen(&page, &complaints).await?);
        let browser = Self { page, patience: PATIENCE, complaints, tasks, chromium, _keeper: keeper, _home: home };
        browser.look(Theme::Light, 1280).await?;
        Ok(Some(browser))
    }

    /// Waits for so long from now on, for what takes its time by itself.
    pub fn patient(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Opens an address and waits until all of it is there.
    pub async fn open(&self, url: &str) -> Result<()> {
        self.page.goto(url).await.with_context(|| format!("open {url}"))?;
        Ok(())
    }

    /// Loads the page again.
    pub async fn reload(&self) -> Result<()> {
        self.page.reload().await?;
        Ok(())
    }

    /// The page's theme and its width in CSS pixels, from now on. Nothing moves that need not.
    pub async fn look(&self, theme: Theme, width: u32) -> Result<()> {
        let features = [("prefers-color-scheme", theme.name()), ("prefers-reduced-motion", "reduce")];
        let features = features.map(|(name, value)| MediaFeature::new(name, value));
        self.page.execute(SetEmulatedMediaParams::builder().features(features).build()).await?;
        self.resize(width, WINDOW_HEIGHT).await?;
        // A script hears of another width before the next frame: what it folds or opens then counts.
        self.value("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(() => drawn(1))))").await?;
        Ok(())
    }

    /// Waits until an element of a CSS selector is seen.
    pub async fn wait_for(&self, selector: &str) -> Result<()> {
        self.wait_until(&format!("{selector} seen"), &format!("!!{}", seen(selector))).await
    }

    /// Waits until a person reads these words in that part of the page.
    pub async fn shows(&self, part: &str, words: &str) -> Result<()> {
        self.wait_until(words, &format!("document.querySelector({}).innerText.includes({})", json!(part), json!(words)))
            .await
    }

    /// Waits until a JavaScript expression of the page is true.
    pub async fn wait_until(&self, what: &str, expression: &str) -> Result<()> {
        let begun = Instant::now();
        loop {
            let looked = Instant::now();
            // In the middle of loading there is no page to ask.
            let asked = self.value(expression).await;
            if matches!(asked, Ok(Value::Bool(true))) {
                return Ok(());
            }
            if begun.elapsed() > self.patience {
                let shown = self.value("document.body.innerText").await;
                bail!(
                    "not {what} within {:?}: {expression} is {asked:?}\n{shown:?}\n{:?}",
                    self.patience,
                    self.complaints()
                );
            }
            let waited = Waited { look: looked.elapsed(), in_all: begun.elapsed() };
            tokio::time::sleep(waited.pause(POLL)).await;
        }
    }

    /// What a JavaScript expression is in the page; of a promise, what it becomes.
    pub async fn value(&self, expression: &str) -> Result<Value> {
        let asked = EvaluateParams::builder().expression(expression).await_promise(true).return_by_value(true);
        let answer = self.page.execute(asked.build().map_err(anyhow::Error::msg)?).await?.result;
        match answer.exception_details {
            Some(thrown) => bail!("{expression}: {} {:?}", thrown.text, thrown.exception.and_then(|it| it.description)),
            None => Ok(answer.result.value.unwrap_or_default()),
        }
    }

    /// Clicks in the middle of it, as soon as it can be clicked there.
    pub async fn click(&self, selector: &str) -> Result<()> {
        self.page.click(self.spot(selector).await?).await.with_context(|| format!("click {selector}"))?;
        Ok(())
    }

    /// Moves the mouse over it.
    pub async fn hover(&self, selector: &str) -> Result<()> {
        self.page.move_mouse(self.spot(selector).await?).await.with_context(|| format!("hover over {selector}"))?;
        Ok(())
    }

    /// Types into it behind what is there.
    pub async fn type_into(&self, selector: &str, text: &str) -> Result<()> {
        self.focus(selector).await?;
        self.page.execute(InsertTextParams::new(text)).await.with_context(|| format!("type into {selector}"))?;
        Ok(())
    }

    /// Types in place of what is there.
    pub async fn fill(&self, selector: &str, text: &str) -> Result<()> {
        self.focus(selector).await?;
        self.value("document.activeElement.select()").await?;
        self.page.execute(InsertTextParams::new(text)).await.with_context(|| format!("fill {selector}"))?;
        Ok(())
    }

    /// Chooses an option of a list by its value.
    pub async fn choose(&self, selector: &str, value: &str) -> Result<()> {
        self.focus(selector).await?;
        let chosen = format!(
            "(list => {{ list.value = {}; list.dispatchEvent(new Event('input', {{bubbles: true}}));
              list.dispatchEvent(new Event('change', {{bubbles: true}})); return list.value }})({})",
            json!(value),
            seen(selector)
        );
        anyhow::ensure!(self.value(&chosen).await? == json!(value), "{selector} has no {value}");
        Ok(())
    }

    /// Presses a key, where the keyboard is.
    pub async fn press(&self, key: Key) -> Result<()> {
        let (name, code, text, modifiers) = match key {
            Key::Enter => ("Enter", 13, Some("\r"), 0),
            Key::ShiftEnter => ("Enter", 13, Some("\r"), 8),
            Key::Escape => ("Escape", 27, None, 0),
            Key::Tab => ("Tab", 9, None, 0),
        };
        for kind in [DispatchKeyEventType::KeyDown, DispatchKeyEventType::KeyUp] {
            let event = DispatchKeyEventParams::builder().key(name).code(name).windows_virtual_key_code(code);
            let event = event.modifiers(modifiers).r#type(kind.clone());
            let event = match (text, kind) {
                (Some(text), DispatchKeyEventType::KeyDown) => event.text(text),
                _ => event,
            };
            self.page.execute(event.build().map_err(anyhow::Error::msg)?).await?;
        }
        Ok(())
    }

    /// Puts the keyboard into it.
    pub async fn focus(&self, selector: &str) -> Result<()> {
        self.wait_for(selector).await?;
        self.value(&format!("{}.focus()", seen(selector))).await.map(drop)
    }

    /// The text a person reads in it.
    pub async fn text(&self, selector: &str) -> Result<String> {
        self.wait_for(selector).await?;
        let text = self.value(&format!("{}.innerText", seen(selector))).await?;
        Ok(text.as_str().unwrap_or_default().to_owned())
    }

    /// What the page complained about since this was asked last: errors of its script, refused by its own policy, not found.
    pub fn complaints(&self) -> Vec<String> {
        std::mem::take(&mut *self.complaints.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The whole page, not only what a window shows of it, as a PNG of at most 256 colours.
    pub async fn screenshot(&self, theme: Theme, width: u32) -> Result<Vec<u8>> {
        self.look(theme, width).await?;
        let height = self.value("Math.ceil(document.documentElement.getBoundingClientRect().height)").await?;
        let height = u32::try_from(height.as_u64().context("a height")?)?.max(WINDOW_HEIGHT);
        self.resize(width, height).await?;
        let png = self.page.screenshot(chromiumoxide::page::ScreenshotParams::builder().build()).await?;
        self.resize(width, WINDOW_HEIGHT).await?;
        tokio::task::spawn_blocking(move || picture::with_palette(&png)).await?
    }

    /// What axe finds that keeps people out, seriously or worse, as the page looks now. Nothing, said and counted, where it cannot
    /// be had.
    pub async fn axe(&self, test: &str) -> Result<Vec<String>> {
        let script = match axe::script().await {
            Ok(script) => script,
            Err(reason) => {
                skip(test, &format!("without axe: {reason:#}"));
                return Ok(Vec::new());
            }
        };
        // In a function: a page's own `module` or `define` is nothing to it.
        self.value(&format!("void (() => {{ {script} }})()")).await.context("load axe")?;
        let run = "axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations))";
        let found = self.value(run).await.context("run axe")?;
        Ok(axe::serious(&serde_json::from_str(found.as_str().context("findings")?)?))
    }

    /// By how many pixels the page is wider than the window.
    pub async fn overflow(&self) -> Result<i64> {
        let wider = self.value("document.documentElement.scrollWidth - document.documentElement.clientWidth").await?;
        wider.as_i64().context("a width")
    }

    async fn resize(&self, width: u32, height: u32) -> Result<()> {
        let size = SetDeviceMetricsOverrideParams::new(i64::from(width), i64::from(height), 1.0, false);
        self.page.execute(size).await?;
        Ok(())
    }

    /// Where a person would click on it, once nothing covers it and it is not switched off.
    async fn spot(&self, selector: &str) -> Result<Point> {
        let find = format!(
            "(element => {{
                if (!element || element.disabled) return null;
                element.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}});
                const box = element.getClientRects()[0], x = box.x + box.width / 2, y = box.y + box.height / 2;
                const top = document.elementFromPoint(x, y);
                return top && (element.contains(top) || top.contains(element) && top.matches('label')) ? [x, y] : null;
            }})({})",
            seen(selector)
        );
        self.wait_until(&format!("{selector} free to click"), &format!("{find} !== null")).await?;
        let [x, y]: [f64; 2] = serde_json::from_value(self.value(&find).await?)
            .with_context(|| format!("{selector} went away while it was looked at"))?;
        Ok(Point::new(x, y))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        // Its keeper ends the rest of its process group.
        let _ = self.chromium.kill();
        let _ = self.chromium.wait();
    }
}

/// The first element of a CSS selector that is seen, as JavaScript.
fn seen(selector: &str) -> String {
    let is_seen = "element.checkVisibility({visibilityProperty: true})";
    format!("[...document.querySelectorAll({})].find(element => {is_seen})", json!(selector))
}

fn arguments(home: &Path) -> Vec<String> {
    let profile = format!("--user-data-dir={}", home.join("profile").display());
    // Tests run as root in containers, where Chromium has no sandbox and /dev/shm is small. It opens only what tests serve.
    let apart = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"];
    let quiet = ["--disable-breakpad", "--disable-background-networking", "--no-first-run", "--lang=en-GB"];
    let spoken = ["--remote-debugging-port=0", "about:blank"];
    apart.into_iter().chain(quiet).chain([profile.as_str()]).chain(spoken).map(str::to_owned).collect()
}

/// The address at which it says that it is spoken to. What it says later is read and dropped, so that it never waits for a reader.
fn listening(chromium: &mut Child) -> Result<String> {
    let mut lines = BufReader::new(chromium.stderr.take().context("stderr is a pipe")?).lines().map_while(Result::ok);
    let mut said = Vec::new();
    let address = lines.by_ref().find_map(|line| match line.strip_prefix("DevTools listening on ") {
        Some(address) => Some(address.trim().to_owned()),
        None => {
            said.push(line);
            None
        }
    });
    std::thread::spawn(move || lines.for_each(drop));
    address.with_context(|| format!("Chromium ended before it listened:\n{}", said.join("\n")))
}

/// Notes what the page complains about for as long as it is open.
async fn listen(page: &Page, complaints: &Arc<Mutex<Vec<String>>>) -> Result<[JoinHandle<()>; 2]> {
    let mut thrown = page.event_listener::<EventExceptionThrown>().await?;
    let mut logged = page.event_listener::<EventEntryAdded>().await?;
    page.enable_log().await?;
    page.enable_runtime().await?;
    let note = |complaints: &Arc<Mutex<Vec<String>>>| {
        let complaints = Arc::clone(complaints);
        move |line: String| complaints.lock().unwrap_or_else(PoisonError::into_inner).push(line)
    };
    let (of_script, of_browser) = (note(complaints), note(complaints));
    let script = tokio::spawn(async move {
        while let Some(event) = thrown.next().await {
            let details = &event.exception_details;
            let what = details.exception.as_ref().and_then(|thrown| thrown.description.clone());
            of_script(what.unwrap_or_else(|| details.text.clone()));
        }
    });
    let browser = tokio::spawn(async move {
        while let Some(event) = logged.next().await {
            of_browser(format!("{:?}: {}", event.entry.level, event.entry.text));
        }
    });
    Ok([script, browser])
}
