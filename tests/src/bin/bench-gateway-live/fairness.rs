//! A tenant that asks for ten times its share, beside others that ask for theirs.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use ring::digest::{SHA256, digest};
use stoker_figures::System;
use stoker_loadgen::prompt::words;
use stoker_tests::live::{Asker, Live};
use tokio::task::JoinSet;

use crate::{Bench, percentile};

impl Bench {
    /// A tenant that asks for half of its share, beside eight that ask for theirs and one that asks for one share, then for ten.
    pub(crate) async fn fairness(&mut self) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("tenants.yaml");
        std::fs::write(&file, tenants())?;
        let live =
            Live::start(1, &self.agent_args(&["--max-num-seqs", "8"]), &["--tenants", &file.display().to_string()])
                .await?;
        let capacity = capacity(&live).await?;
        println!("one replica answers {capacity:.1} requests a second");
        let (mut fair, mut beside) = (Vec::new(), Vec::new());
        for time in 0..self.args.times {
            for (greed, all) in [(1.0, &mut fair), (10.0, &mut beside)] {
                let shares = Shares { share: 0.1 * capacity, greed, seconds: self.args.seconds as f64, seed: time };
                all.push(1e3 * shares.modest_p95(&live).await?);
            }
        }
        let ratios: Vec<f64> = fair.iter().zip(&beside).map(|(fair, beside)| beside / fair).collect();
        for (metric, samples) in [("ttft_p95_ms_at_share", &fair), ("ttft_p95_ms_at_ten", &beside), ("ratio", &ratios)]
        {
            self.note(&System::stoker(), "gateway_fairness", metric, samples);
        }
        Ok(())
    }
}

const TENANTS: usize = 10;
/// Tokens of each prompt of theirs, about, and of each answer.
const PROMPT_WORDS: usize = 120;
const ANSWER_TOKENS: u32 = 64;

fn key(tenant: usize) -> String {
    format!("key-of-tenant-{tenant}")
}

fn tenants() -> String {
    let hash =
        |tenant| digest(&SHA256, key(tenant).as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let line = |tenant| {
        let hash: String = hash(tenant);
        format!("- {{name: tenant-{tenant}, keys: ['sha256:{hash}']}}\n")
    };
    format!("tenants:\n{}", (0..TENANTS).map(line).collect::<String>())
}

fn prompt(number: u64) -> String {
    words(number, PROMPT_WORDS).collect::<Vec<_>>().join(" ")
}

/// Requests a second that are answered where there are always more.
async fn capacity(live: &Live) -> Result<f64> {
    const CLIENTS: u64 = 32;
    const SECONDS: f64 = 15.0;
    let asker = Asker::new(live.gateway().base(), Some(&key(0)))?;
    let (begun, mut clients) = (Instant::now(), JoinSet::new());
    for client in 0..CLIENTS {
        let asker = asker.clone();
        clients.spawn(async move {
            let mut n_answered = 0;
            while begun.elapsed().as_secs_f64() < SECONDS {
                asker.ask(prompt((client << 32) + n_answered), ANSWER_TOKENS).await?;
                n_answered += 1;
            }
            anyhow::Ok(n_answered)
        });
    }
    let answered = clients.join_all().await.into_iter().sum::<Result<u64>>()?;
    Ok(answered as f64 / begun.elapsed().as_secs_f64())
}

/// What tenants ask for.
struct Shares {
    /// Requests a second that are a tenth of what the replica answers.
    share: f64,
    /// Shares that the last tenant asks for.
    greed: f64,
    seconds: f64,
    seed: u64,
}

impl Shares {
    /// Seconds to the first token of the first tenant, who asks for half of its share.
    async fn modest_p95(&self, live: &Live) -> Result<f64> {
        let mut tenants = Vec::new();
        for tenant in 0..TENANTS {
            let asker = Asker::new(live.gateway().base(), Some(&key(tenant)))?;
            let part = match tenant {
                0 => 0.5,
                tenant if tenant == TENANTS - 1 => self.greed,
                _ => 1.0,
            };
            let (rate, seconds, seed) = (self.share * part, self.seconds, self.seed * 100 + tenant as u64);
            tenants.push(tokio::spawn(open_loop(asker, rate, seconds, seed)));
        }
        let mut waits = Vec::new();
        for tenant in tenants {
            waits.push(tenant.await?);
        }
        let refused: Vec<usize> = waits.iter().map(|(_, n_refused)| *n_refused).collect();
        println!(
            "greed {}: answered {:?}, refused {refused:?}",
            self.greed,
            waits.iter().map(|(waits, _)| waits.len()).collect::<Vec<_>>()
        );
        ensure!(refused[0] == 0, "{} of the modest tenant's requests were refused", refused[0]);
        Ok(percentile(&waits[0].0, 0.95))
    }
}

/// Requests that come when they come; how long each waited, and how many were refused.
async fn open_loop(asker: Asker, rate: f64, seconds: f64, seed: u64) -> (Vec<f64>, usize) {
    let mut random = StdRng::seed_from_u64(seed);
    let (begun, mut at, mut asked) = (Instant::now(), 0.0, JoinSet::new());
    loop {
        at += -random.random::<f64>().max(1e-12).ln() / rate;
        if at > seconds {
            break;
        }
        tokio::time::sleep_until((begun + Duration::from_secs_f64(at)).into()).await;
        let (asker, number) = (asker.clone(), random.random());
        asked.spawn(async move { asker.ask(prompt(number), ANSWER_TOKENS).await });
    }
    let answers = asked.join_all().await;
    let waits: Vec<f64> = answers.iter().flatten().map(|timed| timed.first_seconds).collect();
    let n_refused = answers.len() - waits.len();
    (waits, n_refused)
}
