//! TLS on the address for all deployments: certificate and key as a Secret is mounted, read again when they change, for connections
//! that come from then on. What cannot be read leaves what was there.
//!
//! A handshake is part of its connection: one that is slow holds up nobody else.

use std::{
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, PoisonError, RwLock},
    task::{Context, Poll, ready},
};

use anyhow::{Context as _, ensure};
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::{
    Accept, TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        server::{ClientHello, ResolvesServerCert},
        sign::CertifiedKey,
    },
    server::TlsStream,
};

use crate::reread::reread;

/// Where certificate and key are.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The certificate with those that vouch for it, in PEM.
    pub certificate: PathBuf,
    /// Its private key, in PEM.
    pub key: PathBuf,
    /// Clients may choose HTTP/2.
    pub http2: bool,
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    current: Arc<Current>,
    files: TlsFiles,
}

/// What is shown to clients now.
#[derive(Debug)]
struct Current(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

impl Tls {
    /// With what the files say.
    pub fn read(files: TlsFiles) -> anyhow::Result<Self> {
        let current = Arc::new(Current(RwLock::new(Arc::new(certified(&files)?))));
        let provider = Arc::new(ring::default_provider());
        let versions = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let mut config =
            versions.context("choose versions of TLS")?.with_no_client_auth().with_cert_resolver(current.clone());
        let also = files.http2.then(|| b"h2".to_vec());
        config.alpn_protocols = also.into_iter().chain([b"http/1.1".to_vec()]).collect();
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)), current, files })
    }

    /// Follows the files for ever.
    pub async fn follow(self) {
        let learn = |read: Option<CertifiedKey>| {
            let Some(read) = read else { return };
            let mut current = self.current.0.write().unwrap_or_else(PoisonError::into_inner);
            if current.cert != read.cert {
                tracing::info!(path = %self.files.certificate.display(), "the certificate changed");
                *current = Arc::new(read);
            }
        };
        reread("the certificate", || certified(&self.files), learn).await;
    }

    /// The same listener, with TLS on its connections.
    pub fn over<L>(&self, listener: L) -> TlsListener<L> {
        TlsListener { listener, acceptor: self.acceptor.clone() }
    }
}

fn certified(files: &TlsFiles) -> anyhow::Result<CertifiedKey> {
    let named = |what: &str, path: &Path| format!("read {what}: {}", path.display());
    let certificates = CertificateDer::pem_file_iter(&files.certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| named("the certificate", &files.certificate))?;
    ensure!(!certificates.is_empty(), "{} has no certificate", files.certificate.display());
    let key = PrivateKeyDer::from_pem_file(&files.key).with_context(|| named("the key", &files.key))?;
    // Also refuses a key that is not the certificate's: in the middle of a change it may be that of before.
    CertifiedKey::from_der(certificates, key, &ring::default_provider())
        .with_context(|| format!("certificate {} and key {}", files.certificate.display(), files.key.display()))
}

/// See [`Tls::over`].
pub struct TlsListener<L> {
    listener: L,
    acceptor: TlsAcceptor,
}

impl<L: Listener> Listener for TlsListener<L> {
    type Io = TlsConnection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (io, address) = self.listener.accept().await;
        (TlsConnection::Shaking(Box::new(self.acceptor.accept(io))), address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection whose handshake goes on with its first read.
pub enum TlsConnection<Io> {
    /// Hands are being shaken.
    Shaking(Box<Accept<Io>>),
    /// They were.
    Open(Box<TlsStream<Io>>),
}

impl<Io: AsyncRead + AsyncWrite + Unpin> TlsConnection<Io> {
    fn poll_open(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Pin<&mut TlsStream<Io>>>> {
        if let Self::Shaking(shaking) = self {
            let open = ready!(Pin::new(shaking.as_mut()).poll(context))?;
            *self = Self::Open(Box::new(open));
        }
        match self {
            Self::Open(open) => Poll::Ready(Ok(Pin::new(open.as_mut()))),
            Self::Shaking(_) => Poll::Pending,
        }
    }
}

impl<Io: AsyncRead + AsyncWrite + Unpin> AsyncRead for TlsConnection<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_open(context))?.poll_read(context, buffer)
    }
}

impl<Io: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TlsConnection<Io> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(context))?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            // Nothing was written yet.
            Self::Shaking(_) => Poll::Ready(Ok(())),
            Self::Open(open) => Pin::new(open.as_mut()).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            // It goes with this value.
            Self::Shaking(_) => Poll::Ready(Ok(())),
            Self::Open(open) => Pin::new(open.as_mut()).poll_shutdown(context),
        }
    }
}
