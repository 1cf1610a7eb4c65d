//! Brings the keys of an issuer, from time to time and when a token names one that is not known. While it does not answer, the last keys stay.
//! Judges nothing.

use std::{path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, bail, ensure};
use reqwest::{Client, redirect::Policy};
use serde::Deserialize;
use tokio::time::sleep;

use super::{
    Issuer,
    jwks::Keys,
    spec::{IssuerSpec, Source, is_safe},
};
use crate::metrics::Metrics;

/// A key that was taken back is believed no longer than this.
const REFRESH: Duration = Duration::from_secs(300);
/// The same of a file.
const REREAD: Duration = Duration::from_secs(10);
/// While an issuer does not answer, it is asked after this, later each time up to the other.
const RETRY: Duration = Duration::from_secs(2);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// For one answer.
const TIMEOUT: Duration = Duration::from_secs(4);
/// Sets have a few kilobytes.
const DOCUMENT_BYTES_MAX: usize = 256 << 10;

/// What is read of a discovery document.
#[derive(Deserialize)]
struct Discovered {
    issuer: String,
    jwks_uri: String,
}

/// Follows for ever.
pub(super) async fn follow(issuer: Arc<Issuer>, folder: PathBuf, metrics: Arc<Metrics>) {
    let (mut retry, mut complaint) = (RETRY, None);
    let (name, source) = (issuer.spec.issuer.as_str(), issuer.spec.source(&folder));
    let often = if matches!(source, Source::File(_)) { REREAD } else { REFRESH };
    loop {
        let read = read(&issuer.spec, &source, &folder).await;
        metrics.issuer_stale.with_label_values(&[name]).set(i64::from(read.is_err()));
        let error = read.as_ref().err().map(|error| format!("{error:#}"));
        if let Some(error) = error.as_ref().filter(|error| complaint.as_ref() != Some(*error)) {
            tracing::error!(issuer = name, error, "no keys of an issuer, going on with the last");
        }
        let next = if read.is_ok() { often } else { retry };
        retry = if read.is_ok() { RETRY } else { (retry * 2).min(RETRY_MAX) };
        complaint = error;
        issuer.learn(read.ok());
        tokio::select! {
            () = sleep(next) => {}
            () = issuer.wanted.notified() => {}
        }
    }
}

async fn read(spec: &IssuerSpec, source: &Source, folder: &std::path::Path) -> anyhow::Result<Keys> {
    let document = match source {
        Source::File(path) => std::fs::read(path).with_context(|| format!("read {}", path.display()))?,
        Source::Url(url) => get(&client(spec, folder)?, url).await?,
        Source::Discovery(url) => {
            let client = client(spec, folder)?;
            let found: Discovered =
                serde_json::from_slice(&get(&client, url).await?).with_context(|| format!("read {url}"))?;
            ensure!(found.issuer == spec.issuer, "{url} is of the issuer {}, to the letter", found.issuer);
            ensure!(is_safe(&found.jwks_uri), "{url} names keys at {}: it has to be https://", found.jwks_uri);
            get(&client, &found.jwks_uri).await?
        }
    };
    Keys::parse(&document).context("read keys")
}

/// Made for each question: there are few, and who vouches for an issuer may change.
fn client(spec: &IssuerSpec, folder: &std::path::Path) -> anyhow::Result<Client> {
    // An error means that somebody in this process chose a provider before.
    let _chosen_before = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let builder = Client::builder().timeout(TIMEOUT).redirect(Policy::none());
    let Some(path) = spec.certificate_authority.as_ref().map(|path| folder.join(path)) else {
        return builder.build().context("make a client");
    };
    let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let vouching = reqwest::Certificate::from_pem_bundle(&text).with_context(|| format!("read {}", path.display()))?;
    ensure!(!vouching.is_empty(), "{} has no certificate", path.display());
    builder.tls_certs_only(vouching).build().context("make a client")
}

async fn get(client: &Client, url: &str) -> anyhow::Result<Vec<u8>> {
    let mut answer = client.get(url).send().await.with_context(|| format!("ask {url}"))?;
    if !answer.status().is_success() {
        bail!("{url} answered {}", answer.status());
    }
    let mut document = Vec::new();
    while let Some(chunk) = answer.chunk().await.with_context(|| format!("read {url}"))? {
        ensure!(document.len() + chunk.len() <= DOCUMENT_BYTES_MAX, "{url} is longer than {DOCUMENT_BYTES_MAX} bytes");
        document.extend_from_slice(&chunk);
    }
    Ok(document)
}
