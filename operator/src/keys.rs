//! The keys that orders to agents are signed with: made at the first start, kept in one Secret of the operator's namespace.
//! Nobody else reads it, and no Secret is needed where agents run: they get the public halves in a ConfigMap.
//!
//! The Secret's entry `signing` signs; public halves of all entries are given out. So a key is changed without a gap: add
//! the new one beside, wait until agents have it, move it to `signing`, later leave the old one out.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client,
    api::PostParams,
    runtime::reflector::{ObjectRef, Store},
};
use ring::{
    rand::{SecureRandom, SystemRandom},
    signature::{Ed25519KeyPair, KeyPair},
};
use serde::Serialize;
use stoker_crds::{
    InferenceDeployment,
    intent::{INTENT_PURPOSE, KEY_BYTES, KEYS_MAX, Order, hex, signed_bytes},
};
use thiserror::Error;
use tokio::sync::mpsc;
use tracing::{info, warn};

/// The entry that signs.
const SIGNING: &str = "signing";

/// How often the Secret is read again.
const READ_EVERY: Duration = Duration::from_secs(30);

/// Why there are no keys.
#[derive(Debug, Error)]
pub enum KeysError {
    /// The Secret cannot be read or made.
    #[error("Secret {secret}: {source}")]
    Api {
        /// Its name.
        secret: String,
        /// The API server's answer.
        #[source]
        source: kube::Error,
    },
    /// The Secret says something else.
    #[error("Secret {secret}: {why}")]
    Content {
        /// Its name.
        secret: String,
        /// What is wrong with it, and what to change.
        why: String,
    },
    /// The machine gives no randomness.
    #[error("no randomness for a key")]
    NoRandomness,
}

/// An order with its signature.
#[derive(Clone, Debug, PartialEq)]
pub struct Signed {
    /// The body.
    pub body: Vec<u8>,
    /// The signature in hexadecimal digits.
    pub signature: String,
}

/// The keys, as last read. Cheap to clone.
#[derive(Clone)]
pub struct Keyring {
    keys: Arc<RwLock<Keys>>,
}

/// What a Secret says.
pub struct Keys {
    signing: Ed25519KeyPair,
    /// Text of the file that agents read.
    public: String,
}

/// Where the keys are kept.
#[derive(Clone, Debug)]
pub struct KeyStore {
    api: Api<Secret>,
    name: String,
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyring").field("public", &self.public()).finish_non_exhaustive()
    }
}

impl Keyring {
    /// A keyring of these keys.
    pub fn new(keys: Keys) -> Self {
        Self { keys: Arc::new(RwLock::new(keys)) }
    }

    /// Signs an order.
    pub fn sign(&self, order: &Order) -> Signed {
        self.sign_for(INTENT_PURPOSE, order)
    }

    /// Signs what is meant for this purpose and no other.
    pub fn sign_for(&self, purpose: &[u8], said: &impl Serialize) -> Signed {
        let body = serde_json::to_vec(said).expect("what is said is JSON");
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let signature = hex(keys.signing.sign(&signed_bytes(purpose, &body)).as_ref());
        Signed { body, signature }
    }

    /// The file with the public halves that agents read.
    pub fn public(&self) -> String {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).public.clone()
    }

    /// Takes over what was read anew; true when agents have to learn of it.
    pub fn replace(&self, keys: Keys) -> bool {
        let mut current = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        let moved = current.public != keys.public;
        *current = keys;
        moved
    }
}

impl Keys {
    /// Keys from the entries of a Secret: names and seeds.
    fn from_entries(entries: &[(String, Vec<u8>)]) -> Result<Self, String> {
        let signing = entries.iter().find(|(name, _)| name == SIGNING);
        let (_, seed) = signing.ok_or_else(|| {
            format!("there is no entry `{SIGNING}`: put a key there, or delete the Secret to get a new one")
        })?;
        if entries.len() > KEYS_MAX {
            return Err(format!("{} keys, agents look at {KEYS_MAX}: take old ones out", entries.len()));
        }
        let mut public = String::new();
        for (name, seed) in entries {
            let key = key_pair(seed).map_err(|why| format!("entry `{name}`: {why}"))?;
            public.push_str(&format!("{} # {name}\n", hex(key.public_key().as_ref())));
        }
        Ok(Self { signing: key_pair(seed)?, public })
    }
}

