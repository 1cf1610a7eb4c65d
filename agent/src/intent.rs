//! Whether an order is believed: signed by the operator, for this pod and this process, in time, and not older than what
//! was taken before. Pure: bytes, keys, numbers and times are arguments. What an order leads to is `lifecycle`'s.

use std::{
    collections::HashMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use ring::signature::{ED25519, UnparsedPublicKey};
use serde::de::DeserializeOwned;
use stoker_crds::intent::{
    INTENT_PURPOSE, KEY_BYTES, ORDER_BYTES_MAX, Order, SIGNATURE_HEADER, Want, public_keys, signed_bytes, unhex,
};

/// Length of a signature.
const SIGNATURE_BYTES: usize = 64;
/// Between two log lines about orders that were refused for the same reason.
const REFUSALS_TOLD_EVERY: Duration = Duration::from_secs(1);

/// Whose orders this process takes. Without pod or keys it takes none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Authority {
    /// UID of the pod it runs in.
    pub pod_uid: Option<String>,
    /// File with the operator's public keys. Read for every order, so that keys change while the process runs.
    pub keys: Option<PathBuf>,
}

impl Authority {
    /// The keys as they are now. A file that cannot be read has none.
    pub fn public_keys(&self) -> Vec<[u8; KEY_BYTES]> {
        let text = self.keys.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
        public_keys(&text.unwrap_or_default())
    }
}

/// The order that was taken last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Taken {
    /// Its number.
    pub number: u64,
    /// What it wants.
    pub want: Want,
}

/// Who and when this process is.
#[derive(Clone, Copy, Debug)]
pub struct Receiver<'a> {
    /// UID of its pod.
    pub pod_uid: Option<&'a str>,
    /// The process.
    pub start_id: &'a str,
    /// Milliseconds since it started.
    pub up_ms: u64,
    /// What it took before.
    pub taken: Option<Taken>,
}

/// Why an order is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refused {
    /// It is too long to be one.
    #[error("the order is longer than {ORDER_BYTES_MAX} bytes")]
    TooLarge,
    /// Nobody may give orders here.
    #[error("this agent knows no public key of an operator, so it takes no orders: end it with SIGTERM")]
    NoKeys,
    /// It is not signed.
    #[error("the header {SIGNATURE_HEADER} is missing: only the operator moves a replica")]
    Unsigned,
    /// Its signature is no signature.
    #[error("the header {SIGNATURE_HEADER} is not {} hexadecimal digits", 2 * SIGNATURE_BYTES)]
    SignatureMalformed,
    /// It was signed by somebody else, or changed on its way.
    #[error("the signature is of none of the operator's keys")]
    SignatureWrong,
    /// It was signed, and is no order that this agent knows.
    #[error("not an order that this agent understands: {0}")]
    Unreadable(String),
    /// It is for another pod.
    #[error("the order is for the pod with UID {0}, this is another")]
    OtherPod(String),
    /// It is for a process that ended, or for another container.
    #[error("the order is for the process {0}, this is another")]
    OtherProcess(String),
    /// It came too late.
    #[error("the order ended {late_ms} ms ago")]
    Expired {
        /// How much too late.
        late_ms: u64,
    },
    /// A newer one was taken.
    #[error("the order has number {number}, number {taken} was taken already")]
    LowerNumber {
        /// Its number.
        number: u64,
        /// The number taken.
        taken: u64,
    },
    /// One of the same number wanted something else.
    #[error("another order of number {0} was taken already")]
    NumberReused(u64),
}

impl Refused {
    /// A word that programs can branch on.
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLarge => "order_too_large",
            Self::NoKeys => "no_operator_keys",
            Self::Unsigned => "signature_missing",
            Self::SignatureMalformed => "signature_malformed",
            Self::SignatureWrong => "signature_wrong",
            Self::Unreadable(_) => "order_unreadable",
            Self::OtherPod(_) => "other_pod",
            Self::OtherProcess(_) => "other_process",
            Self::Expired { .. } => "order_expired",
            Self::LowerNumber { .. } => "lower_number",
            Self::NumberReused(_) => "number_reused",
        }
    }
}

/// The order in `body`, if one of `keys` signed it.
pub fn authentic(body: &[u8], signature: Option<&str>, keys: &[[u8; KEY_BYTES]]) -> Result<Order, Refused> {
    signed_for(INTENT_PURPOSE, body, signature, keys)
}

