//! `stoker-load`: arguments, the run, the summary. Progress goes to stderr, the summary to stdout.

mod args;
mod progress;

use std::{fs, path::Path, process::ExitCode, sync::Arc};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde::Serialize;
use serde_json::Value;
use stoker_loadgen::{
    client::{Client, ClientError, Ending, FailureKind, Options, Sampling},
    report::{Told, report},
    run::{Model, Plan, Wish, run},
    session::{Mix, Session},
    shape::{Schema, Shapes, Tools},
    summary::{Group, Summary, groups},
};
use stoker_workload::{Request, Sizes, Trace};
use tokio::sync::mpsc;

use args::{Answers, Cli, Load, Weighted};

/// The summary and what it is of.
#[derive(Serialize)]
struct Report<'a> {
    url: &'a str,
    models: Vec<&'a str>,
    #[serde(flatten)]
    summary: &'a Summary,
    groups: &'a [Group],
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    cli.check()?;
    let firsts = requests(&cli.load)?;
    let shapes = shapes(&cli.answers)?;
    let client = Client::new(options(&cli))?;
    let weighted = weighted(&cli, &client).await.map_err(with_advice)?;
    let models = models(&client, &weighted).await.map_err(with_advice)?;
    let plan = Plan {
        sessions: sessions(&cli, &firsts, shapes, &weighted),
        models: models.clone(),
        seed: cli.load.seed,
        timeout: cli.asking.timeout,
        in_flight_max: cli.asking.in_flight_max.get(),
    };
    let mut line = progress::Line::new();
    let (outcomes, elapsed) = run(&client, plan, wishes(), |progress| line.show(progress)).await;
    line.end();
    let slos = &cli.good.slos;
    let (summary, groups) = (Summary::of(&outcomes, elapsed, slos), groups(&outcomes, &models, elapsed, slos));
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    let title = format!("Load on {} at {}", names.join(", "), client.base());
    print(&cli, &Report { url: client.base(), models: names, summary: &summary, groups: &groups })?;
    if let Some(path) = &cli.html {
        let told = Told { summary: &summary, groups: &groups, outcomes: &outcomes, models: &models };
        fs::write(path, report(&title, told)).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(if summary.answered > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn weighted(cli: &Cli, client: &Client) -> Result<Vec<Weighted>, ClientError> {
    if cli.models.is_empty() {
        return Ok(vec![Weighted { name: client.first_model().await?, weight: 1.0 }]);
    }
    Ok(cli.models.clone())
}

/// Each with its own tokenizer.
async fn models(client: &Client, weighted: &[Weighted]) -> Result<Vec<Model>, ClientError> {
    let mut models = Vec::new();
    for Weighted { name, .. } in weighted {
        models.push(Model { name: name.clone(), token_count: client.token_count(name).await? });
    }
    Ok(models)
}

/// What to change where the endpoint says only that it will not.
fn with_advice(error: ClientError) -> anyhow::Error {
    let advice = match &error {
        ClientError::Endpoint { failure, .. } => match failure.kind {
            FailureKind::Status(401 | 403) => "give a key that the endpoint knows, in OPENAI_API_KEY or by --api-key",
            FailureKind::Status(404) => {
                "look for the model's name in /v1/models, and whether --url is the address in front of /v1"
            }
            FailureKind::Connect => "see whether --url is right and the server runs",
            _ => return error.into(),
        },
        _ => return error.into(),
    };
    anyhow::Error::from(error).context(advice)
}

fn sessions(cli: &Cli, firsts: &[Request], shapes: Shapes, weighted: &[Weighted]) -> Vec<Session> {
    let mix = Mix {
        model_weights: weighted.iter().map(|model| model.weight).collect(),
        turns: cli.sessions.turns,
        think: cli.sessions.think,
        sizes: sizes(&cli.load),
        shared_tokens: cli.sessions.shared_tokens,
        shapes,
    };
    mix.sessions(firsts, cli.load.seed)
}

fn sizes(load: &Load) -> Sizes {
    Sizes { prompt: load.prompt_tokens, completion: load.max_tokens }
}

fn shapes(answers: &Answers) -> Result<Shapes> {
    let schema = |path: &Path| Ok(Arc::new(Schema::new(&path.display().to_string(), json(path)?)?));
    let schemas: Vec<_> = answers.schema_files.iter().map(|path| schema(path)).collect::<Result<_>>()?;
    let tools = match &answers.tools_file {
        None => Tools::built_in(answers.tool_choice),
        Some(path) => {
            let tools = Tools::new(json(path)?, answers.tool_choice);
            Arc::new(tools.with_context(|| format!("read {}", path.display()))?)
        }
    };
    Ok(Shapes {
        schema_share: answers.schemas,
        schemas: if schemas.is_empty() { Schema::built_in() } else { schemas },
        tools_share: answers.tools,
        tools,
    })
}

fn json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("read {} as JSON", path.display()))
}

fn requests(load: &Load) -> Result<Vec<Request>> {
    if let Some(path) = &load.trace {
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let read = Trace::read("trace", &text).with_context(|| format!("read {}", path.display()))?;
        read.tell(|told| eprintln!("{told}"));
        return Ok(read.trace.requests);
    }
    let steps = load.steps.as_ref().context("give --step or --trace")?;
    let requests = steps.requests(sizes(load), load.seed);
    ensure!(!requests.is_empty(), "no session falls into {steps}: make it longer, or raise the rate");
    Ok(requests)
}

fn options(cli: &Cli) -> Options {
    Options {
        url: cli.url.clone(),
        form: cli.asking.form,
        connections: cli.asking.connections,
        ending: if cli.asking.ignore_eos { Ending::AtMaxTokens } else { Ending::Natural },
        sampling: Sampling::OfModel,
        api_key: cli.asking.api_key.clone(),
    }
}

/// The first Ctrl-C finishes, the second abandons.
fn wishes() -> mpsc::Receiver<Wish> {
    let (wish, wishes) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut next = Wish::Finish;
        while tokio::signal::ctrl_c().await.is_ok() {
            if wish.send(next).await.is_err() {
                return;
            }
            next = Wish::Abandon;
        }
    });
    wishes
}

fn print(cli: &Cli, report: &Report<'_>) -> Result<()> {
    if cli.json {
        println!("{}", serde_json::to_string(report)?);
        return Ok(());
    }
    println!("{} at {}\n{}", report.models.join(", "), report.url, report.summary);
    report.groups.iter().for_each(|group| println!("{group}"));
    Ok(())
}
