//! `kubectl stoker route`: where a request would go now, and why not elsewhere, as a gateway says of a dry run. Sends nothing to a replica.

use std::{io::Read, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use clap::Args;
use http_body_util::Full;
use hyper::{Request, StatusCode, header};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};
use stoker_crds::route::{DRY_RUN, ForeseenReplica, ForeseenRoute, ROUTE_HEADER};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};

use crate::{
    cluster::{Cluster, ClusterArgs},
    http,
    operator::port,
    output::Output,
    table::table,
};

/// Pods of gateways, as the chart labels them.
const GATEWAYS: &str = "app.kubernetes.io/name=stoker-gateway";
/// Port of a gateway whose pod names none.
const PORT: u16 = 8000;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Where a request would go.
#[derive(Debug, Args)]
pub(crate) struct Route {
    /// The InferenceDeployment.
    name: String,
    /// The message of a chat that would be sent.
    #[arg(long, value_name = "TEXT", default_value = "Hello!")]
    prompt: String,
    /// A whole request as JSON, of chat or completions, from this file (- for standard input): for tools, long conversations, cache keys.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    request: Option<PathBuf>,
    /// URL of a gateway, such as http://localhost:8000. Default: a forwarded port of one of its pods.
    #[arg(long = "gateway", env = "STOKER_GATEWAY_URL", value_name = "URL")]
    url: Option<String>,
    /// Namespace of the gateway's pods.
    #[arg(long, default_value = "stoker-system", value_name = "NAMESPACE")]
    gateway_namespace: String,
    /// Key or token of a tenant, where the gateway asks for one. It is one request of its limits.
    #[arg(long, env = "STOKER_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Option<String>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Asks a gateway, and prints what it says.
pub(crate) async fn route(args: &Route) -> Result<()> {
    let cluster = Cluster::find(&args.cluster).await?;
    let (path, body) = asked(args)?;
    let said = timeout(ANSWER_TIMEOUT, said(args, &cluster, path, body));
    let said = said.await.with_context(|| format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()))??;
    let foreseen: ForeseenRoute =
        serde_json::from_str(&said).context("read what the gateway says: it may be of another version")?;
    args.output.print(&screen(&foreseen), || json!(foreseen));
    Ok(())
}

/// The path and the body of what would be sent.
fn asked(args: &Route) -> Result<(&'static str, String)> {
    let Some(file) = &args.request else {
        let body = json!({"model": args.name, "messages": [{"role": "user", "content": args.prompt}]});
        return Ok((CHAT, body.to_string()));
    };
    let text = match file.as_os_str() == "-" {
        true => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map(|_| text)
        }
        false => std::fs::read_to_string(file),
    };
    let text = text.with_context(|| format!("read {}", file.display()))?;
    let body: Value = serde_json::from_str(&text).with_context(|| format!("{} is no JSON", file.display()))?;
    match (body.get("messages"), body.get("prompt")) {
        (Some(_), _) => Ok((CHAT, text)),
        (None, Some(_)) => Ok((COMPLETIONS, text)),
        (None, None) => bail!("{} has neither `messages`, as chats have, nor `prompt`", file.display()),
    }
}

async fn said(args: &Route, cluster: &Cluster, path: &str, body: String) -> Result<String> {
    if let Some(url) = &args.url {
        let (stream, _) = http::connect(url).await.with_context(|| format!("reach the gateway at {url}"))?;
        return ask(args, cluster, stream, path, body).await.with_context(|| format!("ask the gateway at {url}"));
    }
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &args.gateway_namespace);
    let (name, port) = gateway(&pods, &args.gateway_namespace).await?;
    let mut forwarder =
        pods.portforward(&name, &[port]).await.with_context(|| format!("forward port {port} of {name}"))?;
    let stream = forwarder.take_stream(port).context("the forwarded port has a stream")?;
    let said = ask(args, cluster, stream, path, body).await;
    forwarder.abort();
    said.with_context(|| {
        format!("ask the gateway's pod {name}; one that speaks TLS is asked by `curl -H '{ROUTE_HEADER}: {DRY_RUN}'`")
    })
}

/// A pod that is ready, and its port.
async fn gateway(pods: &Api<Pod>, namespace: &str) -> Result<(String, u16)> {
    let found = pods.list(&ListParams::default().labels(GATEWAYS)).await;
    let found = found.with_context(|| format!("list the gateway's pods in {namespace}"))?;
    let is_ready = |pod: &&Pod| {
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
    };
    let pod = found.items.iter().find(is_ready).with_context(|| {
        format!(
            "no gateway is ready in {namespace}: name its namespace with --gateway-namespace, or its URL with --gateway"
        )
    })?;
    Ok((pod.name_any(), port(pod, "http").unwrap_or(PORT)))
}

/// The deployment is named by the Host, as by its own Service: whatever model the request names.
async fn ask(
    args: &Route,
    cluster: &Cluster,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    path: &str,
    body: String,
) -> Result<String> {
    let mut request = Request::post(path)
        .header(header::HOST, format!("{}.{}.svc", args.name, cluster.namespace))
        .header(header::CONTENT_TYPE, "application/json")
        .header(ROUTE_HEADER, DRY_RUN);
    if let Some(key) = &args.api_key {
        request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
    }
    let request = request.body(Full::from(body)).context("make a request")?;
    let (status, text) = http::ask(stream, request).await?;
    if status == StatusCode::OK {
        return Ok(text);
    }
    let message = serde_json::from_str::<Value>(&text).ok();
    let message = message.as_ref().and_then(|error| error["error"]["message"].as_str());
    bail!("{status}: {}", message.unwrap_or_else(|| text.trim()))
}

