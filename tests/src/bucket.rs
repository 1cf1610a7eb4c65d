//! A bucket on loopback: moto's S3 server with the official client beside it (`clients/bucket.py`), and [`Middle`] before it.
//!
//! moto checks signatures with botocore's own code once it is told to.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::{middle::Middle, talk::Talk};

/// What it needs.
const REQUIREMENTS: &str = include_str!("../clients/bucket-requirements.txt");
/// See the module. It stops when it is dropped.
pub struct Bucket {
    talk: Talk,
    scratch: tempfile::TempDir,
    middle: Middle,
}

/// How a file is put.
#[derive(Clone, Copy, Debug, Default)]
pub struct Put {
    /// The checksum that its server keeps, as its API names it; the client's own choice if none is named.
    pub checksum: Option<&'static str>,
    /// In parts of this many bytes.
    pub part_bytes: Option<u64>,
    /// Everybody may read it.
    pub public: bool,
}

impl Bucket {
    /// An empty one that is called `models`. An error is a reason to skip.
    pub fn start() -> Result<Self> {
        let (talk, said) = Talk::start("bucket.py", REQUIREMENTS)?;
        let address = said["address"].as_str().context("the bucket says where it is")?.parse()?;
        Ok(Self { talk, scratch: tempfile::tempdir()?, middle: Middle::start(address)? })
    }

    /// What sits before it.
    pub fn middle(&self) -> &Middle {
        &self.middle
    }

    /// Its URL, through what sits before it.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.middle.address())
    }

    /// Puts a file with the official client.
    pub fn put(&self, key: &str, content: &[u8], how: Put) -> Result<()> {
        let path = self.scratch.path().join("put");
        fs::write(&path, content)?;
        let mut order = json!({"do": "put", "key": key, "path": path, "public": how.public});
        how.checksum.into_iter().for_each(|checksum| order["checksum"] = json!(checksum));
        how.part_bytes.into_iter().for_each(|bytes| order["part_bytes"] = json!(bytes));
        self.talk.order(&order).map(drop)
    }

    /// Reads a file with the official client.
    pub fn get(&self, key: &str, path: &Path) -> Result<()> {
        self.talk.order(&json!({"do": "get", "key": key, "path": path})).map(drop)
    }

    /// Takes a file away.
    pub fn delete(&self, key: &str) -> Result<()> {
        self.talk.order(&json!({"do": "delete", "key": key})).map(drop)
    }

    /// Variables of somebody who may read.
    pub fn reader(&self) -> Result<BTreeMap<String, String>> {
        variables(&self.talk.order(&json!({"do": "reader"}))?)
    }

    /// Variables of a role that may read, for an hour.
    pub fn role(&self) -> Result<BTreeMap<String, String>> {
        variables(&self.talk.order(&json!({"do": "role"}))?)
    }

    /// Variables of somebody who may do this much.
    pub fn user(&self, name: &str, actions: &[&str]) -> Result<BTreeMap<String, String>> {
        variables(&self.talk.order(&json!({"do": "user", "name": name, "actions": actions}))?)
    }

    /// From now on every request must be signed by who may.
    pub fn enforce(&self) -> Result<()> {
        self.talk.order(&json!({"do": "enforce"})).map(drop)
    }
}

fn variables(keys: &Value) -> Result<BTreeMap<String, String>> {
    let keys = keys.as_object().context("keys by name")?;
    Ok(keys.iter().map(|(name, value)| (name.to_uppercase(), value.as_str().unwrap_or_default().to_owned())).collect())
}
