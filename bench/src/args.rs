//! The command line. Parses and fills in defaults; opens nothing.

use std::{io, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};
use stoker_bench::{
    case::Case,
    checkpoint::Dtype,
    curve,
    in_process::{MAX_NUM_SEQS, Setup, Tuning, Weights},
    model::{Format, Wanted},
    peers::Peer,
    quantised::Quantised,
};
use stoker_engine::{DeviceChoice, EngineLimits, KvCacheDtype, Quantization, ops::Isa};

/// Tokens of a step that fill a large GPU.
const GPU_BATCHED_TOKENS: u32 = 8192;

/// What `curve` measures where nobody says otherwise: on a CPU and on a GPU.
const CPU_CURVE: CurveGrid = CurveGrid {
    sequences: &[1, 4, 16, 32],
    contexts: &[64, 256, 1024],
    prompts: &[64, 256, 1024],
    point_tokens: 16_384,
};
const GPU_CURVE: CurveGrid = CurveGrid {
    sequences: &[1, 8, 32, 64, 128, 180],
    contexts: &[256, 1024, 2048],
    prompts: &[128, 512, 2048, 8192],
    point_tokens: 131_072,
};

struct CurveGrid {
    sequences: &'static [u32],
    contexts: &'static [u32],
    prompts: &'static [u32],
    point_tokens: u32,
}

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
/// paired samples, above 1 where Stoker is better; gb_s and gflop_s are what memory and cores do at best, probed around each sample:
///
///     tools/bench/llama-cpp.sh
///     stoker-bench run --model tinyllama-1.1b --peers llama.cpp,transformers
///
/// Models: ember, tinyllama-1.1b, qwen2.5-0.5b, llama-3.2-1b, llama-3.1-8b, llama-3.1-70b, qwen3-1.7b, qwen3-8b, or a directory in Hugging Face's layout.
///
/// Cases (prompts are fresh random tokens, greedy, end tokens ignored):
///
///     start             exec of an agent without flags to its first token       seconds
///     idle              memory of an agent without flags after one answer       rss_mb, rss_beyond_mb
///     prefill_N         one prompt of N tokens                                  tok_s, share_of_peak
///     decode_N          N tokens after a prompt of 128, alone                   tok_s, itl_ms
///     single_stream     128 in, 256 out, alone                                  tok_s, itl_ms
///     ttft_N            first token of a prompt of N tokens, alone              ttft_ms
///     concurrent_N      N at once, 512 in, 256 out each                         tok_s, itl_ms
///     prefix_warm_2k    first token when 2048 of 2176 prompt tokens are cached  ttft_ms
///     shared_prefix     64 requests sharing 2048 tokens against 64 that do not  gain, seconds
///     offline_N         N given at once, 512 in, 256 out each                   tok_s, seconds
///     balanced_N        N given at once, 1024 in, 1024 out each                 tok_s, seconds
///     http_N            concurrent_N over HTTP and SSE                          share_of_in_process
///     sampled_KIND_N    concurrent_N with sampling options, and greedy before   share_of_greedy, tok_s
///     constrained_N     concurrent_N with a JSON schema each, and free before   share_of_free, tok_s
///     required_N        the same, many required keys, token by token before     gain, tok_s, forced_share
///     neighbour_N       N - 1 greedy beside one with every option               loss
///     beside_N          64 chats of 400 in, 1200 out; one prompt of N comes     itl, worst_gap by percentiles, long_ttft
///     mix_N             N requests a second, a tenth with 8k to 14k in          short_ttft, itl, worst_gap, e2e by percentiles
///
/// KIND is qwen (Qwen2.5's defaults), penalties, min_p, bias300, logprobs5 or logprobs20.
///
/// tok_s of one stream counts decoding only; tok_s of many counts their completion tokens over the whole time; itl_ms of many
/// is the whole time less that of as many prefills, by completion token. On a GPU, steps that only decode also give
/// host_step_p99_us, the host's time for one, and gap_us, the GPU's idle time between two.
/// rss_beyond_mb leaves the model's mapped files out: it is the process, its copies of weights, and the KV blocks that one answer
/// used.
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
    /// Measure what a step costs, and how well the engine's own meter learns it from a load: what autoscaling reckons with.
    ///
    /// First steps of fixed shape are timed from outside: decoding, for each number of sequences behind each context, and fresh prompts
    /// alone. A point is the mean of four numbers of sequences, or of eight prompts, about the one that is named, with contexts about the
    /// other: a load has no powers of two, which steps like best. Then the engine starts anew and serves a mixed open load: Poisson
    /// arrivals in stretches, one for each decoding point, in random order, with random lengths. What its meter learned from that, and nothing else, is compared with the fixed shapes, which
    /// are timed again after it. A point counts if the load came near it (within half an octave in sequences and context, ten times).
    ///
    /// With the small trained model, in a minute:
    ///
    ///     stoker-bench curve
    ///
    /// The replica of a simulation, with the start time of your cluster:
    ///
    ///     stoker-bench curve --replica-out replica.json --start-seconds 40
    ///     kubectl stoker simulate --trace ramp --replica replica.json
    ///
    /// A published shape with random weights on a GPU, in two minutes:
    ///
    ///     stoker-bench curve --model llama-3.1-8b --device cuda:0 --weights device --seconds 40 --samples 2
    ///
    /// Figures: curve_decode_NxCONTEXT has step_ms and learned_step_ms, curve_prefill_TOKENS has tok_s and learned_tok_s, curve has
    /// median_off and worst_off, shares over the points that count. Each is the median of its samples, of which one is the mean of
    /// a hundred steps: what other programs take of the machine is part of what a step costs there.
    #[command(verbatim_doc_comment)]
    Curve(CurveArgs),
    /// What a format costs in answers: a model of ember's chat format beside the one it was made of, on held-out conversations.
    Quality(QualityArgs),
    /// Take in what a peer measured in a run of ours: lines `SAMPLES {"case", "metric", "samples", "version"}` of its log.
    Peer(PeerArgs),
    /// Time masks of grammars over a large vocabulary, and steps beside constrained requests.
    Masks {
        /// A `tokenizer.json`; tools/bench/tekken.py makes one of 131,072 tokens.
        tokenizer: PathBuf,
        /// Times that every text is walked.
        #[arg(long, default_value_t = 20)]
        rounds: usize,
        /// What a step takes by itself.
        #[arg(long, default_value_t = 10)]
        step_ms: u64,
        /// Constrained requests beside a free one.
        #[arg(long, default_value_t = 16)]
        beside: usize,
        /// Steps that are timed.
        #[arg(long, default_value_t = 500)]
        steps: u32,
    },
    /// Compile JSON schemas that others wrote, and time masks on the way through texts that they allow, forbid, or that are drawn from
    /// them; tests/tools/json_schemas.py fetches some and judges what was drawn.
    Schemas {
        /// Folder of JSON files: schemas, or schemas with tests as JSON Schema's own suite and MaskBench have them.
        directory: PathBuf,
        /// A `tokenizer.json`; tools/bench/tekken.py makes one of 131,072 tokens.
        #[arg(long)]
        tokenizer: PathBuf,
        /// Take one of each so many schemas.
        #[arg(long, default_value_t = 1)]
        every: usize,
        /// Longest text that is drawn from each schema, in tokens; 0: none is.
        #[arg(long, default_value_t = 400)]
        drawn_tokens: usize,
        /// Where drawn texts and refusals go, a JSON line each.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Join the files of one run: every figure, then ratio_to_PEER for each case that both measured.
    Join {
        /// Figures of one run, ours before and after the peer's.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// File that everything is appended to.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Show files of figures as one page for a browser, in the look of all pages: each case beside its peers, then all figures.
    Report {
        /// Files that `run --out` and `join --out` wrote.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Only figures of this run.
        #[arg(long, value_name = "NAME")]
        run: Option<String>,
        /// The page.
        #[arg(long, value_name = "FILE")]
        html: PathBuf,
    },
    /// Measure which kernel is the fastest for every GEMM of published models on the first GPU, in the company of a recorded step, and
    /// write the chip's table: what is committed in kernels/tables.
    Autotune {
        /// The table, written after each model.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Only models whose name contains one of these.
        #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
        only: Vec<String>,
        /// Measure products of quantised weights instead: fp8, fp8-blocks, int4. Their lines stand beside the others' in a chip's table.
        #[arg(long, value_name = "KIND")]
        quantization: Option<Quantised>,
        /// Measure the products of one of so many GPUs that share a model; one is enough for it.
        #[arg(long, default_value_t = 1, value_name = "N")]
        tensor_parallel: usize,
        /// Where descriptions of models are kept.
        #[arg(long, env = "STOKER_CACHE", default_value_os_t = default_cache(), hide_default_value = true)]
        cache: PathBuf,
    },
    /// Print what a step does: every operation with its shape, its kernel and its time, predicted by the chip's rates and, on a GPU,
    /// measured with random weights.
    Program {
        /// A named shape.
        #[arg(long, default_value = "llama-3.1-8b")]
        model: String,
        /// Sequences that decode, by comma.
        #[arg(long, value_delimiter = ',', default_value = "1,32,64,256", value_name = "N,...")]
        rows: Vec<usize>,
        /// Tokens of each sequence.
        #[arg(long, default_value_t = 1024)]
        context: usize,
        /// Quantise the projections of layers: fp8; or draw them in blocks of e4m3, or in four bits: fp8-blocks, int4.
        #[arg(long, value_name = "KIND")]
        quantization: Option<Quantised>,
        /// A chip that is not here, by its name in kernels/tables: nothing is measured.
        #[arg(long, value_name = "NAME")]
        chip: Option<String>,
        /// GPUs that share the model: what the first of them does.
        #[arg(long, default_value_t = 1, value_name = "N")]
        tensor_parallel: usize,
        /// Where descriptions of models are kept.
        #[arg(long, env = "STOKER_CACHE", default_value_os_t = default_cache(), hide_default_value = true)]
        cache: PathBuf,
    },
    /// Print the requests of `mix_RATE`, one a line: second, prompt tokens, completion tokens. For peers that are to have the same.
    Arrivals {
        /// Requests a second.
        rate: u32,
    },
    /// Make a model's directory in the cache, or find it there, and print its path.
    Checkpoint {
        /// A named shape, or ember.
        model: String,
        /// Format of the weights.
        #[arg(long, value_enum, default_value_t = Dtype::Bf16)]
        dtype: Dtype,
        /// Leave the weights out: for systems that make random ones themselves.
        #[arg(long)]
        without_weights: bool,
        /// Weights that are stored so: int4, fp8-stored, fp8-blocks.
        #[arg(long, value_name = "KIND")]
        quantization: Option<Quantised>,
        /// Where models are kept.
        #[arg(long, env = "STOKER_CACHE", default_value_os_t = default_cache(), hide_default_value = true)]
        cache: PathBuf,
    },
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CurveArgs {
    /// A named shape, ember, or a directory.
    #[arg(long, default_value = "ember")]
    pub(crate) model: String,
    /// Format of the weights; of ember and of a directory, their own.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Format,
    /// What computes: auto (the first GPU that can run the model, else the CPUs), cpu, cuda, or cuda:N.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Where weights come from; those made on the GPU need a named shape.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) weights: Weights,
    /// Sequences that decode together, by comma. Default: 1,4,16,32, on a GPU 1,8,32,64,128,180.
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u32).range(1..))]
    sequences: Vec<u32>,
    /// Tokens before each of them, by comma. Default: 64,256,1024, on a GPU 256,1024,2048.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS,...", value_parser = clap::value_parser!(u32).range(1..))]
    contexts: Vec<u32>,
    /// Tokens of prompts, by comma. Default: 64,256,1024, on a GPU 128,512,2048,8192.
    #[arg(long, value_delimiter = ',', value_name = "TOKENS,...", value_parser = clap::value_parser!(u32).range(1..))]
    prompts: Vec<u32>,
    /// Points whose sequences have more tokens than this together are left out. Default: 16384, on a GPU 131072.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    point_tokens: Option<u32>,
    /// Samples of each point before the load and again after it; one of decoding is the mean of some hundred steps.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Seconds of load.
    #[arg(long, default_value_t = 20, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Compute threads. Default: the cores of the CPUs this process may use, no more than its quota.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Tokens computed in one step at most. Default: the engine's.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_batched_tokens: Option<u32>,
    /// Tokens that the KV cache holds. Default: the engine's, which is what a deployment has.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    kv_cache_tokens: Option<u32>,
    /// Writes the replica here that `kubectl stoker simulate --replica` reads: costs of the fixed shapes, sizes of the engine.
    #[arg(long, value_name = "FILE")]
    pub(crate) replica_out: Option<PathBuf>,
    /// Seconds until a replica serves, in that file. Default: the simulator's.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) start_seconds: Option<f64>,
    #[command(flatten)]
    pub(crate) figures: FiguresArgs,
    /// Seed of prompts and load.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where models of named shapes are kept.
    #[arg(long, env = "STOKER_CACHE", default_value_os_t = default_cache(), hide_default_value = true)]
    pub(crate) cache: PathBuf,
}

