//! Web servers on loopback over one folder (`clients/web.py`): aiohttp's with [`Middle`] before it, the same over TLS, and Python's own,
//! which knows neither ranges nor ETags.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{middle::Middle, talk::Talk};

/// What it needs.
const REQUIREMENTS: &str = include_str!("../clients/web-requirements.txt");

/// See the module. It stops when it is dropped.
pub struct Web {
    talk: Talk,
    said: Value,
    middle: Middle,
}

/// What the server of another host was told of who asks, and which version of a file it was asked for.
pub type Heard = (Option<String>, Option<String>);

impl Web {
    /// One that serves an empty folder. An error is a reason to skip.
    pub fn start() -> Result<Self> {
        let (talk, said) = Talk::start("web.py", REQUIREMENTS)?;
        let address = said["address"].as_str().context("the server says where it is")?.parse()?;
        Ok(Self { talk, said, middle: Middle::start(address)? })
    }

    /// What sits before it.
    pub fn middle(&self) -> &Middle {
        &self.middle
    }

    /// Its URL, through what sits before it.
    pub fn url(&self) -> String {
        format!("http://{}", self.middle.address())
    }

    /// URL of the one that knows neither ranges nor ETags.
    pub fn plain_url(&self) -> String {
        format!("http://{}", self.text("plain"))
    }

    /// URL of the one that encrypts, and the certificate to trust.
    pub fn secure(&self) -> (String, PathBuf) {
        (format!("https://{}", self.text("secure")), self.text("ca").into())
    }

    fn text(&self, name: &str) -> &str {
        self.said[name].as_str().unwrap_or_default()
    }

    /// Puts a file.
    pub fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        let path = Path::new(self.text("folder")).join(path);
        fs::create_dir_all(path.parent().context("a file in a folder")?)?;
        Ok(fs::write(path, content)?)
    }

    /// Gives a file the place of another.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let folder = Path::new(self.text("folder"));
        Ok(fs::rename(folder.join(from), folder.join(to))?)
    }

    /// From now on only who sends this `Authorization` is let in.
    pub fn guard(&self, login: &str) -> Result<()> {
        self.talk.order(&json!({"do": "guard", "login": login})).map(drop)
    }

    /// What came to the other host since this was last called.
    pub fn take_heard_elsewhere(&self) -> Result<Vec<Heard>> {
        Ok(serde_json::from_value(self.talk.order(&json!({"do": "heard"}))?)?)
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        // What is left of it is only in the way of who looks at the disk.
        let _ = fs::remove_dir_all(self.text("folder"));
    }
}
