//! Where clients come in: one address for all deployments, and a port for each whose Service leads here. What comes through that port
//! is for its deployment, whatever host or model it names: at a Service, short names and addresses do not say which one is meant.
//!
//! Owns the listeners: opens and closes them as the operator says. A port that is closed finishes its answers.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    Extension, Router,
    http::{header::HOST, request::Parts},
    serve::{Listener, ListenerExt},
};
use stoker_edge::{
    allocator::note_connection,
    connections::{self, Limits, Places},
};
use tokio::{
    net::TcpListener,
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    fleet::{Fleet, Whom},
    gateway::Gateway,
    tls::Tls,
};

/// A port that could not be opened is tried again after this: who had it may be about to end.
const OPEN_RETRY: Duration = Duration::from_secs(1);
/// A port that the operator does not name any more stays open for this long: the Service that led here is led elsewhere by other
/// programs, on every node, and none of them says when it is done.
const LINGER: Duration = Duration::from_secs(60);

/// The host that a deployment's own port stands for.
#[derive(Clone, Debug)]
pub(crate) struct Meant(Arc<str>);

/// Who a request is for: by its port, else by the host that it names, however the request line says it.
pub fn whom(parts: &Parts) -> Whom {
    if let Some(Meant(host)) = parts.extensions.get() {
        return Whom::Port(host.to_string());
    }
    let header = || parts.headers.get(HOST).and_then(|host| host.to_str().ok());
    Whom::Host(parts.uri.authority().map(|authority| authority.as_str()).or_else(header).unwrap_or_default().to_owned())
}

/// What serves connections, wherever they come in.
#[derive(Clone, Debug)]
pub struct House {
    routes: Router,
    limits: Limits,
    places: Places,
    /// Turns true when no more are to come in.
    ended: watch::Receiver<bool>,
}

impl House {
    /// With these routes, until `ended` turns true.
    pub fn new(routes: Router, limits: Limits, ended: watch::Receiver<bool>) -> Self {
        Self { routes, limits, places: limits.places(), ended }
    }

    /// Serves the address for all deployments.
    pub async fn serve_all(self, listener: TcpListener, tls: Option<Tls>) {
        let ended = until(self.ended);
        let (limits, listener) = (self.limits, quick(listener));
        match tls {
            Some(tls) => {
                connections::serve_at(self.places, tls.over(listener), self.routes, limits, note_connection, ended)
                    .await;
            }
            None => connections::serve_at(self.places, listener, self.routes, limits, note_connection, ended).await,
        }
    }

    /// Serves a deployment's own port, until it is closed.
    async fn serve_one(self, listener: TcpListener, host: Arc<str>, closed: watch::Receiver<()>) {
        let routes = self.routes.layer(Extension(Meant(host)));
        let ended = async {
            tokio::select! {
                () = until(self.ended) => {}
                () = dropped(closed) => {}
            }
        };
        connections::serve_at(self.places, quick(listener), routes, self.limits, note_connection, ended).await;
    }

    /// Keeps the ports of deployments open at this address.
    pub async fn serve_each(self, gateway: Arc<Gateway>, address: IpAddr) {
        let (mut doors, mut servers) = (BTreeMap::<u16, Door>::new(), JoinSet::new());
        let (mut fleets, mut ended) = (gateway.fleets(), self.ended.clone());
        loop {
            let wanted = ports(&fleets.borrow_and_update());
            doors.retain(|port, door| door.stays(wanted.get(port), Instant::now()));
            for (port, host) in wanted.iter().filter(|(port, _)| !doors.contains_key(port)).collect::<Vec<_>>() {
                match connections::listen(SocketAddr::new(address, *port)) {
                    Ok(listener) => {
                        let (open, closed) = watch::channel(());
                        servers.spawn(self.clone().serve_one(listener, Arc::clone(host), closed));
                        doors.insert(*port, Door { host: Arc::clone(host), unnamed: None, _open: open });
                    }
                    Err(error) => tracing::warn!(port, %host, %error, "cannot open the port of a deployment"),
                }
            }
            while servers.try_join_next().is_some() {}
            let is_open = |port: &u16| doors.contains_key(port);
            let is_settled = wanted.len() == doors.len() && wanted.keys().all(is_open);
            tokio::select! {
                _ = fleets.changed() => {}
                () = sleep(OPEN_RETRY), if !is_settled => {}
                _ = ended.wait_for(|ended| *ended) => break,
            }
        }
        servers.join_all().await;
    }
}

/// An open port. It is closed when this is dropped.
struct Door {
    host: Arc<str>,
    /// Since when the operator has not named its port.
    unnamed: Option<Instant>,
    _open: watch::Sender<()>,
}

impl Door {
    /// Whether it stays open, now that its port is this host's or nobody's. Another's it becomes at once.
    fn stays(&mut self, named: Option<&Arc<str>>, now: Instant) -> bool {
        match named {
            Some(host) => {
                self.unnamed = None;
                *host == self.host
            }
            None => now.duration_since(*self.unnamed.get_or_insert(now)) < LINGER,
        }
    }
}

/// Which ports are to be open, and whose they are.
fn ports(fleet: &Fleet) -> BTreeMap<u16, Arc<str>> {
    let own = |deployment: &crate::fleet::Deployment| Some((deployment.port?, deployment.host().into()));
    fleet.deployments().iter().filter_map(|deployment| own(deployment)).collect()
}

async fn until(mut ended: watch::Receiver<bool>) {
    // An error: who could say so is gone.
    let _ = ended.wait_for(|ended| *ended).await;
}

async fn dropped(mut open: watch::Receiver<()>) {
    while open.changed().await.is_ok() {}
}

/// Without this the kernel holds a token back for up to 40 ms to fill a packet.
fn quick(listener: TcpListener) -> impl Listener {
    listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_stays_open_for_a_while_after_it_was_named_last_and_is_never_another_s() {
        let (host, other): (Arc<str>, Arc<str>) = ("chat.team".into(), "chat.default".into());
        let mut door = Door { host: Arc::clone(&host), unnamed: None, _open: watch::channel(()).0 };
        let (begun, second) = (Instant::now(), Duration::from_secs(1));
        assert!(door.stays(Some(&host), begun) && door.stays(None, begun) && door.stays(None, begun + LINGER - second));
        assert!(door.stays(Some(&host), begun + LINGER) && door.stays(None, begun + 2 * LINGER), "named in between");
        assert!(!door.stays(None, begun + 3 * LINGER));
        assert!(!door.stays(Some(&other), begun + 3 * LINGER));
    }
}
