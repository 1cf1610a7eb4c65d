//! Hands out one loopback address a pod. The one that was free the longest comes first, so that a client which still
//! knows an old pod's address does not meet a new pod there.

use std::{collections::VecDeque, net::Ipv4Addr, ops::RangeInclusive, sync::Mutex};

/// The free addresses of one node.
#[derive(Debug)]
pub(crate) struct AddressPool {
    free: Mutex<VecDeque<Ipv4Addr>>,
}

impl AddressPool {
    pub(crate) fn new(range: RangeInclusive<Ipv4Addr>) -> Self {
        let (first, last) = (u32::from(*range.start()), u32::from(*range.end()));
        Self { free: Mutex::new((first..=last).map(Ipv4Addr::from).collect()) }
    }

    pub(crate) fn take(&self) -> Option<Ipv4Addr> {
        self.free.lock().expect("no holder panics").pop_front()
    }

    pub(crate) fn give_back(&self, address: Ipv4Addr) {
        self.free.lock().expect("no holder panics").push_back(address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_address_is_used_last() {
        let pool = AddressPool::new(Ipv4Addr::new(127, 77, 0, 2)..=Ipv4Addr::new(127, 77, 0, 3));
        let first = pool.take().unwrap();
        pool.give_back(first);
        assert_ne!(pool.take(), Some(first));
        assert_eq!(pool.take(), Some(first));
        assert_eq!(pool.take(), None);
    }
}
