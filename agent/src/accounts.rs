//! What tenants' requests had and no answer told, time of devices and tokens: an account for each tenant of each gateway. Knows no request and no HTTP.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use stoker_crds::accounts::Tokens;

/// Accounts at most: whoever reaches this process can name as many as it likes.
const ACCOUNTS_MAX: usize = 1 << 15;
/// A gateway that has not asked for so long is gone, and its accounts make room for another one's. It asks every two seconds.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// What one tenant had at one gateway, which only rises.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<Sums>);

#[derive(Debug, Default)]
struct Sums {
    nanos: AtomicU64,
    prompt: AtomicU64,
    cached: AtomicU64,
    completion: AtomicU64,
}

impl Account {
    /// It had this, too.
    pub fn add(&self, time: Duration) {
        self.0.nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// And these tokens.
    pub fn add_tokens(&self, Tokens { prompt, cached, completion }: Tokens) {
        self.0.prompt.fetch_add(prompt, Ordering::Relaxed);
        self.0.cached.fetch_add(cached, Ordering::Relaxed);
        self.0.completion.fetch_add(completion, Ordering::Relaxed);
    }

    fn micros(&self) -> u64 {
        self.0.nanos.load(Ordering::Relaxed) / 1000
    }

    fn tokens(&self) -> Tokens {
        let [prompt, cached, completion] =
            [&self.0.prompt, &self.0.cached, &self.0.completion].map(|sum| sum.load(Ordering::Relaxed));
        Tokens { prompt, cached, completion }
    }
}

/// All accounts of this process.
#[derive(Debug, Default)]
pub struct Accounts(Mutex<HashMap<String, OfGateway>>);

#[derive(Debug)]
struct OfGateway {
    /// When it asked last, or was first named.
    heard: Instant,
    tenants: HashMap<String, Account>,
}

impl Accounts {
    /// The account of a tenant at a gateway; `None`: there are too many.
    pub fn of(&self, gateway: &str, tenant: &str, now: Instant) -> Option<Account> {
        let mut gateways = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = gateways.get(gateway).and_then(|of| of.tenants.get(tenant)) {
            return Some(known.clone());
        }
        let n_accounts = |gateways: &HashMap<_, OfGateway>| gateways.values().map(|of| of.tenants.len()).sum::<usize>();
        if n_accounts(&gateways) >= ACCOUNTS_MAX {
            gateways.retain(|_, of| now.saturating_duration_since(of.heard) < FORGOTTEN_AFTER);
            if n_accounts(&gateways) >= ACCOUNTS_MAX {
                return None;
            }
        }
        let new = || OfGateway { heard: now, tenants: HashMap::new() };
        let of = gateways.entry(gateway.to_owned()).or_insert_with(new);
        Some(of.tenants.entry(tenant.to_owned()).or_default().clone())
    }

    /// What a gateway's tenants had, in microseconds and, if they had some, in tokens, for this gateway itself.
    pub fn told(&self, gateway: &str, now: Instant) -> (BTreeMap<String, u64>, BTreeMap<String, Tokens>) {
        let mut gateways = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of) = gateways.get_mut(gateway) else { return Default::default() };
        of.heard = now;
        let micros = of.tenants.iter().map(|(tenant, account)| (tenant.clone(), account.micros())).collect();
        let tokens = of.tenants.iter().map(|(tenant, account)| (tenant.clone(), account.tokens()));
        (micros, tokens.filter(|(_, tokens)| *tokens != Tokens::default()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gateway_is_told_of_its_own_tenants() {
        let (accounts, now) = (Accounts::default(), Instant::now());
        let add = |gateway, tenant, nanos| {
            accounts.of(gateway, tenant, now).unwrap().add(Duration::from_nanos(nanos));
        };
        add("a", "search", 1_500);
        add("a", "search", 1_500);
        add("a", "chat", 999);
        add("b", "search", 7_000);
        let told = |gateway| accounts.told(gateway, now).0.into_iter().collect::<Vec<_>>();
        assert_eq!(told("a"), [("chat".to_owned(), 0), ("search".to_owned(), 3)]);
        assert_eq!(told("b"), [("search".to_owned(), 7)]);
        assert_eq!(told("c"), []);
        let tokens = Tokens { prompt: 9, cached: 4, completion: 1 };
        (0..2).for_each(|_| accounts.of("a", "chat", now).unwrap().add_tokens(tokens));
        let told: Vec<_> = accounts.told("a", now).1.into_iter().collect();
        assert_eq!(told, [("chat".to_owned(), Tokens { prompt: 18, cached: 8, completion: 2 })]);
        assert_eq!(accounts.told("b", now).1.len(), 0);
    }

    #[test]
    fn gateways_that_are_gone_make_room_and_nobody_else() {
        let (accounts, begun) = (Accounts::default(), Instant::now());
        let filled = (0..ACCOUNTS_MAX - 1).all(|tenant| accounts.of("gone", &tenant.to_string(), begun).is_some());
        assert!(filled && accounts.of("stays", "search", begun).is_some());
        let later = begun + FORGOTTEN_AFTER;
        assert!(accounts.of("new", "search", later - Duration::from_secs(1)).is_none(), "both may ask again");
        accounts.of("stays", "search", begun).unwrap().add(Duration::from_micros(5));
        accounts.told("stays", later);
        assert!(accounts.of("new", "search", later).is_some());
        assert_eq!(accounts.told("stays", later).0["search"], 5);
        assert!(accounts.told("gone", later).0.is_empty());
    }
}