const HEAD: [&str; 9] = ["POD", "WOULD GO", "CACHED", "TO PREFILL", "WAITING", "REQUESTS", "KV", "WEIGHT", "COST"];

fn screen(foreseen: &ForeseenRoute) -> String {
    let ForeseenRoute { deployment, prompt_tokens, replica, reason, replicas } = foreseen;
    let goes = match replica {
        Some(pod) => format!("to {pod}, {}", because(reason.as_deref().unwrap_or_default())),
        None => "nowhere: no replica takes requests".to_owned(),
    };
    let head = format!("a request for {deployment} of about {prompt_tokens} prompt tokens would go {goes}\n");
    if replicas.is_empty() {
        return head;
    }
    let mut rows: Vec<&ForeseenReplica> = replicas.iter().collect();
    let rank = |replica: &ForeseenReplica| replica.seen.as_ref().map_or(f64::INFINITY, |seen| seen.cost);
    rows.sort_by(|one, other| (!one.chosen).cmp(&!other.chosen).then(rank(one).total_cmp(&rank(other))));
    format!("{head}\n{}", table(HEAD, 2, &rows.into_iter().map(row).collect::<Vec<_>>()))
}

fn row(replica: &ForeseenReplica) -> [String; 9] {
    let ForeseenReplica { pod, state, chosen, seen } = replica;
    let Some(seen) = seen else {
        let state = format!("no: {state}");
        return std::array::from_fn(|column| {
            [pod, &state].get(column).map_or_else(|| "-".to_owned(), |cell| (*cell).clone())
        });
    };
    let guess = if seen.prefix == "predicted" { "~" } else { "" };
    let age = if seen.load_is_fresh { "" } else { "?" };
    [
        pod.clone(),
        if *chosen { "yes".to_owned() } else { format!("no: {}", why_not(&seen.standing)) },
        format!("{guess}{}", seen.cached_tokens),
        seen.uncached_tokens.to_string(),
        format!("{}{age}", seen.waiting_tokens),
        seen.requests.to_string(),
        format!("{:.0} %{age}", seen.kv_share * 100.0),
        seen.weight.to_string(),
        format!("{:.0}", seen.cost),
    ]
}

fn because(reason: &str) -> &str {
    match reason {
        "prefix" => "which holds a part of its prompt",
        "load" => "which has the least to do",
        "key" => "which is its own among equals, by its cache key or prompt",
        "two_choices" => "the better of two: nobody has told its load lately",
        "trial" => "the canary, for which it is drawn",
        "only" => "the only one",
        other => other,
    }
}

fn why_not(standing: &str) -> &str {
    match standing {
        "fits" => "costs more",
        "over_share" => "has more than its share of requests",
        "silent" => "does not answer, others do",
        "weightless" => "its weight is 0",
        "not_drawn" => "canary and others are drawn apart",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What docs/gateway.md shows.
    fn foreseen() -> ForeseenRoute {
        serde_json::from_value(json!({
            "deployment": "chat.default", "promptTokens": 10, "replica": "chat-5f0c-1", "reason": "load", "replicas": [
              {"pod": "chat-5f0c-0", "state": "serving", "chosen": false, "standing": "over_share", "prefix": "predicted", "cachedTokens": 8,
               "uncachedTokens": 2, "waitingTokens": 0, "requests": 15, "kvShare": 0.6, "loadIsFresh": true, "weight": 100, "cost": 12772.0},
              {"pod": "chat-5f0c-1", "state": "serving", "chosen": true, "standing": "fits", "prefix": "none", "cachedTokens": 0,
               "uncachedTokens": 10, "waitingTokens": 0, "requests": 1, "kvShare": 0.04, "loadIsFresh": false, "weight": 100, "cost": 865.0},
              {"pod": "chat-5f0c-2", "state": "starting", "chosen": false}]
        }))
        .unwrap()
    }

    #[test]
    fn who_is_chosen_is_first_and_others_say_why_not() {
        let text = screen(&foreseen());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "a request for chat.default of about 10 prompt tokens would go to chat-5f0c-1, which has the least to do"
        );
        let cells = |line: &str| {
            line.split("  ").filter(|cell| !cell.is_empty()).map(str::trim).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(cells(lines[3]), ["chat-5f0c-1", "yes", "0", "10", "0?", "1", "4 %?", "100", "865"]);
        assert_eq!(
            cells(lines[4]),
            ["chat-5f0c-0", "no: has more than its share of requests", "~8", "2", "0", "15", "60 %", "100", "12772"]
        );
        assert_eq!(cells(lines[5])[..3], ["chat-5f0c-2", "no: starting", "-"]);
    }

    #[test]
    fn where_nobody_serves_it_is_said() {
        let nobody = ForeseenRoute { replica: None, reason: None, replicas: vec![], ..foreseen() };
        assert!(screen(&nobody).ends_with("would go nowhere: no replica takes requests\n"));
    }
}
