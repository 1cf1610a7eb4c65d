//! A port of a pod, over a WebSocket that the API server passes through. Messages begin with their channel: 0 is data, 1 says what went
//! wrong. The first message of each is the port. One port a connection; SPDY, which `kubectl port-forward` speaks, is not understood.

use std::io;

use futures::{SinkExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Bytes, Message, handshake::derive_accept_key, protocol::Role},
};

use super::{context::NodeContext, kubelet::respond};

const PROTOCOL: &str = "v4.channel.k8s.io";
const DATA: u8 = 0;
const ERROR: u8 = 1;

/// What is asked for.
#[derive(Debug, Eq, PartialEq)]
struct Question {
    namespace: String,
    pod: String,
    port: u16,
    /// Of the WebSocket.
    key: String,
}

/// Answers `/portForward/NAMESPACE/POD?port=PORT`, whose head this is, until one side leaves.
pub(super) async fn answer(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ctx: &NodeContext,
    head: &str,
) -> io::Result<()> {
    let question = match Question::parse(head) {
        Ok(question) => question,
        Err(problem) => return respond(stream, "400 Bad Request", problem.as_bytes()).await,
    };
    let accept = derive_accept_key(question.key.as_bytes());
    let head = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: {PROTOCOL}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await?;
    let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
    for channel in [DATA, ERROR] {
        send(&mut socket, channel, &question.port.to_le_bytes()).await?;
    }
    match connect(ctx, &question).await {
        Ok(pod) => forward(&mut socket, pod).await?,
        Err(problem) => send(&mut socket, ERROR, problem.as_bytes()).await?,
    }
    socket.close(None).await.map_err(io::Error::other)
}

async fn connect(ctx: &NodeContext, Question { namespace, pod, port, .. }: &Question) -> Result<TcpStream, String> {
    let found =
        Api::<Pod>::namespaced(ctx.client.clone(), namespace).get(pod).await.map_err(|error| error.to_string())?;
    let ip = found.status.and_then(|status| status.pod_ip).ok_or_else(|| format!("pod {pod} has no address yet"))?;
    TcpStream::connect(format!("{ip}:{port}"))
        .await
        .map_err(|error| format!("connect to port {port} of {pod}: {error}"))
}

async fn forward<S>(socket: &mut WebSocketStream<S>, mut pod: TcpStream) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut said = vec![0; 16 * 1024];
    loop {
        tokio::select! {
            count = pod.read(&mut said) => match count? {
                0 => return Ok(()),
                count => send(socket, DATA, &said[..count]).await?,
            },
            message = socket.next() => match message.transpose().map_err(io::Error::other)? {
                Some(Message::Binary(bytes)) if bytes.first() == Some(&DATA) => pod.write_all(&bytes[1..]).await?,
                Some(Message::Close(_)) | None => return Ok(()),
                Some(_) => {}
            },
        }
    }
}

async fn send<S>(socket: &mut WebSocketStream<S>, channel: u8, bytes: &[u8]) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let message = [&[channel], bytes].concat();
    socket.send(Message::Binary(Bytes::from(message))).await.map_err(io::Error::other)
}

impl Question {
    fn parse(head: &str) -> Result<Self, String> {
        let target = head.split(' ').nth(1).unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let ["", "portForward", namespace, pod] = path.split('/').collect::<Vec<_>>()[..] else {
            return Err(format!("{path} names no pod"));
        };
        let ports: Vec<&str> = query.split('&').filter_map(|pair| pair.strip_prefix("port=")).collect();
        let [port] = ports[..] else { return Err(format!("{} ports are asked for, not one", ports.len())) };
        let header = |wanted: &str| {
            let mut headers = head.lines().filter_map(|line| line.split_once(':'));
            headers.find(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value.trim())
        };
        if !header("sec-websocket-protocol").is_some_and(|offered| offered.split(", ").any(|one| one == PROTOCOL)) {
            return Err(format!("the process node forwards ports over WebSockets, as {PROTOCOL}"));
        }
        Ok(Self {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            port: port.parse().map_err(|error| format!("port {port}: {error}"))?,
            key: header("sec-websocket-key").ok_or("no Sec-WebSocket-Key")?.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(target: &str, protocol: &str) -> Result<Question, String> {
        Question::parse(&format!(
            "GET {target} HTTP/1.1\r\nSec-WebSocket-Key: k==\r\nsec-websocket-protocol: {protocol}\r\n\r\n"
        ))
    }

    #[test]
    fn one_port_of_one_pod_is_asked_for_over_a_websocket() {
        let question = parse("/portForward/n/p?port=8081", "v5.channel.k8s.io, v4.channel.k8s.io").unwrap();
        assert_eq!((question.pod.as_str(), question.port, question.key.as_str()), ("p", 8081, "k=="));
        for (target, protocol) in [
            ("/portForward/n/p?port=8081", "SPDY/3.1+portforward.k8s.io"),
            ("/portForward/n/p", PROTOCOL),
            ("/portForward/n/p?port=1&port=2", PROTOCOL),
            ("/portForward/n/p?port=70000", PROTOCOL),
            ("/portForward/n?port=1", PROTOCOL),
        ] {
            assert!(parse(target, protocol).is_err(), "{target} {protocol}");
        }
    }
}
