//! TLS on the gateway's address: a certificate that is changed without a restart, files that are broken, handshakes that nobody ends.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use reqwest::{Certificate, Client};
use stoker_tests::gateway::{GatewayProcess, Teller};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(60);

/// Writes a new certificate of `localhost` with its key.
fn renew(folder: &Path) -> Result<Certificate> {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(vec!["localhost".to_owned()])?;
    std::fs::write(folder.join("tls.key"), signing_key.serialize_pem())?;
    std::fs::write(folder.join("tls.crt"), cert.pem())?;
    Ok(Certificate::from_pem(cert.pem().as_bytes())?)
}

/// Asks as somebody who trusts this certificate alone and was never here: a client that was may go on without looking at it again.
async fn get(url: &str, trusted: &Certificate) -> Result<u16> {
    let client = Client::builder().tls_certs_only([trusted.clone()]).build()?;
    Ok(client.get(url).send().await?.status().as_u16())
}

fn arguments(folder: &Path) -> Vec<String> {
    let path = |name: &str| -> PathBuf { folder.join(name) };
    let (certificate, key) = (path("tls.crt"), path("tls.key"));
    ["--tls-certificate", &certificate.to_string_lossy(), "--tls-key", &key.to_string_lossy()].map(str::to_owned).into()
}

#[tokio::test]
async fn a_certificate_is_changed_without_a_restart_and_a_broken_one_changes_nothing() -> Result<()> {
    stoker_tests::process::choose_crypto();
    let folder = tempfile::tempdir()?;
    let first = renew(folder.path())?;
    let teller = Teller::start().await?;
    let arguments = arguments(folder.path());
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let gateway = GatewayProcess::start(teller.url(), &arguments)?;
    let url = format!("https://localhost:{}/healthz", gateway.address()?.port());
    assert_eq!(get(&url, &first).await?, 200);
    assert!(reqwest::get(gateway.url("/healthz")).await.is_err(), "without TLS nothing is said");

    let _silent = TcpStream::connect(gateway.address()?).await?;
    assert_eq!(get(&url, &first).await?, 200, "who does not shake hands holds up nobody");

    let second = renew(folder.path())?;
    let deadline = Instant::now() + PATIENCE;
    while get(&url, &second).await.is_err() {
        ensure!(Instant::now() < deadline, "it still shows the certificate of before\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(get(&url, &first).await.is_err(), "that is over");

    let key = std::fs::read(folder.path().join("tls.key"))?;
    renew(folder.path())?;
    std::fs::write(folder.path().join("tls.key"), key)?;
    while !gateway.log().contains("the certificate stays as it was") {
        ensure!(Instant::now() < deadline, "a key of another certificate is taken\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(get(&url, &second).await?, 200);
    let log = gateway.log();
    drop(gateway);
    assert!(!log.contains("PRIVATE KEY"), "{log}");
    assert!(
        GatewayProcess::start(teller.url(), &arguments).is_err(),
        "with a key that is not its own it does not begin"
    );
    Ok(())
}
