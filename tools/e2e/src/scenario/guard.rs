//! Replicas behind NetworkPolicies, and without them: who reaches what, whether operator and gateways still do their work,
//! and what an order that the operator did not sign does where nothing but its signature is looked at.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{
    LIMIT,
    pod::Pod,
    ways::{self, Asker, Port},
};
use crate::{
    kubectl::Kubectl,
    wait::{Look, until},
};

/// The namespace that the chart's values let in, as one lets in Prometheus.
pub(crate) const NAMED: &str = "monitoring";
/// Well-formed, and of nobody.
const FORGED: &str = concat!(
    "stoker-signature: ",
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
);

/// Pods that are neither operator nor gateway nor replica.
pub(crate) struct Guard<'a> {
    kubectl: &'a Kubectl,
    /// In the namespace of the replicas.
    client: Pod<'a>,
    /// In that of operator and gateways.
    stranger: Pod<'a>,
    /// In the one that policies name.
    scraper: Pod<'a>,
}

impl<'a> Guard<'a> {
    /// Starts the pods that are not there yet.
    pub(crate) fn start(kubectl: &'a Kubectl, client: Pod<'a>) -> Result<Self> {
        let stranger = Pod::start(kubectl, "stoker-system", "stranger")?;
        Ok(Self { kubectl, client, stranger, scraper: Pod::start(kubectl, NAMED, "scraper")? })
    }

    /// Waits until everybody reaches what the policies say and no more. What is named is reached: nothing passes here because
    /// the network is broken.
    pub(crate) fn wait_shut(&self) -> Result<()> {
        use Port::{GatewayAdmin, GatewayClients, Operator, ReplicaInference};
        self.wait_for([
            (self.client, &[GatewayClients]),
            (self.stranger, &[GatewayClients]),
            (self.scraper, &[ReplicaInference, GatewayClients, GatewayAdmin, Operator]),
        ])
    }

    /// Waits until everybody reaches everything. What was shut is listened on: no refusal was for want of a listener.
    pub(crate) fn wait_open(&self) -> Result<()> {
        self.wait_for([self.client, self.stranger, self.scraper].map(|pod| (pod, &Port::ALL[..])))
    }

    /// Waits until the operator has fresh readings of so many replicas and hears from gateways, and each gateway of replicas and
    /// of the other gateway.
    pub(crate) fn wait_read(&self, n_replicas: usize) -> Result<()> {
        until(LIMIT, "operator and gateways to hear what they need", || {
            let deaf = [self.deaf_operator(n_replicas)?, self.deaf_gateways(n_replicas)?].concat();
            Ok(if deaf.is_empty() { Look::Done(()) } else { Look::NotYet(deaf.join("; ")) })
        })
    }

    /// Checks that replicas that left did so because they obeyed, and returns how many.
    pub(crate) fn drained(&self) -> Result<u64> {
        let [url] = &Port::Operator.urls(self.kubectl)?[..] else { bail!("more than one operator") };
        let metrics = self.scraper.curl(&[url])?;
        let deleted = |why: &str| metric(&metrics, &format!("stoker_operator_pods_deleted_total{{why=\"{why}\"}}"));
        for why in ["agent unreachable", "agent refuses the order", "drain deadline passed"] {
            ensure!(deleted(why).unwrap_or(0.0) == 0.0, "replicas were deleted, {why}: {metrics}");
        }
        Ok(deleted("drained").context("no replica was drained")? as u64)
    }

    /// Tells the one replica to leave, from a pod that reaches its admin port: without a signature, and with one that is not the
    /// operator's. Neither changes anything there. Returns how both were answered.
    pub(crate) fn forge_orders(&self) -> Result<String> {
        let before = self.replica()?;
        let order = json!({
            "podUid": before.uid, "startId": before.report["startId"], "number": 1_u64 << 40, "expiresUpMs": 1_u64 << 50,
            "want": {"drain": {"deadlineSeconds": 0, "withdrawSeconds": 0}},
        });
        let unsigned = self.put(&before.ip, &order, &[])?;
        let forged = self.put(&before.ip, &order, &["--header", FORGED])?;
        ensure!(unsigned == "401 signature_missing", "an order that is not signed is answered {unsigned}");
        ensure!(forged == "403 signature_wrong", "an order that somebody else signed is answered {forged}");
        let after = self.replica()?;
        for field in ["startId", "phase", "intent"] {
            let (was, is) = (&before.report[field], &after.report[field]);
            ensure!(was == is && before.uid == after.uid, "{field} was {was} and is {is}: {}", after.report);
        }
        ensure!(after.report["phase"] == "ready", "it does not serve: {}", after.report);
        Ok(format!("{unsigned}, {forged}"))
    }

