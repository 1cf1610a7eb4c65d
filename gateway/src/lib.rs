//! The gateway: one address for all replicas of all deployments.
//!
//! `feed` follows the operator, `kv_feed` what replicas say of their caches and `peers` what other gateways have `in_flight` there (each is `followed` while it is named), `fleet` is what is known, `scan` reads what routing
//! needs of a body, `asked` is the request with it, `stoker_routing` chooses, `attempt` asks one replica on a connection of `upstream`, `proxy` those that `tries` lets it, and `relay` passes the answer on; when its
//! replica is lost (`watch` asks whether a silent one's `vital` signs are there), `resume` has another one go on behind what `journal` kept, for as long as `search` says. Where no replica has
//! `room`, requests wait for their `turns` in a `line`. `tenants` are who may ask, if not everybody, by keys or by tokens of issuers (`oidc`), `permit` is their leave, `accounts` brings what answers did not tell of their time. `picker`
//! tells other proxies where requests go, by the same choice.
//! Stateless: what it remembers from one request to the next makes choices better, and no answer depends on it.

pub mod access;
pub mod accounts;
pub mod args;
pub mod asked;
pub mod attempt;
pub mod body;
pub mod breaker;
pub mod budget;
pub mod doors;
pub mod error;
pub mod events;
pub mod explain;
pub mod feed;
pub mod fleet;
pub mod followed;
pub mod gateway;
pub mod headers;
pub mod in_flight;
pub mod journal;
pub mod keys;
pub mod kv_feed;
pub mod line;
pub mod metrics;
pub mod oidc;
pub mod peers;
pub mod permit;
pub mod picker;
pub mod proxy;
pub mod quota;
pub mod relay;
pub mod reread;
pub mod resume;
pub mod room;
pub mod scan;
pub mod search;
pub mod server;
pub mod tenants;
pub mod tls;
pub mod tries;
pub mod turns;
pub mod upstream;
pub mod usage;
pub mod vital;
pub mod watch;
pub mod whole;
