//! `kubectl stoker dashboard`: the operator's pages, through the API server with the caller's own rights. Each connection of the browser
//! is a forwarded port of the pod that leads at that moment. Listens on loopback only.

use std::{
    net::Ipv4Addr,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use kube::{ResourceExt, api::Portforwarder};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};

use crate::{
    cluster::{Cluster, ClusterArgs},
    operator::{LeasePlace, leading_pod, port},
};

/// Arguments of `dashboard`.
#[derive(Debug, Args)]
pub(crate) struct Dashboard {
    /// Port on this machine. Default: a free one.
    #[arg(long, default_value_t = 0, value_name = "PORT")]
    port: u16,
    /// Print the address and open no browser.
    #[arg(long)]
    no_open: bool,
    /// URL of the pages, where the operator is no pod or its port is reached already. Default: a forwarded port of the leading pod.
    #[arg(long, env = "STOKER_PAGES_URL", value_name = "URL")]
    pages: Option<String>,
    #[command(flatten)]
    place: LeasePlace,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Serves until it is stopped; with a URL there is nothing to serve.
pub(crate) async fn dashboard(args: &Dashboard) -> Result<()> {
    if let Some(url) = args.pages.as_deref().filter(|url| !url.is_empty()) {
        return show(url, args.no_open);
    }
    let cluster = Cluster::find(&args.cluster).await?;
    // Tried once before, so that what is missing is said here and not by the browser.
    Forwarded::open(&args.place, &cluster).await?.forwarder.abort();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).await;
    let listener = listener.with_context(|| format!("listen on port {} of this machine", args.port))?;
    show(&format!("http://{}/", listener.local_addr()?), args.no_open)?;
    loop {
        let (stream, _) = listener.accept().await.context("take a connection")?;
        let (cluster, place) = (cluster.clone(), args.place.clone());
        tokio::spawn(async move {
            if let Err(error) = forward(&place, &cluster, stream).await {
                eprintln!("{error:#}");
            }
        });
    }
}

/// A port of the pod that leads.
struct Forwarded {
    port: u16,
    forwarder: Portforwarder,
}

impl Forwarded {
    async fn open(place: &LeasePlace, cluster: &Cluster) -> Result<Self> {
        let (pods, pod) = leading_pod(place, cluster, "--pages").await?;
        let port =
            port(&pod, "pages").context("the operator that leads serves no pages: set the chart's pages.enabled")?;
        let name = pod.name_any();
        let forwarder =
            pods.portforward(&name, &[port]).await.with_context(|| format!("forward port {port} of {name}"))?;
        Ok(Self { port, forwarder })
    }
}

/// One connection, to whoever leads now.
async fn forward(place: &LeasePlace, cluster: &Cluster, mut stream: TcpStream) -> Result<()> {
    let Forwarded { port, mut forwarder } = Forwarded::open(place, cluster).await?;
    let mut forwarded = forwarder.take_stream(port).context("the forwarded port has a stream")?;
    // A browser that leaves is no error, and an operator that goes is asked for anew by the page.
    let _ = copy_bidirectional(&mut stream, &mut forwarded).await;
    forwarder.abort();
    Ok(())
}

/// Prints the address, and opens it where something can.
fn show(url: &str, no_open: bool) -> Result<()> {
    if !url.starts_with("http://") && !url.starts_with("https://") {
        bail!("{url:?} is no URL such as http://localhost:8081");
    }
    println!("{url}");
    if no_open {
        return Ok(());
    }
    let opener = if cfg!(target_os = "macos") { "open" } else { "xdg-open" };
    let opened = Command::new(opener).arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    if opened.is_err() {
        eprintln!("open it in a browser; Ctrl-C ends it");
    }
    Ok(())
}
