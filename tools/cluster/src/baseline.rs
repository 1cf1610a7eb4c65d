//! What etcd holds of a control plane that nobody has used yet, and the way back there: its servers then serve somebody else, who would
//! otherwise wait for new ones to start. Works below the API server, which sees objects come and go by its watches as it sees those that another
//! API server writes, so that no finalizer, no policy and no right stands in the way.
//!
//! Who has used it must be gone before: what is written afterwards stays.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use http::Request;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{control_plane::client_of, error::ClusterError};

/// Of all objects.
const OBJECTS: &str = "/registry/";
/// Controllers write them at any time, and nobody reads them afterwards.
const EVENTS: &str = "/registry/events/";
/// What the servers themselves renew.
const RENEWED: [&str; 2] = ["/registry/masterleases/", "/registry/leases/kube-system/"];
/// Controllers have said all that they have to say, at their start or of what came and went, when nothing was written for so long.
const QUIET: Duration = Duration::from_millis(500);
/// Between looks at whether controllers wrote something back.
const LOOK: Duration = Duration::from_millis(50);
/// Operations in one transaction; etcd takes 128.
const AT_ONCE: usize = 100;

/// What etcd held at one moment. Keys and values are etcd's, in base64.
#[derive(Debug)]
pub struct Baseline {
    etcd: SocketAddr,
    held: BTreeMap<String, Held>,
}

#[derive(Debug)]
struct Held {
    /// The revision in which it was written last.
    written: String,
    value: String,
}

impl Baseline {
    /// As it is as soon as nothing is written for a while.
    pub(crate) async fn of(etcd: SocketAddr, patience: Duration) -> Result<Self, ClusterError> {
        let client = client(etcd)?;
        let deadline = Instant::now() + patience;
        let mut keys = keys(&client).await?;
        loop {
            sleep(QUIET).await;
            let now = self::keys(&client).await?;
            if now == keys {
                break;
            }
            if Instant::now() >= deadline {
                return Err(never("comes to rest"));
            }
            keys = now;
        }
        let objects = range(&client, OBJECTS, false).await?;
        let held = objects.iter().map(|object| (text(object, "key"), held(object)));
        Ok(Self { etcd, held: held.filter(|(key, _)| is_kept(key)).collect() })
    }

    /// Removes what came since, and puts back what was changed or removed, until it stays so: a controller that is late may fill a namespace
    /// that is gone, and nobody else would ever remove that.
    pub(crate) async fn restore(&mut self, patience: Duration) -> Result<(), ClusterError> {
        let client = client(self.etcd)?;
        let deadline = Instant::now() + patience;
        let (mut looked_at, mut same_since) = (String::new(), Instant::now());
        loop {
            // Where nothing was written nothing is to be seen, and to list everything costs more than to ask for that.
            if revision(&client).await? == looked_at {
                if same_since.elapsed() >= QUIET {
                    return Ok(());
                }
            } else if self.put_back(&client, &mut looked_at).await? {
                same_since = Instant::now();
            }
            if Instant::now() >= deadline {
                return Err(never("stays as it was put back"));
            }
            sleep(LOOK).await;
        }
    }

    /// Makes it what it was, as of the revision that it says it looked at; whether anything differed.
    async fn put_back(&mut self, client: &Client, looked_at: &mut String) -> Result<bool, ClusterError> {
        delete_all(client, EVENTS).await?;
        *looked_at = revision(client).await?;
        let operations = self.differences(&keys(client).await?);
        for operations in operations.chunks(AT_ONCE) {
            let answer = post(client, "/v3/kv/txn", &json!({"success": operations})).await?;
            self.note(operations, &text(&answer["header"], "revision"));
        }
        Ok(!operations.is_empty())
    }

    /// What makes `now` what it was. Namespaces go first, so that nobody fills them again.
    fn differences(&self, now: &BTreeMap<String, String>) -> Vec<Value> {
        let mut new: Vec<&String> = now.keys().filter(|key| !self.held.contains_key(*key)).collect();
        new.sort_by_key(|key| !plain(key).starts_with("/registry/namespaces/"));
        let deletes = new.into_iter().map(|key| json!({"requestDeleteRange": {"key": key}}));
        let changed = self.held.iter().filter(|(key, held)| now.get(*key) != Some(&held.written));
        let puts = changed.map(|(key, held)| json!({"requestPut": {"key": key, "value": held.value}}));
        deletes.chain(puts).collect()
    }

    fn note(&mut self, operations: &[Value], revision: &str) {
        for operation in operations {
            if let Some(held) = self.held.get_mut(&text(&operation["requestPut"], "key")) {
                revision.clone_into(&mut held.written);
            }
        }
    }
}

fn held(object: &Value) -> Held {
    Held { written: text(object, "mod_revision"), value: text(object, "value") }
}

/// Whether an object is somebody's who uses the cluster.
fn is_kept(key: &str) -> bool {
    let plain = plain(key);
    !plain.starts_with(EVENTS) && !RENEWED.iter().any(|renewed| plain.starts_with(renewed))
}

/// Keys of what is kept, with the revision that each was written in.
async fn keys(client: &Client) -> Result<BTreeMap<String, String>, ClusterError> {
    let objects = range(client, OBJECTS, true).await?;
    let keys = objects.iter().map(|object| (text(object, "key"), text(object, "mod_revision")));
    Ok(keys.filter(|(key, _)| is_kept(key)).collect())
}

/// How often anything was written so far.
async fn revision(client: &Client) -> Result<String, ClusterError> {
    let nothing = json!({"key": BASE64_STANDARD.encode("/nothing")});
    Ok(text(&post(client, "/v3/kv/range", &nothing).await?["header"], "revision"))
}

async fn range(client: &Client, prefix: &str, keys_only: bool) -> Result<Vec<Value>, ClusterError> {
    let mut wanted = all(prefix);
    wanted["keys_only"] = json!(keys_only);
    let mut answer = post(client, "/v3/kv/range", &wanted).await?;
    Ok(answer["kvs"].as_array_mut().map(std::mem::take).unwrap_or_default())
}

async fn delete_all(client: &Client, prefix: &str) -> Result<(), ClusterError> {
    post(client, "/v3/kv/deleterange", &all(prefix)).await.map(drop)
}

/// From the prefix to the first key behind all that have it: with its last byte, a slash, one higher.
fn all(prefix: &str) -> Value {
    let behind = prefix.strip_suffix('/').map(|prefix| format!("{prefix}0")).expect("a prefix ends with a slash");
    json!({"key": BASE64_STANDARD.encode(prefix), "range_end": BASE64_STANDARD.encode(behind)})
}

fn plain(key: &str) -> String {
    let bytes = BASE64_STANDARD.decode(key).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn text(object: &Value, field: &str) -> String {
    object[field].as_str().unwrap_or_default().to_owned()
}

fn client(etcd: SocketAddr) -> Result<Client, ClusterError> {
    client_of(Config::new(format!("http://{etcd}").parse().expect("an address makes a URL")))
}

/// etcd's JSON API, by kube's HTTP client.
async fn post(client: &Client, path: &str, body: &Value) -> Result<Value, ClusterError> {
    let request = Request::post(path).header("Content-Type", "application/json").body(body.to_string().into_bytes());
    let answer = client.request(request.expect("a constant path is valid")).await;
    answer.map_err(ClusterError::api(format!("ask etcd for {path}")))
}

fn never(what: &str) -> ClusterError {
    ClusterError::NotReady {
        name: "etcd".to_owned(),
        what: format!("holds nothing that {what}"),
        log_tail: String::new(),
    }
}
