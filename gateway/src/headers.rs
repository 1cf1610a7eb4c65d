//! Headers on their way through: those that are about one connection stay there, all others pass. And the names a request is known by.

use std::{
    fmt::Write,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
        TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    },
};

use stoker_crds::{
    accounts::ACCOUNT_HEADER,
    kv_events::{PREFIXES_HEADER, PREFIXES_MAX},
    route::ROUTE_HEADER,
};
use stoker_edge::api_key::API_KEY;
use stoker_routing::{Chain, Mark};

use crate::{accounts, resume::MODEL, tenants::Tenant, usage::DEVICE_SECONDS};

/// By which a request is found in all logs.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Asks for the reasons of a choice, and has them in the answer.
pub const ROUTE: HeaderName = HeaderName::from_static(ROUTE_HEADER);
/// What must be the same wherever a request is answered, `SEED-ID-CREATED`: drawn here, so that it is when it is sent again.
pub const DRAWN: HeaderName = HeaderName::from_static("x-stoker-drawn");
/// Asks for the tokens of an answer that is not streamed before the answer, so that it can go on elsewhere, too.
pub const WHOLE: HeaderName = HeaderName::from_static("x-stoker-whole");
/// Bytes at the beginning of the body that say what was told of the answer already.
pub const RESUME: HeaderName = HeaderName::from_static("x-stoker-resume");
/// Cached prompts of requests with another salt are not theirs: a tenant's name.
pub const SALT: HeaderName = HeaderName::from_static("x-stoker-salt");
/// Whose request it is: responses that a replica keeps are for the tenant that asked for them.
pub const TENANT: HeaderName = HeaderName::from_static("x-stoker-tenant");
/// By which this gateway asks for what the tenant's requests had of devices' time that no answer told.
pub const ACCOUNT: HeaderName = HeaderName::from_static(ACCOUNT_HEADER);
/// What this gateway calls beginnings of the prompt: the replica says by these names what it holds.
pub const PREFIXES: HeaderName = HeaderName::from_static(PREFIXES_HEADER);
/// Longer ids are replaced: they end up in logs.
const REQUEST_ID_BYTES_MAX: usize = 128;

const OF_ONE_CONNECTION: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// A request's headers for a replica. Its length and host are the connection's own there; a tenant's key is the gateway's to know.
pub fn to_replica(mut headers: HeaderMap, request_id: &HeaderValue, tenant: Option<&Tenant>) -> HeaderMap {
    remove_hops(&mut headers);
    for name in [HOST, CONTENT_LENGTH, EXPECT, ROUTE, RESUME, SALT, TENANT, ACCOUNT, PREFIXES] {
        headers.remove(name);
    }
    if let Some(tenant) = tenant {
        headers.remove(AUTHORIZATION);
        headers.remove(API_KEY);
        headers.insert(ACCOUNT, accounts::NAME.clone());
        let name = HeaderValue::from_str(&tenant.name).ok();
        headers.extend(name.clone().map(|name| (TENANT, name)));
        headers.extend(name.filter(|_| !tenant.shares_prefixes).map(|name| (SALT, name)));
    }
    headers.insert(REQUEST_ID, request_id.clone());
    headers.insert(DRAWN, drawn());
    headers.insert(WHOLE, HeaderValue::from_static("marks"));
    headers.insert(DEVICE_SECONDS, HeaderValue::from_static("marks"));
    copied(&headers)
}

/// As they came they are parts of the buffer that their connection reads into, which would stay for as long as the answer lasts.
fn copied(headers: &HeaderMap) -> HeaderMap {
    headers.iter().map(|(name, value)| (name.clone(), copy(value))).collect()
}

fn copy(value: &HeaderValue) -> HeaderValue {
    HeaderValue::from_bytes(value.as_bytes()).expect("a value is one")
}

/// What another proxy changes of a request's head before it sends it to a replica.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    /// Headers to set, in place of those of their names.
    pub set: Vec<(HeaderName, HeaderValue)>,
    /// Headers to remove.
    pub removed: Vec<HeaderName>,
}

