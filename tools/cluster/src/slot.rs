//! The addresses of one local cluster, disjoint from those of every other on this machine. Adds no address to any
//! interface: on Linux all of 127.0.0.0/8 is local already, so nothing here needs root.
//!
//! ```text
//! slot s    127.77.s.1            API server (6443), etcd (2379, 2380), logs (10250, 10251),
//!                           operator (8080, its pages 8081), gateway (8000, 8001, and a port a deployment),
//!                           the claim itself (1077)
//!           127.77.s.2   - .127   pods of node 0
//!           127.77.s.128 - .254   pods of node 1
//!           127.96.s.0/24         Services
//! ```
//! A slot is claimed by listening on its port 1077: the kernel gives it back when the owner ends, however it ends.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::RangeInclusive,
};

use crate::{error::ClusterError, servers::Addresses};

const SLOTS: RangeInclusive<u8> = 0..=254;
const CLAIM_PORT: u16 = 1077;
const API_PORT: u16 = 6443;
/// Of node 0; node 1 has the next.
const KUBELET_PORT: u16 = 10250;
const ETCD_CLIENT_PORT: u16 = 2379;
const ETCD_PEER_PORT: u16 = 2380;

/// One claimed range of loopback addresses.
#[derive(Debug)]
pub(crate) struct Slot {
    number: u8,
    /// `None`: somebody else's, who lends it.
    _claim: Option<TcpListener>,
}

impl Slot {
    /// Claims the first free slot.
    pub(crate) fn claim() -> Result<Self, ClusterError> {
        SLOTS.into_iter().find_map(Self::try_claim).ok_or(ClusterError::NoFreeSlot(SLOTS.count()))
    }

    fn try_claim(number: u8) -> Option<Self> {
        let home = home(number);
        let claim = TcpListener::bind((home, CLAIM_PORT)).ok()?;
        // The previous owner may be gone while its servers are still being killed: then the slot is not free yet.
        let free = |port| TcpListener::bind((home, port)).is_ok();
        [API_PORT, ETCD_CLIENT_PORT, ETCD_PEER_PORT]
            .into_iter()
            .all(free)
            .then_some(Self { number, _claim: Some(claim) })
    }

    /// One that its owner lends.
    pub(crate) fn lent(number: u8) -> Self {
        Self { number, _claim: None }
    }

    pub(crate) fn number(&self) -> u8 {
        self.number
    }

    /// Where the control plane listens.
    pub(crate) fn home(&self) -> Ipv4Addr {
        home(self.number)
    }

    /// Of the control plane.
    pub(crate) fn addresses(&self) -> Addresses {
        let at_home = |port| (self.home(), port).into();
        Addresses {
            api: at_home(API_PORT),
            etcd_client: at_home(ETCD_CLIENT_PORT),
            etcd_peer: at_home(ETCD_PEER_PORT),
            service_range: format!("127.96.{}.0/24", self.number),
            first_service: Ipv4Addr::new(127, 96, self.number, 1),
        }
    }

    /// Where one node answers the API server's questions for logs.
    pub(crate) fn kubelet(&self, node_idx: usize) -> SocketAddr {
        let node_idx = u16::try_from(node_idx).expect("a slot has two nodes");
        (self.home(), KUBELET_PORT + node_idx).into()
    }

    /// Pod addresses of one node; `None` beyond the second.
    pub(crate) fn pod_addresses(&self, node_idx: usize) -> Option<RangeInclusive<Ipv4Addr>> {
        let (first, last) = *[(2, 127), (128, 254)].get(node_idx)?;
        Some(Ipv4Addr::new(127, 77, self.number, first)..=Ipv4Addr::new(127, 77, self.number, last))
    }
}

fn home(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 77, number, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_clusters_share_no_address() {
        let (one, two) = (Slot::claim().unwrap(), Slot::claim().unwrap());
        assert_ne!(one.home(), two.home());
        assert_ne!(one.addresses().service_range, two.addresses().service_range);
    }

    #[test]
    fn two_nodes_share_no_address_and_a_third_is_refused() {
        let slot = Slot::claim().unwrap();
        let (first, second) = (slot.pod_addresses(0).unwrap(), slot.pod_addresses(1).unwrap());
        assert!(first.end() < second.start());
        assert!(!first.contains(&slot.home()));
        assert!(slot.pod_addresses(2).is_none());
    }
}