/// Reads the Secret again and again. When it changed, every deployment is looked at, so that its agents learn the keys; a
/// Secret that cannot be read leaves the keys as they are.
pub async fn renew(
    store: KeyStore,
    keyring: Keyring,
    deployments: Store<InferenceDeployment>,
    changed: mpsc::Sender<ObjectRef<InferenceDeployment>>,
) {
    while !changed.is_closed() {
        tokio::time::sleep(READ_EVERY).await;
        match store.read().await {
            Ok(keys) => {
                if keyring.replace(keys) {
                    info!("the keys that orders are signed with changed");
                    tell_all(&deployments, &changed).await;
                }
            }
            Err(error) => warn!(%error, "the keys stay as they were"),
        }
    }
}

async fn tell_all(deployments: &Store<InferenceDeployment>, changed: &mpsc::Sender<ObjectRef<InferenceDeployment>>) {
    for deployment in deployments.state() {
        // A closed channel means that the operator stops.
        let _ = changed.send(ObjectRef::from_obj(&*deployment)).await;
    }
}

fn key_pair(seed: &[u8]) -> Result<Ed25519KeyPair, String> {
    let length = seed.len();
    let refused = |_| format!("a key is {KEY_BYTES} random bytes, here are {length}");
    Ed25519KeyPair::from_seed_unchecked(seed).map_err(refused)
}

impl KeyStore {
    /// The Secret of this name.
    pub fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), name: name.to_owned() }
    }

    /// Reads the keys; makes the first one if there is no Secret.
    pub async fn read(&self) -> Result<Keys, KeysError> {
        let failed = |source| KeysError::Api { secret: self.name.clone(), source };
        let secret = match self.api.get_opt(&self.name).await.map_err(failed)? {
            Some(secret) => secret,
            None => match self.api.create(&PostParams::default(), &self.first()?).await {
                // Another operator was faster.
                Err(kube::Error::Api(answer)) if answer.code == 409 => {
                    self.api.get(&self.name).await.map_err(failed)?
                }
                created => created.map_err(failed)?,
            },
        };
        let entries: Vec<(String, Vec<u8>)> =
            secret.data.unwrap_or_default().into_iter().map(|(name, ByteString(seed))| (name, seed)).collect();
        Keys::from_entries(&entries).map_err(|why| KeysError::Content { secret: self.name.clone(), why })
    }

    fn first(&self) -> Result<Secret, KeysError> {
        let mut seed = [0; KEY_BYTES];
        SystemRandom::new().fill(&mut seed).map_err(|_| KeysError::NoRandomness)?;
        let mut secret = Secret::default();
        secret.metadata.name = Some(self.name.clone());
        secret.data = Some([(SIGNING.to_owned(), ByteString(seed.to_vec()))].into());
        Ok(secret)
    }
}

#[cfg(test)]
mod tests {
    use ring::signature::{ED25519, UnparsedPublicKey};
    use stoker_crds::intent::{Want, public_keys, unhex};

    use super::*;

    fn entries(names: &[(&str, u8)]) -> Vec<(String, Vec<u8>)> {
        names.iter().map(|(name, byte)| ((*name).to_owned(), vec![*byte; KEY_BYTES])).collect()
    }

    fn order() -> Order {
        Order { pod_uid: "u".into(), start_id: "s".into(), number: 1, want: Want::Serve, expires_up_ms: 1 }
    }

    fn believed(signed: &Signed, public: &str) -> bool {
        let signature: [u8; 64] = unhex(&signed.signature).unwrap();
        let message = signed_bytes(INTENT_PURPOSE, &signed.body);
        public_keys(public).iter().any(|key| UnparsedPublicKey::new(&ED25519, key).verify(&message, &signature).is_ok())
    }

    #[test]
    fn agents_that_know_the_new_key_beside_the_old_one_believe_both() {
        let [old, both, new] = [&[("signing", 1)][..], &[("signing", 1), ("next", 2)], &[("signing", 2), ("old", 1)]]
            .map(|keys| Keyring::new(Keys::from_entries(&entries(keys)).unwrap()));
        assert!(believed(&old.sign(&order()), &both.public()) && believed(&new.sign(&order()), &both.public()));
        assert!(!believed(&new.sign(&order()), &old.public()));
        let read = || Keys::from_entries(&entries(&[("signing", 2), ("old", 1)])).unwrap();
        assert!(old.clone().replace(read()) && !old.replace(read()));
        assert_eq!((old.sign(&order()), old.public()), (new.sign(&order()), new.public()));
    }

    #[test]
    fn what_is_wrong_with_the_secret_is_said() {
        let complaint = |entries: &[(String, Vec<u8>)]| Keys::from_entries(entries).err().unwrap();
        assert!(complaint(&entries(&[("next", 1)])).contains("no entry `signing`"));
        let short = [("signing".to_owned(), vec![1; 5])];
        assert_eq!(complaint(&short), "entry `signing`: a key is 32 random bytes, here are 5");
    }
}
