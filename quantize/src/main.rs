//! `stoker-quantize`: its command line. Parses, shows how far it is, prints what came of it.

use std::{io::IsTerminal, path::PathBuf};

use anyhow::Result;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use stoker_quantize::{Format, LayerErrors, Method, Progress, Report, Request, Scheme, run};

/// Make a checkpoint of fewer bits of one in bf16, layer by layer on the CPUs: what vLLM, transformers and Stoker load.
///
/// A run that was stopped goes on where it was when it is started again. Beside the model the directory gets `quantize.json` and
/// `quantize.html`: what each layer lost and, with --evaluate, what that does to the model's answers.
///
///     stoker-quantize --model Llama-3.1-8B --out Llama-3.1-8B-FP8 --format fp8
///     stoker-quantize --model Llama-3.1-8B --out Llama-3.1-8B-AWQ --format int4 --method awq --calibration text.jsonl --evaluate other.txt
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
struct Args {
    /// Directory of the model, as Hugging Face has it.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Directory that is made.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// fp8: e4m3 with a scale an output, what enters is rounded as it comes; fp8-static: what enters by a scale measured on text; int8: as
    /// fp8, in integers; int4: weights alone, with a scale a group.
    #[arg(long)]
    format: Format,
    /// nearest; of int4 awq or gptq, of int8 smoothquant: these look at text and lose less.
    #[arg(long, default_value = "nearest")]
    method: Method,
    /// Inputs that share a scale in int4; a multiple of 32.
    #[arg(long, default_value_t = 128)]
    group: usize,
    /// Text that the model is shown: a line of JSON with `text` each (.jsonl), or anything else as one text.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Text on which the original and the result are compared at the end; other than that of --calibration.
    #[arg(long, value_name = "FILE")]
    evaluate: Option<PathBuf>,
    /// Tokens of a sequence of either text at most; each text is cut by itself.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..))]
    sequence: u32,
    /// Sequences of either text at most.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
}

fn main() -> Result<()> {
    let Args { model, out, format, method, group, calibration, evaluate, sequence, samples } = Args::parse();
    let scheme = Scheme { format, method, group };
    let (sequence, samples) = (sequence as usize, samples as usize);
    let request = Request { model, out, scheme, calibration, evaluation: evaluate, sequence, samples };
    let bar = ProgressBar::new(0)
        .with_style(ProgressStyle::with_template("{bar:30} {pos}/{len} layers, {elapsed}, {eta} left  {msg}")?);
    let report = run(&request, &mut |progress| show(&bar, progress))?;
    bar.finish_and_clear();
    print(&request, &report);
    Ok(())
}

fn show(bar: &ProgressBar, progress: Progress<'_>) {
    match progress {
        Progress::Layer(done, of, errors) => {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
            bar.set_message(words(errors));
            // A bar is for terminals; a log gets a line a layer.
            if !std::io::stderr().is_terminal() {
                eprintln!("layer {done} of {of}: {}", words(errors));
            }
        }
        Progress::Comparing => {
            bar.set_message("both read the text of --evaluate");
            if !std::io::stderr().is_terminal() {
                eprintln!("both read the text of --evaluate");
            }
        }
    }
}

fn words(errors: &LayerErrors) -> String {
    let words: Vec<_> = errors.iter().map(|(name, error)| format!("{name} {:.2} %", error * 100.0)).collect();
    words.join(", ")
}

fn print(request: &Request, report: &Report) {
    println!("{}", request.out.display());
    if let Some(found) = &report.comparison {
        println!(
            "perplexity {:.4} -> {:.4} on {} tokens",
            found.perplexity_before, found.perplexity_after, found.n_tokens
        );
        println!(
            "divergence {:.5} nats a token, the same likeliest token {:.2} %",
            found.divergence,
            found.agreement * 100.0
        );
    }
}
