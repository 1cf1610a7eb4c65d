//! What replicas keep account of: device time of tenants' requests that no answer told, because nobody waited for it, it has no marks or
//! another proxy has it, and tokens of answers that nobody waited for. Each replica is asked every two seconds where there are tenants, and what is new is counted as theirs. No
//! request waits for any of it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use axum::http::HeaderValue;
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::Request;
use stoker_crds::accounts::{ACCOUNTS_PATH, Accounts, Tokens};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::gateway::Gateway;

/// What a replica that is killed takes with it is what it did since it was asked.
const PERIOD: Duration = Duration::from_secs(2);
/// More tenants than a replica has accounts for are not in one.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// A replica that was not heard for so long is not heard again.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(24 * 3600);

/// What this gateway calls itself: there is one in a process, and another one's accounts are not its.
pub static NAME: LazyLock<HeaderValue> = LazyLock::new(|| {
    let drawn = format!("{:032x}", rand::random::<u128>());
    HeaderValue::from_str(&drawn).expect("hexadecimal digits are visible ASCII")
});

/// Asks for ever.
pub async fn follow(gateway: Arc<Gateway>) {
    let mut known = Known::default();
    loop {
        sleep(PERIOD).await;
        if gateway.admission().is_none() {
            continue;
        }
        for told in ask_all(&gateway).await {
            for (tenant, news) in known.news(told, Instant::now()) {
                count(&gateway, &tenant, news);
            }
        }
    }
}

fn count(gateway: &Gateway, tenant: &str, News { time, tokens: Tokens { prompt, cached, completion } }: News) {
    let (seconds, tokens) = (&gateway.metrics.tenant_device_seconds, &gateway.metrics.tenant_tokens);
    seconds.with_label_values(&[tenant]).inc_by(time.as_secs_f64());
    for (kind, n) in [("prompt", prompt), ("cached", cached), ("completion", completion)] {
        if n > 0 {
            tokens.with_label_values(&[tenant, kind]).inc_by(n);
        }
    }
    gateway.owed_by(tenant, prompt + completion);
}

/// What all replicas say, in any state: who drains still works.
async fn ask_all(gateway: &Arc<Gateway>) -> Vec<Accounts> {
    let fleet = gateway.fleet();
    let members = fleet.deployments().iter().flat_map(|deployment| &deployment.members);
    let addresses: BTreeSet<String> = members.filter_map(|member| member.events.clone()).collect();
    let mut asked = JoinSet::new();
    for address in addresses {
        let gateway = Arc::clone(gateway);
        asked.spawn(async move {
            let told = timeout(PERIOD, ask(&gateway, &address)).await.context("no answer in time").flatten();
            told.inspect_err(|error| tracing::debug!(address, error = format!("{error:#}"), "no accounts")).ok()
        });
    }
    asked.join_all().await.into_iter().flatten().collect()
}

async fn ask(gateway: &Gateway, address: &str) -> anyhow::Result<Accounts> {
    let name = NAME.to_str().context("its own name")?;
    let request = Request::get(format!("http://{address}{ACCOUNTS_PATH}/{name}")).body(Bytes::new())?;
    let response = gateway.send(request).await?;
    ensure!(response.status().is_success(), "answered {}", response.status());
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("read the answer: {error}"))?.to_bytes();
    serde_json::from_slice(&body).context("read accounts")
}

/// What was counted of each replica, by its start: a replica that is named again has not begun anew.
#[derive(Debug, Default)]
struct Known(HashMap<String, Counted>);

#[derive(Debug)]
struct Counted {
    device_micros: BTreeMap<String, u64>,
    tokens: BTreeMap<String, Tokens>,
    heard: Instant,
}

/// What is new on a tenant's account.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct News {
    time: Duration,
    tokens: Tokens,
}

/// What it rose by; nothing in an answer that was late.
fn risen(before: &mut u64, now: u64) -> u64 {
    let more = now.saturating_sub(*before);
    *before += more;
    more
}

