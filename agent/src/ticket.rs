//! Whether a file of the model is given: to who shows a ticket that the operator signed, for this process, for its model, in time, and
//! who comes from the address that it names. Pure: bytes, keys, addresses and times are arguments.

use std::net::IpAddr;

use axum::http::StatusCode;
use stoker_crds::{
    holders::{TICKET_HEADER, TICKET_PURPOSE, Ticket},
    intent::KEY_BYTES,
};

use crate::intent::{Addressed, Receiver, Refused, signed_for};

/// What somebody presents.
#[derive(Clone, Copy, Debug, Default)]
pub struct PresentedTicket<'a> {
    /// The ticket as it was signed.
    pub ticket: Option<&'a str>,
    /// Its signature.
    pub signature: Option<&'a str>,
}

/// Why a file is not given.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NotAdmitted {
    /// Nothing is presented.
    #[error("the header {TICKET_HEADER} is missing: files are given to whom the operator gave a ticket")]
    NoTicket,
    /// It is not the operator's, or not for this process.
    #[error("ticket: {0}")]
    Ticket(#[from] Refused),
    /// It is for somebody else.
    #[error(
        "the ticket is for {ticket}, this request comes from {from}: a network that changes addresses is in between"
    )]
    OtherAddress {
        /// Who may ask.
        ticket: IpAddr,
        /// Who asks.
        from: IpAddr,
    },
    /// It is for another model.
    #[error("the ticket is for commit {ticket}, here is {here}")]
    OtherModel {
        /// What may be asked for.
        ticket: String,
        /// What is here.
        here: String,
    },
}

impl NotAdmitted {
    /// A word that programs can branch on.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoTicket => "ticket_missing",
            Self::Ticket(refused) => refused.code(),
            Self::OtherAddress { .. } => "other_address",
            Self::OtherModel { .. } => "other_model",
        }
    }

    /// The status that says so.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::NoTicket => StatusCode::UNAUTHORIZED,
            Self::Ticket(_) | Self::OtherAddress { .. } | Self::OtherModel { .. } => StatusCode::FORBIDDEN,
        }
    }
}

/// Who gives what.
#[derive(Clone, Copy, Debug)]
pub struct Giver<'a> {
    /// This process.
    pub receiver: Receiver<'a>,
    /// The commit of its model.
    pub commit: &'a str,
    /// The operator's public keys.
    pub keys: &'a [[u8; KEY_BYTES]],
}

/// The ticket, if it lets whoever comes from this address in.
pub fn admit(presented: PresentedTicket<'_>, from: IpAddr, giver: Giver<'_>) -> Result<Ticket, NotAdmitted> {
    let text = presented.ticket.ok_or(NotAdmitted::NoTicket)?;
    let ticket: Ticket = signed_for(TICKET_PURPOSE, text.as_bytes(), presented.signature, giver.keys)?;
    let Ticket { pod_uid, start_id, expires_up_ms, .. } = &ticket;
    Addressed { pod_uid, start_id, expires_up_ms: *expires_up_ms }.to(giver.receiver)?;
    if ticket.address.to_canonical() != from.to_canonical() {
        return Err(NotAdmitted::OtherAddress { ticket: ticket.address, from });
    }
    if ticket.commit != giver.commit {
        return Err(NotAdmitted::OtherModel { ticket: ticket.commit, here: giver.commit.to_owned() });
    }
    Ok(ticket)
}

#[cfg(test)]
mod tests {
    use ring::signature::{Ed25519KeyPair, KeyPair};
    use stoker_crds::{
        holders::HOLDERS_PURPOSE,
        intent::{hex, signed_bytes},
    };

    use super::*;

    fn key(seed: u8) -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&[seed; KEY_BYTES]).unwrap()
    }

    fn ticket() -> Ticket {
        Ticket {
            pod_uid: "pod".into(),
            start_id: "run".into(),
            commit: "c1".into(),
            address: "10.0.0.7".parse().unwrap(),
            expires_up_ms: 1000,
            bytes_per_second: 1,
        }
    }

    fn asked(ticket: &Ticket, purpose: &[u8], seed: u8, from: &str) -> Result<Ticket, NotAdmitted> {
        let text = serde_json::to_string(ticket).unwrap();
        let signature = hex(key(seed).sign(&signed_bytes(purpose, text.as_bytes())).as_ref());
        let presented = PresentedTicket { ticket: Some(&text), signature: Some(&signature) };
        admit(presented, from.parse().unwrap(), giver(&[key(1).public_key().as_ref().try_into().unwrap()]))
    }

    fn giver(keys: &[[u8; KEY_BYTES]]) -> Giver<'_> {
        let receiver = Receiver { pod_uid: Some("pod"), start_id: "run", up_ms: 900, taken: None };
        Giver { receiver, commit: "c1", keys }
    }

    #[test]
    fn whom_the_operator_gave_a_ticket_is_let_in_from_its_own_address() {
        for from in ["10.0.0.7", "::ffff:10.0.0.7"] {
            assert_eq!(asked(&ticket(), TICKET_PURPOSE, 1, from), Ok(ticket()), "{from}");
        }
    }

    #[test]
    fn everybody_else_is_refused_with_the_reason() {
        let refused = |ticket: &Ticket, purpose: &[u8], seed, from| asked(ticket, purpose, seed, from).unwrap_err();
        let for_us = |ticket: Ticket| refused(&ticket, TICKET_PURPOSE, 1, "10.0.0.7");
        assert_eq!(refused(&ticket(), TICKET_PURPOSE, 2, "10.0.0.7"), NotAdmitted::Ticket(Refused::SignatureWrong));
        assert_eq!(refused(&ticket(), HOLDERS_PURPOSE, 1, "10.0.0.7"), NotAdmitted::Ticket(Refused::SignatureWrong));
        assert!(matches!(refused(&ticket(), TICKET_PURPOSE, 1, "10.0.0.8"), NotAdmitted::OtherAddress { .. }));
        assert_eq!(
            for_us(Ticket { pod_uid: "other".into(), ..ticket() }),
            NotAdmitted::Ticket(Refused::OtherPod("other".into()))
        );
        assert_eq!(
            for_us(Ticket { start_id: "before".into(), ..ticket() }),
            NotAdmitted::Ticket(Refused::OtherProcess("before".into()))
        );
        assert_eq!(
            for_us(Ticket { expires_up_ms: 900, ..ticket() }),
            NotAdmitted::Ticket(Refused::Expired { late_ms: 0 })
        );
        assert!(matches!(for_us(Ticket { commit: "c2".into(), ..ticket() }), NotAdmitted::OtherModel { .. }));
        let from = "10.0.0.7".parse().unwrap();
        let nothing = admit(PresentedTicket::default(), from, giver(&[])).unwrap_err();
        assert_eq!((nothing.status(), nothing), (StatusCode::UNAUTHORIZED, NotAdmitted::NoTicket));
        let text = serde_json::to_string(&ticket()).unwrap();
        let unsigned = PresentedTicket { ticket: Some(&text), signature: None };
        assert_eq!(admit(unsigned, from, giver(&[[1; 32]])), Err(NotAdmitted::Ticket(Refused::Unsigned)));
        assert_eq!(admit(unsigned, from, giver(&[])), Err(NotAdmitted::Ticket(Refused::NoKeys)));
    }
}