/// Of a request that came as `sent` and that this gateway would send on as `passed`. What is drawn or asked for so that an answer can
/// go on elsewhere is left out: nobody would take marks out of it.
pub fn changes(sent: &HeaderMap, passed: &HeaderMap) -> Changes {
    let named = |name: &HeaderName| Some((name.clone(), passed.get(name)?.clone()));
    let set: Vec<(HeaderName, HeaderValue)> =
        [REQUEST_ID, SALT, TENANT, ACCOUNT, PREFIXES].iter().filter_map(named).collect();
    let is_set = |name: &HeaderName| set.iter().any(|(of, _)| of == name);
    let stays = |name: &HeaderName| {
        ![ROUTE, RESUME, SALT, TENANT, ACCOUNT, PREFIXES, DRAWN, WHOLE, DEVICE_SECONDS].contains(name)
    };
    let is_key = |name: &HeaderName| [AUTHORIZATION, API_KEY].contains(name);
    let goes = |name: &&HeaderName| !stays(name) || is_key(name) && !passed.contains_key(*name);
    let removed = sent.keys().filter(goes).filter(|name| !is_set(name)).cloned().collect();
    Changes { set, removed }
}

/// An answer's headers for a client.
pub fn to_client(headers: &mut HeaderMap) {
    remove_hops(headers);
    headers.remove(MODEL);
    headers.remove(ACCOUNT);
}

/// Whether an answer is a stream of events.
pub fn is_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// The names of a prompt's beginnings, if it has any.
pub fn prefixes(chain: &Chain) -> Option<HeaderValue> {
    let mut text = chain.n_bytes().to_string();
    for Mark { hash, end } in chain.marks().iter().take(PREFIXES_MAX) {
        // Writing to a string does not fail.
        let _ = write!(text, " {end}:{hash:x}");
    }
    let names = HeaderValue::from_str(&text).expect("digits are visible ASCII");
    (!chain.marks().is_empty()).then_some(names)
}

fn drawn() -> HeaderValue {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
    let drawn = format!("{:016x}-{:032x}-{created}", rand::random::<u64>(), rand::random::<u128>());
    HeaderValue::from_str(&drawn).expect("digits are visible ASCII")
}

fn remove_hops(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named.iter().chain(&OF_ONE_CONNECTION) {
        headers.remove(name);
    }
}

