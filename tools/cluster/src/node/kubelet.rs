//! What the API server asks of a kubelet, over TLS as it wants it: the output of a container, and a port of a pod. Serves nothing else
//! of a kubelet's API, and asks nobody who they are: it listens on loopback, as the pods do.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use rcgen::{CertifiedKey, generate_simple_self_signed};
use tokio::{
    io::{AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer},
};

use super::{context::NodeContext, logs, port_forward};
use crate::error::ClusterError;

const MAX_HEAD_BYTES: usize = 8192;
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Where a node is asked.
pub(crate) struct KubeletServer {
    listener: TcpListener,
    tls: TlsAcceptor,
}

impl KubeletServer {
    pub(crate) async fn bind(address: SocketAddr) -> Result<Self, ClusterError> {
        let listener =
            TcpListener::bind(address).await.map_err(ClusterError::process("listen for", "the API server"))?;
        let CertifiedKey { cert, signing_key } = generate_simple_self_signed(vec![address.ip().to_string()])?;
        let key = PrivateKeyDer::try_from(signing_key.serialize_der()).expect("rcgen writes a key that rustls reads");
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key))
            .expect("one key and its own certificate fit");
        Ok(Self { listener, tls: TlsAcceptor::from(Arc::new(config)) })
    }

    pub(crate) async fn serve(self, ctx: Arc<NodeContext>) {
        loop {
            let Ok((client, _)) = self.listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            let (tls, ctx) = (self.tls.clone(), Arc::clone(&ctx));
            tokio::spawn(async move {
                if let Err(error) = answer(&tls, client, &ctx).await {
                    tracing::debug!(%error, "who asked the node went away");
                }
            });
        }
    }
}

async fn answer(tls: &TlsAcceptor, client: TcpStream, ctx: &NodeContext) -> std::io::Result<()> {
    let mut stream = tls.accept(client).await?;
    let mut head = Vec::new();
    let read = async {
        while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD_BYTES {
            head.push(stream.read_u8().await?);
        }
        Ok::<_, std::io::Error>(())
    };
    timeout(HEAD_TIMEOUT, read).await??;
    let head = String::from_utf8_lossy(&head).into_owned();
    let target = head.split(' ').nth(1).unwrap_or_default();
    match target.split('/').nth(1) {
        Some("containerLogs") => logs::answer(&mut stream, ctx, target).await?,
        Some("portForward") => port_forward::answer(&mut stream, ctx, &head).await?,
        _ => respond(&mut stream, "400 Bad Request", b"the process node answers logs and port-forward only").await?,
    }
    stream.shutdown().await
}

pub(super) async fn respond(stream: &mut (impl AsyncWrite + Unpin), status: &str, body: &[u8]) -> std::io::Result<()> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await
}
