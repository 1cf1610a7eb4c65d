//! One request over a stream of bytes: to a URL, or through a port that the API server forwards. Understands nothing of what is said.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, StatusCode, Uri, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

/// Records of one deployment are a few hundred, about 2 KB each: the longest answer there is.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// A connection to a URL without a path, and what its Host is.
pub(crate) async fn connect(url: &str) -> Result<(TcpStream, String)> {
    let uri: Uri = url.parse().with_context(|| format!("{url:?} is no URL such as http://localhost:8080"))?;
    let (Some("http"), Some(host)) = (uri.scheme_str(), uri.host()) else {
        bail!("{url:?} is no URL such as http://localhost:8080");
    };
    let address = format!("{host}:{}", uri.port_u16().unwrap_or(80));
    let stream = TcpStream::connect(&address).await.context("connect")?;
    Ok((stream, address))
}

/// Sends a request, and reads the whole answer.
pub(crate) async fn ask(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, String)> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.context("begin HTTP")?;
    // Ends with the sender; what breaks it breaks the request too, which says so.
    let connection = tokio::spawn(connection);
    let response = sender.send_request(request).await.context("send the request")?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    connection.abort();
    let body = body.map_err(|error| anyhow::anyhow!("read the answer: {error}"))?.to_bytes();
    let text = String::from_utf8(body.to_vec()).context("read the answer: it is no text")?;
    Ok((status, text))
}