impl Known {
    /// What is new of what a replica says. Of a start that was not heard before all is new: nobody else has this gateway's name.
    fn news(&mut self, told: Accounts, now: Instant) -> BTreeMap<String, News> {
        self.0.retain(|_, counted| now.saturating_duration_since(counted.heard) < FORGOTTEN_AFTER);
        if told.device_micros.is_empty() {
            return BTreeMap::new();
        }
        let new = || Counted { device_micros: BTreeMap::new(), tokens: BTreeMap::new(), heard: now };
        let counted = self.0.entry(told.start_id).or_insert_with(new);
        counted.heard = now;
        let mut news = BTreeMap::<String, News>::new();
        for (tenant, micros) in told.device_micros {
            let before = counted.device_micros.entry(tenant.clone()).or_default();
            news.entry(tenant).or_default().time = Duration::from_micros(risen(before, micros));
        }
        for (tenant, Tokens { prompt, cached, completion }) in told.tokens {
            let before = counted.tokens.entry(tenant.clone()).or_default();
            news.entry(tenant).or_default().tokens = Tokens {
                prompt: risen(&mut before.prompt, prompt),
                cached: risen(&mut before.cached, cached),
                completion: risen(&mut before.completion, completion),
            };
        }
        news.retain(|_, news| *news != News::default());
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_rises_is_counted_once_and_another_start_begins_at_nothing() {
        let (mut known, now) = (Known::default(), Instant::now());
        let mut news = |start_id: &str, told: &[(&str, u64)], seconds| {
            let device_micros = told.iter().map(|(tenant, micros)| ((*tenant).to_owned(), *micros)).collect();
            let told = Accounts { start_id: start_id.to_owned(), device_micros, tokens: BTreeMap::new() };
            let news = known.news(told, now + Duration::from_secs(seconds));
            news.into_iter().map(|(tenant, news)| (tenant, news.time.as_micros())).collect::<Vec<_>>()
        };
        let of = |news: &[(&str, u128)]| news.iter().map(|(tenant, time)| ((*tenant).to_owned(), *time)).collect();
        let expected: Vec<(String, u128)> = of(&[("a", 5), ("b", 7)]);
        assert_eq!(news("s", &[("a", 5), ("b", 7)], 0), expected);
        assert_eq!(news("s", &[("a", 5), ("b", 9)], 2), of(&[("b", 2)]));
        assert_eq!(news("t", &[("a", 3)], 2), of(&[("a", 3)]), "another process");
        assert_eq!(news("s", &[("a", 6)], 3600), of(&[("a", 1)]), "it was not named for an hour");
        assert_eq!(news("s", &[("a", 4)], 3602), of(&[]), "an answer that was late");
        assert_eq!(news("s", &[("a", 6), ("b", 9)], 3604), of(&[]));
        assert_eq!(news("t", &[], 4000), of(&[]));
    }

    #[test]
    fn tokens_are_counted_once_each_kind_for_itself() {
        let (mut known, now) = (Known::default(), Instant::now());
        let mut news = |prompt, cached, completion| {
            let tokens = [("a".to_owned(), Tokens { prompt, cached, completion })].into();
            let device_micros = [("a".to_owned(), 5)].into();
            let news = known.news(Accounts { start_id: "s".to_owned(), device_micros, tokens }, now);
            news.get("a").map(|news| news.tokens)
        };
        assert_eq!(news(20, 16, 3), Some(Tokens { prompt: 20, cached: 16, completion: 3 }));
        assert_eq!(news(20, 16, 3), None);
        assert_eq!(news(20, 16, 7), Some(Tokens { prompt: 0, cached: 0, completion: 4 }));
        assert_eq!(news(20, 16, 5), None, "an answer that was late");
        assert_eq!(news(31, 16, 7), Some(Tokens { prompt: 11, cached: 0, completion: 0 }));
    }
}