/// The id that the client sent, or one of our own.
pub fn request_id(headers: &HeaderMap) -> HeaderValue {
    let sent = headers.get(REQUEST_ID).filter(|id| id.len() <= REQUEST_ID_BYTES_MAX && id.to_str().is_ok());
    sent.map(copy).unwrap_or_else(|| {
        let drawn = format!("req-{:016x}", rand::random::<u64>());
        HeaderValue::from_str(&drawn).expect("hexadecimal digits are visible ASCII")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::Tenants;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let header =
            |(name, value): &(&str, &str)| (HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
        pairs.iter().map(header).collect()
    }

    #[test]
    fn what_is_about_one_connection_stays_there() {
        let sent = headers(&[
            ("Connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("proxy-authorization", "secret"),
            ("host", "chat.default"),
            ("content-length", "12"),
            ("expect", "100-continue"),
            ("x-stoker-route", "explain"),
            ("x-stoker-drawn", "of the client's"),
            ("x-stoker-resume", "7"),
            ("x-stoker-salt", "another's"),
            ("x-stoker-tenant", "another"),
            ("x-stoker-account", "another's"),
            ("x-stoker-prefixes", "256 256:1"),
            ("authorization", "Bearer key"),
            ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            ("x-request-id", "mine"),
        ]);
        let id = request_id(&sent);
        let passed = to_replica(sent, &id, None);
        let mut names: Vec<&str> = passed.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        let own = ["x-stoker-device-seconds", "x-stoker-drawn", "x-stoker-whole"];
        assert_eq!(names, [&["authorization", "traceparent", "x-request-id"], &own[..]].concat());
        assert_eq!(passed[DRAWN].to_str().unwrap().split('-').map(str::len).take(2).collect::<Vec<_>>(), [16, 32]);
        assert_eq!(passed[REQUEST_ID], "mine");
    }

    #[test]
    fn a_tenant_s_key_stays_here_and_its_prompts_are_its_own() {
        let sent = || {
            headers(&[
                ("authorization", "Bearer key"),
                ("x-api-key", "key"),
                ("x-stoker-salt", "another's"),
                ("x-stoker-tenant", "another"),
                ("x-stoker-account", "another's"),
            ])
        };
        let tenant = |more: &str| {
            let text = format!("tenants: [{{name: search, keys: []{more}}}]");
            Tenants::parse(&text).unwrap().named("search").unwrap().clone()
        };
        let passed = |tenant: &Tenant| to_replica(sent(), &request_id(&HeaderMap::new()), Some(tenant));
        let own = passed(&tenant(""));
        let name = HeaderValue::from_static("search");
        assert_eq!([own.get(SALT), own.get(TENANT)], [Some(&name); 2], "{own:?}");
        assert_eq!(own[ACCOUNT], *accounts::NAME);
        assert_eq!(own.len(), 7, "{own:?}");
        let shared = passed(&tenant(", sharesPrefixes: true"));
        assert_eq!([shared.get(SALT), shared.get(TENANT)], [None, Some(&name)], "{shared:?}");
        assert_eq!(shared.len(), 6, "{shared:?}");
    }

    #[test]
    fn another_proxy_takes_out_what_replicas_believe_of_a_gateway_alone() {
        let own = [
            "x-stoker-route",
            "x-stoker-drawn",
            "x-stoker-whole",
            "x-stoker-device-seconds",
            "x-stoker-resume",
            "x-stoker-salt",
            "x-stoker-tenant",
            "x-stoker-account",
            "x-stoker-prefixes",
        ];
        let sent =
            headers(&[&own.map(|name| (name, "1"))[..], &[("host", "a"), ("authorization", "Bearer key")]].concat());
        let id = request_id(&sent);
        let names = |changes: &Changes| {
            let mut set: Vec<String> = changes.set.iter().map(|(name, _)| name.to_string()).collect();
            set.sort_unstable();
            let mut removed: Vec<String> = changes.removed.iter().map(ToString::to_string).collect();
            removed.sort_unstable();
            (set, removed)
        };
        let mut expected = own.map(str::to_owned).to_vec();
        expected.sort_unstable();
        let open = changes(&sent, &to_replica(sent.clone(), &id, None));
        assert_eq!(names(&open), (vec!["x-request-id".to_owned()], expected.clone()));
        let tenants = Tenants::parse("tenants: [{name: search, keys: []}]").unwrap();
        let passed = to_replica(sent.clone(), &id, tenants.named("search").map(|tenant| &**tenant));
        let set = ["x-request-id", "x-stoker-account", "x-stoker-salt", "x-stoker-tenant"].map(str::to_owned).to_vec();
        expected.retain(|name| !set.contains(name));
        expected.insert(0, "authorization".to_owned());
        assert_eq!(names(&changes(&sent, &passed)), (set, expected));
    }

    #[test]
    fn beginnings_have_their_ends_and_names() {
        let chain = Chain::of(1, &[&[7; 600]]);
        let [first, second] = [0, 1].map(|at| chain.marks()[at].hash);
        assert_eq!(prefixes(&chain).unwrap(), format!("600 256:{first:x} 512:{second:x}").as_str());
        assert_eq!(prefixes(&Chain::of(1, &[b"short"])), None);
    }

    #[test]
    fn an_id_that_does_not_belong_into_a_log_is_replaced() {
        let long = "x".repeat(129);
        for sent in [headers(&[("x-request-id", &long)]), HeaderMap::new()] {
            assert!(request_id(&sent).to_str().unwrap().starts_with("req-"));
        }
    }
}
