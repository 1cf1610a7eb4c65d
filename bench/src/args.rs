//! The command line. Parses and fills in defaults; opens nothing.

use std::{
    io,
    path::{Path, PathBuf},
};

use clap::{Parser, Subcommand};
use stoker_bench::{case::Case, checkpoint::Dtype, in_process::Tuning, peers::Peer};

/// Measures the engine: fixed cases on models of named shapes, medians with their range, one JSON line a figure.
///
/// Try it with the small trained model, which takes seconds:
///
///     stoker-bench run --quick
///
/// A larger shape with random weights, made once in the cache from a seed; speed does not depend on what weights say:
///
///     stoker-bench run --model tinyllama-1.1b --cases prefill_512,decode_128,concurrent_8
///
/// The same beside llama.cpp and transformers on the same weights, sample by sample in turn. ratio_to_PEER is the median of the
/// paired samples, above 1 where Stoker is better; gb_s is the memory's speed probed around each sample:
///
///     tools/bench/llama-cpp.sh
///     stoker-bench run --model tinyllama-1.1b --peers llama.cpp,transformers
///
/// Models: ember, tinyllama-1.1b, qwen2.5-0.5b, llama-3.2-1b, llama-3.1-8b, qwen3-8b, or a directory in Hugging Face's layout.
///
/// Cases (prompts are fresh random tokens, greedy, end tokens ignored):
///
///     start             exec of the agent to its first token over HTTP          seconds
///     idle              memory of an agent that has answered once               rss_mb
///     prefill_N         one prompt of N tokens                                  tok_s
///     decode_N          N tokens after a prompt of 128, alone                   tok_s, itl_ms
///     single_stream     128 in, 256 out, alone                                  tok_s, itl_ms
///     ttft_N            first token of a prompt of N tokens, alone              ttft_ms
///     concurrent_N      N at once, 512 in, 256 out each                         tok_s, itl_ms
///     prefix_warm_2k    first token when 2048 of 2176 prompt tokens are cached  ttft_ms
///     shared_prefix     64 requests sharing 2048 tokens against 64 that do not  gain, seconds
///     offline_N         N given at once, 512 in, 256 out each                   tok_s, seconds
///     http_N            concurrent_N over HTTP and SSE                          share_of_in_process
///
/// tok_s of one stream counts decoding only; tok_s of many counts their completion tokens over the whole time; itl_ms of many
/// is the whole time less that of as many prefills, by completion token.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure cases and print a table; `--out` appends the figures.
    Run(RunArgs),
    /// Make a model's directory in the cache, or find it there, and print its path.
    Checkpoint {
        /// A named shape, or ember.
        model: String,
        /// Format of the weights.
        #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
        dtype: Dtype,
        /// Where models are kept.
        #[arg(long, env = "STOKER_CACHE", default_value_os_t = default_cache(), hide_default_value = true)]
        cache: PathBuf,
    },
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// A named shape, ember, or a directory.
    #[arg(long, default_value = "ember")]
    pub(crate) model: String,
    /// Format of the weights.
    #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
    pub(crate) dtype: Dtype,
    /// Cases, by comma. Default: the ones for a CPU.
    #[arg(long, value_delimiter = ',', value_name = "CASE,...")]
    cases: Vec<Case>,
    /// Samples of each case. Default: 5, or 2 with --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    samples: Option<u32>,
    /// Fewer cases and samples: does it work, and about how fast.
    #[arg(long)]
    quick: bool,
    /// Compute threads. Default: the CPUs this process may use.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Tokens computed in one step at most. Default: the engine's.
    #[arg(long, value_name = "TOKENS")]
    max_batched_tokens: Option<u32>,
    /// Peers that are asked the same cases, sample by sample in turn: see the scripts in tools/bench.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PEER,...")]
    pub(crate) peers: Vec<Peer>,
    /// File that figures are appended to, one JSON line each.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// The agent that start, idle and http_N run. Default: the one beside this program.
    #[arg(long, value_name = "PROGRAM")]
    agent: Option<PathBuf>,
    /// Seed of the prompts.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Where models of named shapes are kept.
    #[arg(long, env = "STOKER_CACHE", default_value_os_t = default_cache(), hide_default_value = true)]
    pub(crate) cache: PathBuf,
}

impl RunArgs {
    pub(crate) fn cases(&self) -> Vec<Case> {
        match (self.cases.as_slice(), self.quick) {
            ([], true) => vec![Case::Prefill(512), Case::Decode(128), Case::Concurrent(8)],
            ([], false) => Case::CPU.to_vec(),
            (cases, _) => cases.to_vec(),
        }
    }

    pub(crate) fn samples(&self) -> usize {
        self.samples.unwrap_or(if self.quick { 2 } else { 5 }) as usize
    }

    pub(crate) fn tuning(&self) -> Tuning {
        Tuning { threads: self.threads, max_batched_tokens: self.max_batched_tokens }
    }

    pub(crate) fn agent(&self) -> io::Result<PathBuf> {
        match &self.agent {
            Some(path) => Ok(path.clone()),
            None => Ok(std::env::current_exe()?.with_file_name("stoker-agent")),
        }
    }

    /// The model's name in figures: a directory's is its last part.
    pub(crate) fn model_name(&self) -> String {
        let name = Path::new(&self.model).file_name().unwrap_or(self.model.as_ref());
        name.to_string_lossy().to_lowercase()
    }
}

/// `$XDG_CACHE_HOME/stoker`, or `~/.cache/stoker`.
fn default_cache() -> PathBuf {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    base.unwrap_or_else(std::env::temp_dir).join("stoker")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn cases_are_given_by_name() {
        let parsed = Args::try_parse_from(["stoker-bench", "run", "--cases", "ttft_128,concurrent_8"]);
        let Ok(Args { command: Command::Run(run) }) = parsed else { panic!("{parsed:?}") };
        assert_eq!(run.cases(), [Case::Ttft(128), Case::Concurrent(8)]);
        assert!(Args::try_parse_from(["stoker-bench", "run", "--cases", "ttft"]).is_err());
    }
}