/// What the operator signed for this purpose.
pub fn signed_for<T: DeserializeOwned>(
    purpose: &[u8],
    body: &[u8],
    signature: Option<&str>,
    keys: &[[u8; KEY_BYTES]],
) -> Result<T, Refused> {
    if body.len() > ORDER_BYTES_MAX {
        return Err(Refused::TooLarge);
    }
    if keys.is_empty() {
        return Err(Refused::NoKeys);
    }
    let signature = signature.ok_or(Refused::Unsigned)?;
    let signature: [u8; SIGNATURE_BYTES] = unhex(signature).ok_or(Refused::SignatureMalformed)?;
    let signed = signed_bytes(purpose, body);
    if !keys.iter().any(|key| UnparsedPublicKey::new(&ED25519, key).verify(&signed, &signature).is_ok()) {
        return Err(Refused::SignatureWrong);
    }
    serde_json::from_slice(body).map_err(|error| Refused::Unreadable(error.to_string()))
}

/// For whom something was signed, and until when.
#[derive(Clone, Copy, Debug)]
pub struct Addressed<'a> {
    /// UID of the pod.
    pub pod_uid: &'a str,
    /// The process in it.
    pub start_id: &'a str,
    /// Milliseconds after its start from which on it counts no more.
    pub expires_up_ms: u64,
}

impl Addressed<'_> {
    /// Whether that is `receiver`, in time.
    pub fn to(self, receiver: Receiver<'_>) -> Result<(), Refused> {
        if receiver.pod_uid != Some(self.pod_uid) {
            return Err(Refused::OtherPod(self.pod_uid.to_owned()));
        }
        if receiver.start_id != self.start_id {
            return Err(Refused::OtherProcess(self.start_id.to_owned()));
        }
        if receiver.up_ms >= self.expires_up_ms {
            return Err(Refused::Expired { late_ms: receiver.up_ms - self.expires_up_ms });
        }
        Ok(())
    }
}

/// What is taken after an authentic order, if it is for `receiver` and not older than what was taken.
pub fn take(order: &Order, receiver: Receiver<'_>) -> Result<Taken, Refused> {
    let Order { pod_uid, start_id, expires_up_ms, .. } = order;
    Addressed { pod_uid, start_id, expires_up_ms: *expires_up_ms }.to(receiver)?;
    let taken = Taken { number: order.number, want: order.want };
    match receiver.taken {
        Some(before) if before.number > order.number => {
            Err(Refused::LowerNumber { number: order.number, taken: before.number })
        }
        Some(before) if before.number == order.number && before != taken => Err(Refused::NumberReused(order.number)),
        Some(_) | None => Ok(taken),
    }
}

/// Decides which refusals get a line in the log: whoever floods the port does not flood the log, and a flood of one kind does
/// not hide another. Bounded by the number of codes.
#[derive(Clone, Debug, Default)]
pub struct RefusalLog {
    by_code: HashMap<&'static str, Told>,
}

/// When a reason last got a line, and how often it came since.
#[derive(Clone, Copy, Debug)]
struct Told {
    at: Instant,
    untold: u64,
}

impl RefusalLog {
    /// Another refusal with this [`Refused::code`]. `Some`: write a line, and say that so many like it got none before.
    pub fn note(&mut self, code: &'static str, now: Instant) -> Option<u64> {
        match self.by_code.get_mut(code) {
            Some(told) if now.duration_since(told.at) < REFUSALS_TOLD_EVERY => {
                told.untold += 1;
                None
            }
            known => {
                let untold = known.map_or(0, |told| told.untold);
                self.by_code.insert(code, Told { at: now, untold: 0 });
                Some(untold)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ring::signature::{Ed25519KeyPair, KeyPair};
    use stoker_crds::{contract::DrainSettings, intent::hex};

    use super::*;

    const DRAIN: Want = Want::Drain(DrainSettings { deadline_seconds: 5, withdraw_seconds: 1 });

    fn key(seed: u8) -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&[seed; KEY_BYTES]).unwrap()
    }

    fn public(seed: u8) -> [u8; KEY_BYTES] {
        key(seed).public_key().as_ref().try_into().unwrap()
    }

    fn order(number: u64) -> Order {
        Order { pod_uid: "pod".into(), start_id: "run".into(), number, want: DRAIN, expires_up_ms: 1000 }
    }

    fn signed(order: &Order, seed: u8) -> (Vec<u8>, String) {
        let body = serde_json::to_vec(order).unwrap();
        let signature = hex(key(seed).sign(&signed_bytes(INTENT_PURPOSE, &body)).as_ref());
        (body, signature)
    }

    fn receiver(taken: Option<Taken>) -> Receiver<'static> {
        Receiver { pod_uid: Some("pod"), start_id: "run", up_ms: 900, taken }
    }