    fn wait_for<'p>(&self, reaches: [(Pod<'a>, &'p [Port]); 3]) -> Result<()> {
        ways::wait_for(self.kubectl, &reaches.map(|(pod, reaches)| Asker { pod, reaches }))
    }

    fn deaf_operator(&self, n_replicas: usize) -> Result<Vec<String>> {
        let [url] = &Port::Operator.urls(self.kubectl)?[..] else {
            return Ok(vec!["more than one operator".to_owned()]);
        };
        let fleet: Value = serde_json::from_str(&self.scraper.curl(&[&url.replace("/metrics", "/v1/fleet")])?)?;
        let chat = &fleet["deployments"][0];
        let read =
            chat["replicas"].as_array().into_iter().flatten().filter(|replica| !replica["load"].is_null()).count();
        let hears = read == n_replicas && chat["inLine"].is_u64();
        Ok((!hears).then(|| format!("the operator has {read} readings: {chat}")).into_iter().collect())
    }

    fn deaf_gateways(&self, n_replicas: usize) -> Result<Vec<String>> {
        let urls = Port::GatewayAdmin.urls(self.kubectl)?;
        let wanted = [("replicas_heard{deployment=\"chat.default\"}", n_replicas), ("peers", urls.len() - 1)];
        let mut deaf = Vec::new();
        for url in &urls {
            let metrics = self.scraper.curl(&[url])?;
            let has = |name: &str| metric(&metrics, &format!("stoker_gateway_{name}"));
            let wrong = wanted.iter().filter(|(name, n)| has(name) != Some(*n as f64));
            deaf.extend(wrong.map(|(name, n)| format!("{url} has {name} {:?}, not {n}", has(name))));
        }
        Ok(deaf)
    }

    fn replica(&self) -> Result<Replica> {
        let pods = self.kubectl.json(&["get", "pods", "-l", "app.kubernetes.io/instance=chat"])?;
        let [pod] = &pods["items"].as_array().context("a list of pods")?[..] else { bail!("not one replica: {pods}") };
        let word = |value: &Value| value.as_str().map(str::to_owned).context("a pod that runs");
        let (uid, ip) = (word(&pod["metadata"]["uid"])?, word(&pod["status"]["podIP"])?);
        let report = serde_json::from_str(&self.client.curl(&[&format!("http://{ip}:8001/v1/load")])?)?;
        Ok(Replica { uid, ip, report })
    }

    /// The status and the code of the answer to an order.
    fn put(&self, ip: &str, order: &Value, signature: &[&str]) -> Result<String> {
        let (body, url) = (order.to_string(), format!("http://{ip}:8001/v1/intent"));
        let put = ["--request", "PUT", "--write-out", "\n%{http_code}", "--data", &body, &url];
        let answer = self.client.curl(&[signature, &put].concat())?;
        let (said, status) = answer.rsplit_once('\n').context("an answer and its status")?;
        let said: Value = serde_json::from_str(said).with_context(|| format!("{status}: {said}"))?;
        Ok(format!("{status} {}", said["error"]["code"].as_str().unwrap_or_default()))
    }
}

/// A replica and what it says.
struct Replica {
    uid: String,
    ip: String,
    report: Value,
}

/// The value of a series in Prometheus' text form.
fn metric(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_is_found_by_its_whole_name() {
        let text = "# TYPE a counter\na_total 7\na{why=\"drained\"} 2\na 1\n";
        assert_eq!(metric(text, "a"), Some(1.0));
        assert_eq!(metric(text, "a{why=\"drained\"}"), Some(2.0));
        assert_eq!(metric(text, "a_to"), None);
    }
}