impl CurveArgs {
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        Wanted { model: &self.model, format: self.dtype, weights: self.weights, quantised: None, isa: None }
    }

    /// What is measured of the model in this place, on a GPU or not.
    pub(crate) fn asked(&self, model: PathBuf, is_gpu: bool) -> curve::Asked {
        let grid = if is_gpu { GPU_CURVE } else { CPU_CURVE };
        let or = |given: &[u32], usual: &[u32]| if given.is_empty() { usual.to_vec() } else { given.to_vec() };
        let limits = EngineLimits {
            threads: self.threads,
            max_batched_tokens: self.max_batched_tokens,
            kv_cache_tokens: self.kv_cache_tokens,
            ..EngineLimits::default()
        };
        curve::Asked {
            setup: Setup { model, weights: self.weights, device: self.device, limits, seed: self.seed },
            sequences: or(&self.sequences, grid.sequences),
            contexts: or(&self.contexts, grid.contexts),
            prompts: or(&self.prompts, grid.prompts),
            point_tokens: self.point_tokens.unwrap_or(grid.point_tokens),
            samples: self.samples as usize,
            load_seconds: f64::from(self.seconds),
        }
    }
}

/// What becomes of the figures.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FiguresArgs {
    /// Name of the run that these figures are part of. Default: a new one, after the time.
    #[arg(long, value_name = "NAME")]
    pub(crate) run: Option<String>,
    /// File that figures are appended to, one JSON line each.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct QualityArgs {
    /// The model.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// The model that it was made of. Default: itself.
    #[arg(long, value_name = "DIR")]
    pub(crate) original: Option<PathBuf>,
    /// Lines with `messages` and the `expected` answer; those with tools are left out.
    #[arg(long, value_name = "FILE")]
    pub(crate) heldout: PathBuf,
    /// The model's name in figures.
    #[arg(long)]
    pub(crate) name: String,
    /// The format in figures.
    #[arg(long)]
    pub(crate) dtype: String,
    /// What computes: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cuda")]
    pub(crate) device: DeviceChoice,
    /// Quantise the projections of layers when they are loaded: fp8.
    #[arg(long, value_name = "KIND")]
    pub(crate) quantization: Option<Quantization>,
    /// Store keys and values in this: fp8.
    #[arg(long, value_name = "KIND")]
    pub(crate) kv_cache_dtype: Option<KvCacheDtype>,
    #[command(flatten)]
    pub(crate) figures: FiguresArgs,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PeerArgs {
    /// The peer's name in figures, such as vllm.
    pub(crate) system: String,
    /// What it printed.
    pub(crate) log: PathBuf,
    /// Name of the run.
    #[arg(long)]
    pub(crate) run: String,
    /// The model's name in figures.
    #[arg(long)]
    pub(crate) model: String,
    /// Format of the weights in figures.
    #[arg(long, default_value = "bf16")]
    pub(crate) dtype: String,
    /// The command that measures it again.
    #[arg(long)]
    pub(crate) command: String,
    /// File that figures are appended to.
    #[arg(long)]
    pub(crate) out: PathBuf,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// A named shape, ember, or a directory.
    #[arg(long, default_value = "ember")]
    model: String,
    /// Format of the weights; of ember and of a directory, their own unless it is a quantised one.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: Format,
    /// What computes: auto (the first GPU that can run the model, else the CPUs), cpu, cuda, or cuda:N.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Where weights come from; those made on the GPU need a named shape and have no start, idle or http_N.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) weights: Weights,
    /// Cases, by comma. Default: the sweep of a GPU with --device cuda:N, else the one of a CPU.
    #[arg(long, value_delimiter = ',', value_name = "CASE,...")]
    cases: Vec<Case>,
    /// Samples of each case. Default: 5, or 2 with --quick.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    samples: Option<u32>,
    /// Fewer cases and samples: does it work, and about how fast.
    #[arg(long)]
    quick: bool,
    /// Compute threads. Default: the cores of the CPUs this process may use, no more than its quota.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Instructions that the CPUs compute with: avx2, ...; figures of others than the best have their name before the case, and peers
    /// are those built for it (tools/bench/llama-cpp.sh avx2). Default: the best.
    #[arg(long, env = "STOKER_CPU_ISA", value_name = "NAME")]
    pub(crate) isa: Option<Isa>,
    /// Sequences computed in one step at most; more requests wait.
    #[arg(long, default_value_t = MAX_NUM_SEQS, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: u32,
    /// Tokens computed in one step at most. Default: the engine's, or 8192 with --device cuda:N.
    #[arg(long, value_name = "TOKENS")]
    max_batched_tokens: Option<u32>,
    /// Milliseconds between two tokens that prompts of others may take at most; 10000 lets prompts fill steps. Default: the
    /// engine's.
    #[arg(long, value_name = "MS")]
    itl_target_ms: Option<u64>,
    /// Measure the batch-invariant mode; its figures are those of the system stoker-invariant. In one run with the engine as it
    /// is, `join` gives ratio_to_stoker-invariant: what the mode costs.
    #[arg(long)]
    batch_invariant: bool,
    /// Quantise the projections of layers when they are loaded: fp8; or draw them in four bits, groups of 128 with zero points: int4;
    /// or in e4m3 in blocks of 128 x 128, as DeepSeek and Qwen publish: fp8-blocks; or, with --weights disk, in e4m3 with a scale an
    /// output: fp8-stored. The format in figures is then that.
    #[arg(long, value_name = "KIND")]
    pub(crate) quantization: Option<Quantised>,
    /// GPUs that share the model, from the one of --device on.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) tensor_parallel: usize,
    /// Stages that the model's layers are cut into, each on as many GPUs of its own.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) pipeline_parallel: usize,
    /// Store keys and values in this: fp8. The format in figures then says so.
    #[arg(long, value_name = "KIND")]
    pub(crate) kv_cache_dtype: Option<KvCacheDtype>,
    /// Peers that are asked the same cases, sample by sample in turn: see the scripts in tools/bench.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PEER,...")]
    pub(crate) peers: Vec<Peer>,
    #[command(flatten)]
    pub(crate) figures: FiguresArgs,
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
        let is_gpu = matches!(self.device, DeviceChoice::Cuda(_));
        let sweep = match (is_gpu, self.quick) {
            (true, true) => Case::GPU_QUICK,
            (true, false) => Case::GPU,
            (false, true) => Case::CPU_QUICK,
            (false, false) => Case::CPU,
        };
        if self.cases.is_empty() { sweep.to_vec() } else { self.cases.clone() }
    }

    pub(crate) fn samples(&self) -> usize {
        self.samples.unwrap_or(if self.quick { 2 } else { 5 }) as usize
    }

    pub(crate) fn tuning(&self) -> Tuning {
        let for_gpu = matches!(self.device, DeviceChoice::Cuda(_)).then_some(GPU_BATCHED_TOKENS);
        Tuning {
            threads: self.threads,
            isa: self.isa,
            max_num_seqs: self.max_num_seqs,
            max_batched_tokens: self.max_batched_tokens.or(for_gpu),
            batch_invariant: self.batch_invariant,
            quantization: self.quantization.and_then(Quantised::at_start),
            tensor_parallel: self.tensor_parallel,
            pipeline_parallel: self.pipeline_parallel,
            kv_cache_dtype: self.kv_cache_dtype,
            itl_target: self.itl_target_ms.map(Duration::from_millis),
        }
    }

    /// What figures call the format: of weights as they are multiplied, of the cache where it is not as it is computed, and how many GPUs
    /// have a share of it.
    pub(crate) fn format(&self, stored_as: &str) -> String {
        let weights = self.quantization.map_or(stored_as, |quantization| quantization.name());
        let cache = self.kv_cache_dtype.map_or_else(String::new, |cache| format!(", {} KV", cache.name()));
        let gpus = match (self.tensor_parallel, self.pipeline_parallel) {
            (1, 1) => String::new(),
            (n_ranks, 1) => format!(", {n_ranks} GPUs"),
            (n_ranks, n_stages) => {
                format!(", {n_stages} stages of {n_ranks} GPU{}", if n_ranks > 1 { "s" } else { "" })
            }
        };
        format!("{weights}{cache}{gpus}")
    }

    /// The set that computes: the machine's best if none is asked for.
    pub(crate) fn isa(&self) -> Isa {
        self.isa.unwrap_or_else(Isa::best)
    }

    /// What peers are built for, where that is not this machine.
    pub(crate) fn peers_isa(&self) -> Option<Isa> {
        self.isa.filter(|isa| *isa != Isa::best())
    }

    pub(crate) fn agent(&self) -> io::Result<PathBuf> {
        match &self.agent {
            Some(path) => Ok(path.clone()),
            None => Ok(std::env::current_exe()?.with_file_name("stoker-agent")),
        }
    }

    pub(crate) fn wanted(&self) -> Wanted<'_> {
        Wanted {
            model: &self.model,
            format: self.dtype,
            weights: self.weights,
            quantised: self.quantization,
            isa: self.peers_isa(),
        }
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
    fn a_curve_has_the_grid_of_its_device_and_what_was_asked() {
        let parsed = Args::try_parse_from(["stoker-bench", "curve", "--contexts", "128,512"]);
        let Ok(Args { command: Command::Curve(curve) }) = parsed else { panic!("{parsed:?}") };
        let asked = curve.asked(PathBuf::from("m"), true);
        assert_eq!((asked.sequences.last(), asked.contexts), (Some(&180), vec![128, 512]));
        assert_eq!(curve.asked(PathBuf::from("m"), false).sequences, [1, 4, 16, 32]);
        for wrong in [["--sequences", "0"], ["--contexts", "x"], ["--seconds", "0"], ["--samples", "0"]] {
            assert!(Args::try_parse_from(["stoker-bench", "curve", wrong[0], wrong[1]]).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn cases_are_given_by_name() {
        let parsed = Args::try_parse_from(["stoker-bench", "run", "--cases", "ttft_128,concurrent_8"]);
        let Ok(Args { command: Command::Run(run) }) = parsed else { panic!("{parsed:?}") };
        assert_eq!(run.cases(), [Case::Ttft(128), Case::Concurrent(8)]);
        assert!(Args::try_parse_from(["stoker-bench", "run", "--cases", "ttft"]).is_err());
    }
}