    #[test]
    fn the_signature_is_that_of_the_standard() {
        // RFC 8032, section 7.1, test 1: the empty message.
        let public = unhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a").unwrap();
        let signature: [u8; SIGNATURE_BYTES] = unhex(
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        )
        .unwrap();
        let public: [u8; KEY_BYTES] = public;
        assert!(UnparsedPublicKey::new(&ED25519, &public).verify(b"", &signature).is_ok());
    }

    #[test]
    fn an_order_signed_by_any_of_the_keys_is_believed() {
        for seed in [1, 2] {
            let (body, signature) = signed(&order(1), seed);
            assert_eq!(authentic(&body, Some(&signature), &[public(1), public(2)]), Ok(order(1)));
        }
    }

    #[test]
    fn what_was_not_signed_so_is_refused_by_name() {
        let (body, signature) = signed(&order(1), 1);
        let keys = [public(1)];
        let check = |body: &[u8], signature: Option<&str>, keys: &[_], code| {
            assert_eq!(authentic(body, signature, keys).unwrap_err().code(), code);
        };
        check(&body, None, &keys, "signature_missing");
        check(&body, Some("abc"), &keys, "signature_malformed");
        check(&body, Some(&signature), &[public(2)], "signature_wrong");
        check(&body, Some(&signature), &[], "no_operator_keys");
        check(&[b" ", &body[..]].concat(), Some(&signature), &keys, "signature_wrong");
        check(&vec![b' '; ORDER_BYTES_MAX + 1], Some(&signature), &keys, "order_too_large");
        let other = br#"{"podUid":"pod","replicas":0}"#;
        let signature = hex(key(1).sign(&signed_bytes(INTENT_PURPOSE, other)).as_ref());
        check(other, Some(&signature), &keys, "order_unreadable");
    }

    #[test]
    fn an_order_for_somebody_else_or_out_of_time_is_refused_by_name() {
        let check = |order: Order, code| assert_eq!(take(&order, receiver(None)).unwrap_err().code(), code);
        check(Order { pod_uid: "other".into(), ..order(1) }, "other_pod");
        check(Order { start_id: "before".into(), ..order(1) }, "other_process");
        check(Order { expires_up_ms: 900, ..order(1) }, "order_expired");
        let by_hand = Receiver { pod_uid: None, ..receiver(None) };
        assert_eq!(take(&order(1), by_hand).unwrap_err().code(), "other_pod");
    }

    #[test]
    fn numbers_only_rise_and_a_repeated_order_is_the_same_order() {
        let taken = take(&order(5), receiver(None)).unwrap();
        assert_eq!(taken, Taken { number: 5, want: DRAIN });
        assert_eq!(take(&order(5), receiver(Some(taken))), Ok(taken));
        assert_eq!(take(&order(6), receiver(Some(taken))).unwrap().number, 6);
        assert_eq!(take(&order(4), receiver(Some(taken))), Err(Refused::LowerNumber { number: 4, taken: 5 }));
        let serve = Order { want: Want::Serve, ..order(5) };
        assert_eq!(take(&serve, receiver(Some(taken))), Err(Refused::NumberReused(5)));
    }

    #[test]
    fn a_flood_of_refusals_is_a_line_a_second_of_each_kind_with_the_number_of_those_left_out() {
        let (mut log, start) = (RefusalLog::default(), Instant::now());
        let mut at = |code, millis: u64| log.note(code, start + Duration::from_millis(millis));
        let mut flood = |millis| at("signature_missing", millis);
        assert_eq!([flood(0), flood(10), flood(20), flood(1000), flood(1001)], [Some(0), None, None, Some(2), None]);
        assert_eq!([at("lower_number", 1001), at("lower_number", 1002)], [Some(0), None]);
    }
}
