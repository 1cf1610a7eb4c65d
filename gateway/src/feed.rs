//! Follows the operator: asks for another document than the one that is known, and waits for it. While the operator is away, the last
//! document stays.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::{Request, Uri};
use stoker_crds::endpoints::{ENDPOINTS_PATH, Endpoints, WAIT_SECONDS_MAX};
use tokio::time::{Instant, sleep, timeout};

use crate::{fleet::Version, gateway::Gateway};

/// More than the wait that is asked for.
const TIMEOUT: Duration = Duration::from_secs(WAIT_SECONDS_MAX + 10);
/// A hundred thousand replicas have less.
const DOCUMENT_BYTES_MAX: usize = 64 << 20;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Follows for ever.
pub async fn follow(gateway: Arc<Gateway>, operator: Uri) {
    let (mut pause, mut heard, mut complaint) = (FIRST_PAUSE, Instant::now(), None);
    loop {
        let asked = ask(&gateway, &operator).await;
        let outcome = if asked.is_ok() { "ok" } else { "failed" };
        gateway.metrics.feed.with_label_values(&[outcome]).inc();
        match asked {
            Ok(endpoints) => {
                (pause, heard, complaint) = (FIRST_PAUSE, Instant::now(), None);
                if gateway.version() != Some(version(&endpoints)) {
                    gateway.learn(endpoints);
                }
            }
            Err(error) => {
                let error = format!("{error:#}");
                if complaint.as_ref() != Some(&error) {
                    tracing::warn!(operator = %operator, error, "no endpoints, going on with the last");
                }
                complaint = Some(error);
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        gateway.metrics.feed_age_seconds.set(heard.elapsed().as_secs() as i64);
    }
}

fn version(endpoints: &Endpoints) -> Version {
    Version { source: endpoints.source.clone(), number: endpoints.number }
}

async fn ask(gateway: &Gateway, operator: &Uri) -> anyhow::Result<Endpoints> {
    let base = operator.to_string();
    let query = gateway
        .version()
        .map(|known| format!("?source={}&after={}&wait={WAIT_SECONDS_MAX}", known.source, known.number));
    let uri = format!("{}{ENDPOINTS_PATH}{}", base.trim_end_matches('/'), query.unwrap_or_default());
    let request = Request::get(uri).body(Bytes::new()).context("make a request")?;
    let answered = timeout(TIMEOUT, async {
        let response = gateway.send(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), DOCUMENT_BYTES_MAX).collect().await;
        anyhow::Ok((status, body.map_err(|error| anyhow::anyhow!("read the answer: {error}"))?.to_bytes()))
    });
    let (status, body) = answered.await.context("no answer in time")??;
    if !status.is_success() {
        bail!("answered {status}: {}", String::from_utf8_lossy(&body).chars().take(200).collect::<String>());
    }
    serde_json::from_slice(&body).context("read endpoints")
}
