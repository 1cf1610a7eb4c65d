//! GPUs that fail under load, and what becomes of who is being answered.

use std::{
    fs,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{
    CHAT, Pod, Walk,
    load::{Load, failed, load_words, seconds_of_one, streamed},
    output, title,
};

/// Askers beside each other while a GPU fails, each with a question of its own so that both replicas are asked, and how long they ask.
const N_ASKERS: usize = 16;
const ASKED_FOR: Duration = Duration::from_secs(12);

impl Walk<'_> {
    /// One replica, so that nobody else answers while its GPU fails.
    pub(super) fn stay_alone(&self) -> anyhow::Result<()> {
        self.change_and_wait(r#"{"scaling":{"max":1}}"#, 1)
    }

    /// A GPU of a replica fails under load; the replica must serve again by itself, and a gateway must lose nothing meanwhile.
    pub(super) fn fault(&self, name: &str, gpu: u32) -> anyhow::Result<()> {
        title(&format!("GPU {gpu} of {name} fails under load"));
        let url = self.kubectl.service_url(name)?;
        let load = Load::start(&self.args.load, &load_words(&url, "30s:2"))?;
        sleep(Duration::from_secs(4));
        let pod = self.pods_of(name)?.pop().context("there is a pod")?;
        self.order_to_fail(&pod, gpu)?;
        let begun = Instant::now();
        let mut said = String::new();
        self.wait("the end of the process", || {
            self.note_ready(name, begun, &mut said)?;
            Ok(self.restarts(&pod)? > pod.restarts)
        })?;
        println!("{:>5.1} s  the process ended; its container starts again", begun.elapsed().as_secs_f64());
        self.wait("an answer after the fault", || {
            self.note_ready(name, begun, &mut said)?;
            Ok(seconds_of_one(&url).is_ok())
        })?;
        println!("{:>5.1} s  it answers", begun.elapsed().as_secs_f64());
        let summary = load.summary()?;
        let (answered, planned, failures) = (&summary["answered"], &summary["planned"], &summary["failures"]);
        println!("{answered} of {planned} answers whole, {} cut or refused: {failures}", failed(&summary));
        ensure!(self.state.gateway.is_none() || failed(&summary) == 0, "the gateway lost answers");
        Ok(())
    }

    /// Changes the spec, and waits until it is served by so many ready pods of its own and no others.
    fn change_and_wait(&self, spec: &str, n_pods: usize) -> anyhow::Result<()> {
        self.kubectl.run(&["patch", "infd", CHAT, "--type=merge", "-p", &format!("{{\"spec\":{spec}}}")])?;
        self.wait("the replicas that were asked for", || {
            let deployment = self.kubectl.get("inferencedeployment", CHAT)?;
            let is_seen = deployment["status"]["observedGeneration"] == deployment["metadata"]["generation"];
            let revision = deployment["status"]["revision"].as_str().unwrap_or_default().to_owned();
            let pods = self.pods_of(CHAT)?;
            let is_of_it = |pod: &Pod| pod.ready && pod.name.contains(&revision);
            Ok(is_seen && pods.len() == n_pods && pods.iter().all(is_of_it))
        })
    }

    fn order_to_fail(&self, pod: &Pod, gpu: u32) -> anyhow::Result<()> {
        fs::write(self.faults.join(&pod.name), gpu.to_string()).context("give the order to fail")
    }

    /// Prints what `Ready` says when it says something else than before.
    pub(super) fn note_ready(&self, name: &str, begun: Instant, said: &mut String) -> anyhow::Result<()> {
        let deployment = self.kubectl.get("inferencedeployment", name)?;
        let conditions = deployment["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ready = conditions.iter().find(|condition| condition["type"] == "Ready").cloned().unwrap_or_default();
        let word = |field: &str| ready[field].as_str().unwrap_or_default().to_owned();
        let now = format!("Ready {}: {}: {}", word("status"), word("reason"), word("message"));
        if now != *said {
            println!("{:>5.1} s  {now}", begun.elapsed().as_secs_f64());
            *said = now;
        }
        Ok(())
    }

    fn restarts(&self, of: &Pod) -> anyhow::Result<u64> {
        let now = self.pods_of_uid(of)?;
        // A pod that was replaced has done more than restart.
        Ok(now.map_or(u64::MAX, |pod| pod.restarts))
    }

    fn pods_of_uid(&self, of: &Pod) -> anyhow::Result<Option<Pod>> {
        let pods: Value = serde_json::from_str(&self.kubectl.run(&["get", "pods", "-o", "json"])?)?;
        Ok(pods["items"].as_array().into_iter().flatten().map(Pod::of).find(|pod| pod.uid == of.uid))
    }

    /// A GPU of one of two replicas fails under greedy answers that are compared with an undisturbed one: the gateway takes those of the
    /// lost replica to the other, and nobody sees it.
    pub(super) fn fault_beside_another(&self) -> anyhow::Result<()> {
        let Some(gateway) = &self.state.gateway else {
            println!("\nskipped: a GPU that fails beside another replica: there is no gateway");
            return Ok(());
        };
        title("A GPU fails beside another replica: each stream goes on, to the same words");
        // One after the other: two replicas that roll take a third GPU for a while.
        self.change_and_wait(r#"{"engine":{"batchInvariant":true}}"#, 1)?;
        self.change_and_wait(r#"{"scaling":{"min":2,"max":2}}"#, 2)?;
        let pod = self.pods_of(CHAT)?.pop().context("there is a pod")?;
        let url = self.kubectl.service_url(CHAT)?;
        let undisturbed = (0..N_ASKERS).map(|asker| streamed(&url, CHAT, asker)).collect::<anyhow::Result<Vec<_>>>()?;
        ensure!(undisturbed.iter().all(|text| !text.is_empty()), "an answer to compare with is empty");
        let n_changed = self.ask_while_it_fails(&url, &pod, &undisturbed)?;
        ensure!(self.restarts(&pod)? > pod.restarts, "the GPU did not fail");
        ensure!(n_changed == 0, "{n_changed} answers were cut or changed");
        // What is not for clients has a port of its own, the next one.
        let metrics = output("curl", &["-sS", "--fail", &format!("{}/metrics", gateway.replace(":8000", ":8001"))])?;
        let exact = |line: &&str| line.starts_with("stoker_gateway_resumed_total") && line.contains("exact=\"true\"");
        let exact = metrics.lines().find(exact).context("the gateway took no stream to the other replica")?;
        println!("{exact}");
        Ok(())
    }

    /// Askers ask beside each other, each its own question over and over, and the GPU fails meanwhile; how many answers are not the
    /// undisturbed ones.
    fn ask_while_it_fails(&self, url: &str, pod: &Pod, undisturbed: &[String]) -> anyhow::Result<usize> {
        let begun = Instant::now();
        let ask = |asker: usize| -> anyhow::Result<Vec<String>> {
            let mut answers = Vec::new();
            while begun.elapsed() < ASKED_FOR {
                answers.push(streamed(url, CHAT, asker)?);
            }
            Ok(answers)
        };
        let answers = thread::scope(|scope| {
            let askers: Vec<_> = (0..N_ASKERS).map(|asker| scope.spawn(move || ask(asker))).collect();
            sleep(ASKED_FOR / 3);
            let ordered = self.order_to_fail(pod, 0);
            let answers: anyhow::Result<Vec<_>> =
                askers.into_iter().map(|asker| asker.join().expect("an asker does not panic")).collect();
            ordered.and(answers)
        })?;
        let (mut n_same, mut n_changed) = (0, 0);
        for (whole, text) in
            undisturbed.iter().zip(&answers).flat_map(|(whole, texts)| texts.iter().map(move |text| (whole, text)))
        {
            if text == whole {
                n_same += 1;
                continue;
            }
            n_changed += 1;
            let n_alike = text.bytes().zip(whole.bytes()).take_while(|(a, b)| a == b).count();
            println!("of {} bytes, {} came, {n_alike} the same", whole.len(), text.len());
        }
        println!("{N_ASKERS} askers: {n_same} answers as the undisturbed ones, {n_changed} not");
        Ok(n_changed)
    }
}
