//! A real agent as it runs in a pod, and orders to it as the operator signs them, or as somebody else forges them.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use reqwest::Client;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use stoker_crds::intent::{INTENT_PATH, INTENT_PURPOSE, KEY_BYTES, Order, SIGNATURE_HEADER, Want, hex, signed_bytes};

use crate::agent::AgentProcess;

/// UID of its pod.
const POD_UID: &str = "uid-1";

/// A pod's agent: it knows the public keys in a file that the test may change.
pub struct AgentPod {
    /// The process.
    pub agent: AgentProcess,
    /// The file. At the start it has the key of seed 1.
    pub keys: PathBuf,
    http: Client,
    _dir: tempfile::TempDir,
}

impl AgentPod {
    /// Starts it with ember and waits until it serves.
    pub async fn ready() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let [config, keys] = ["agent.json", "operator.pub"].map(|name| dir.path().join(name));
        let json = json!({"revision": "r7", "model": {"source": "builtin://ember", "servedNames": ["ember"]}});
        fs::write(&config, json.to_string())?;
        fs::write(&keys, public_key(1))?;
        let config = config.to_str().context("a path in UTF-8")?;
        let args = ["--config", config, "--operator-keys", keys.to_str().context("a path in UTF-8")?];
        let agent = AgentProcess::ready(&[&args[..], &["--pod-uid", POD_UID]].concat()).await?;
        Ok(Self { agent, keys, http: Client::new(), _dir: dir })
    }

    /// An order for this pod and process, as the operator would make it now.
    pub async fn order(&self, number: u64, want: Want) -> Result<Order> {
        let load = self.agent.load().await?;
        let expires_up_ms = load.up_ms + 30_000;
        Ok(Order { pod_uid: POD_UID.into(), start_id: load.start_id, number, want, expires_up_ms })
    }

    /// Status and error code of an order.
    pub async fn give(&self, body: Vec<u8>, signature: Option<String>) -> Result<(u16, String)> {
        let mut request = self.http.put(self.agent.admin_url(INTENT_PATH)).body(body);
        if let Some(signature) = signature {
            request = request.header(SIGNATURE_HEADER, signature);
        }
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        let answer: Value = answer.json().await?;
        Ok((status, answer["error"]["code"].as_str().unwrap_or_default().to_owned()))
    }

    /// The same, signed with the key of a seed.
    pub async fn give_signed(&self, order: &Order, seed: u8) -> Result<(u16, String)> {
        let body = serde_json::to_vec(order)?;
        let signature = signature(&body, seed);
        self.give(body, Some(signature)).await
    }
}

/// The signature of an order's body with the key of a seed.
pub fn signature(body: &[u8], seed: u8) -> String {
    hex(key(seed).sign(&signed_bytes(INTENT_PURPOSE, body)).as_ref())
}

/// The public key of a seed, as it stands in the file of keys.
pub fn public_key(seed: u8) -> String {
    hex(key(seed).public_key().as_ref())
}

fn key(seed: u8) -> Ed25519KeyPair {
    Ed25519KeyPair::from_seed_unchecked(&[seed; KEY_BYTES]).expect("any bytes are a seed")
}
