//! Files of a model from replica to replica: who has them, as the operator tells who fetches, and the tickets that they are given for.
//! Plain serde, no keys, no clock, no I/O.
//!
//! A [`Ticket`] is for one process that has the model and one address that asks it. Like an order it ends by the uptime of who
//! believes it, so that no clock of one machine is compared with another's. It is signed by the operator and shown with each request;
//! [`Holders`], signed too, brings up to [`HOLDERS_MAX`] of them to who fetches.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::contract::{ADMIN_PORT, AGENT_PORT};

/// The port every agent gives files of its model on. No Service has it.
pub const WEIGHTS_PORT: u16 = ADMIN_PORT + 1;
/// Name of [`WEIGHTS_PORT`] in containers.
pub const WEIGHTS_PORT_NAME: &str = "weights";
/// Path of a file there, before what the cache calls its content.
pub const BLOBS_PATH: &str = "/v1/blobs/";
/// Header with a ticket, as it was signed. Its signature is in [`crate::intent::SIGNATURE_HEADER`].
pub const TICKET_HEADER: &str = "stoker-ticket";
/// Path of [`Holders`] on the admin port of who fetches.
pub const HOLDERS_PATH: &str = "/v1/holders";
/// Replicas that one who fetches is told of.
pub const HOLDERS_MAX: usize = 4;
/// How long a ticket is good, in milliseconds: every so often who fetches has to be told again.
pub const TICKET_MS: u64 = 600_000;

/// Keeps the signature of a ticket from meaning anything elsewhere.
pub const TICKET_PURPOSE: &[u8] = b"stoker.dev/ticket/v1\n";
/// The same of [`Holders`].
pub const HOLDERS_PURPOSE: &[u8] = b"stoker.dev/holders/v1\n";

const _: () = assert!(WEIGHTS_PORT == AGENT_PORT + 2, "ports stand side by side");

/// Who may have files, of whom.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ticket {
    /// UID of the pod that has them.
    pub pod_uid: String,
    /// Process in that pod: `startId` of its load report.
    pub start_id: String,
    /// Commit of the model that they are of.
    pub commit: String,
    /// Who may ask: whoever comes from another address is refused.
    pub address: IpAddr,
    /// Milliseconds after the start of that process from which on it is refused.
    pub expires_up_ms: u64,
    /// Bytes a second that the process gives at most, to all who ask it together.
    pub bytes_per_second: u64,
}

/// Body of `PUT /v1/holders`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Holders {
    /// UID of the pod that fetches.
    pub pod_uid: String,
    /// Process in that pod: `startId` of its load report.
    pub start_id: String,
    /// Milliseconds after its start from which on this is refused.
    pub expires_up_ms: u64,
    /// Who has the model; nobody, too, is an answer.
    pub holders: Vec<Holder>,
}

/// A replica that has the model.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Holder {
    /// Name of its pod, for people.
    pub pod: String,
    /// Address of the port that gives files.
    pub address: String,
    /// What to show there, a [`Ticket`] as it was signed.
    pub ticket: String,
    /// Its signature, in hexadecimal digits.
    pub signature: String,
}
