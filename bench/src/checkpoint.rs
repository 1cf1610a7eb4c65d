//! Checkpoints of random weights on disk, made once from a seed: `config.json`, a byte tokenizer, `model.safetensors`. The
//! engine and its peers read the same files. Never overwrites a finished one.

use std::{
    fs::{self, File},
    io::{self, Read},
    num::NonZero,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use anyhow::{Context, Result};
use half::bf16;
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng};
use serde_json::{Map, Value, json};

use crate::{
    quantised::Quantised,
    shape::{Fill, Shape, Tensor},
};

/// The format of a checkpoint's weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Its name in figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    fn torch_name(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }

    fn safetensors_name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

const STANDARD_DEVIATION: f32 = 0.02;
/// Draws that random weights are picked from: enough that no two rows of a matrix look alike.
const TABLE_LEN: usize = 1 << 16;
/// Values a thread fills at a time.
const PIECE_VALUES: usize = 1 << 20;

/// The directory of a named shape with random weights, made now if this cache lacks it.
pub fn ensure(cache: &Path, model: &str, dtype: Dtype, quantised: Option<Quantised>) -> Result<PathBuf> {
    let stored = quantised.filter(|kind| kind.at_start().is_none());
    let name = stored.map_or(dtype.name(), Quantised::name);
    let dir = cache.join("bench/models").join(format!("{model}-{name}"));
    if dir.exists() {
        return Ok(dir);
    }
    let shape = named(model)?;
    let unfinished = dir.with_extension(format!("{}", std::process::id()));
    fs::create_dir_all(&unfinished).with_context(|| format!("create {}", unfinished.display()))?;
    write_random(&unfinished, shape, dtype, stored)?;
    fs::rename(&unfinished, &dir).with_context(|| format!("rename to {}", dir.display()))?;
    Ok(dir)
}

fn named(model: &str) -> Result<&'static Shape> {
    let known = || Shape::names().collect::<Vec<_>>().join(", ");
    Shape::named(model).with_context(|| format!("no model {model}: use ember, {} or a directory", known()))
}

/// The directory of a shape without weights: what an engine needs that makes them itself.
pub fn without_weights(cache: &Path, model: &str, dtype: Dtype, quantised: Option<Quantised>) -> Result<PathBuf> {
    let mut config = named(model)?.config(dtype.torch_name());
    let stored = quantised.filter(|kind| kind.at_start().is_none());
    stored.inspect(|kind| kind.describe(&mut config));
    let name = stored.map_or(dtype.name(), Quantised::name);
    described(cache, &format!("{model}-{name}-weightless"), &config)
}

/// The directory of a model that is a description only.
pub fn described(cache: &Path, name: &str, config: &Value) -> Result<PathBuf> {
    let dir = cache.join("bench/models").join(name);
    fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    write_json(&dir.join("config.json"), config)?;
    write_json(&dir.join("tokenizer.json"), &byte_tokenizer())?;
    Ok(dir)
}

fn write_description(dir: &Path, shape: &Shape, dtype: Dtype, stored: Option<Quantised>) -> Result<()> {
    let mut config = shape.config(dtype.torch_name());
    stored.inspect(|kind| kind.describe(&mut config));
    write_json(&dir.join("config.json"), &config)?;
    write_json(&dir.join("tokenizer.json"), &byte_tokenizer())
}

/// Bytes of the tensors that one decoded token reads: all but a table of embeddings that is not the output matrix too.
pub fn bytes_per_token(directory: &Path) -> Result<u64> {
    let path = directory.join("model.safetensors");
    let read = || -> Result<Value> {
        let mut file = File::open(&path)?;
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        Ok(serde_json::from_reader(file.take(u64::from_le_bytes(length)))?)
    };
    let header = read().with_context(|| format!("read {}", path.display()))?;
    let tensors = header.as_object().context("a header is an object")?;
    let is_tied = !tensors.contains_key("lm_head.weight");
    let read = tensors.iter().filter(|(name, _)| is_tied || *name != "model.embed_tokens.weight");
    let bytes = |place: &Value| Some(place["data_offsets"][1].as_u64()? - place["data_offsets"][0].as_u64()?);
    Ok(read.filter_map(|(_, place)| bytes(place)).sum())
}

/// Writes a checkpoint of a shape into a directory that exists.
pub fn write_random(dir: &Path, shape: &Shape, dtype: Dtype, stored: Option<Quantised>) -> Result<()> {
    write_description(dir, shape, dtype, stored)?;
    let path = dir.join("model.safetensors");
    let file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
    let tensors = shape.tensors().into_iter();
    let tensors: Vec<_> = match stored {
        Some(kind) => tensors.flat_map(|tensor| kind.stored(tensor)).collect(),
        None => tensors.collect(),
    };
    let header = header(&tensors, dtype);
    let written =
        file.write_all_at(&header, 0).and_then(|()| fill_file(&file, &pieces(&tensors, header.len(), dtype), dtype));
    written.with_context(|| format!("write {}", path.display()))
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    fs::write(path, serde_json::to_vec_pretty(value)?).with_context(|| format!("write {}", path.display()))
}

/// One token a byte: prompts are token ids, and text plays no part.
fn byte_tokenizer() -> Value {
    // GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on.
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255).filter(|byte| !printable(byte)).zip(0x100_u32..);
    let spelled = (0..=255).filter(printable).map(|byte| (byte, u32::from(byte))).chain(others);
    let vocab: Map<_, _> = spelled
        .map(|(byte, c)| (char::from_u32(c).expect("below the surrogates").to_string(), Value::from(byte)))
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    })
}

/// Length of the JSON, the JSON with every tensor's place, padded so that data begins at a multiple of 64 bytes.
fn header(tensors: &[Tensor], dtype: Dtype) -> Vec<u8> {
    let mut fields = Map::new();
    let mut begin = 0;
    for tensor in tensors {
        let end = begin + tensor.n_values() * bytes_of(tensor.fill, dtype);
        let place = json!({"dtype": name_of(tensor.fill, dtype), "shape": tensor.shape, "data_offsets": [begin, end]});
        fields.insert(tensor.name.clone(), place);
        begin = end;
    }
    let mut json = Value::Object(fields).to_string();
    let padding = (json.len() + 8).next_multiple_of(64) - 8 - json.len();
    json.push_str(&" ".repeat(padding));
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
}

/// Box-Muller draws.
fn normal_table() -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(0);
    let mut draw = || {
        let (radius, angle): (f32, f32) = (rng.random(), rng.random());
        // 1 - r is never zero, whose logarithm would be infinite.
        (-2.0 * (1.0 - radius).ln()).sqrt() * (std::f32::consts::TAU * angle).cos() * STANDARD_DEVIATION
    };
    (0..TABLE_LEN).map(|_| draw()).collect()
}

/// Values that one thread makes and writes at once.
#[derive(Clone, Copy, Debug)]
struct Piece {
    fill: Fill,
    /// Fixed by its place in the model: whoever writes it writes the same.
    seed: u64,
    len: usize,
    offset: u64,
}

/// All tensors, one behind the other from `begin` on.
fn pieces(tensors: &[Tensor], begin: usize, dtype: Dtype) -> Vec<Piece> {
    let mut offset = begin as u64;
    let mut pieces = Vec::new();
    for (idx, tensor) in tensors.iter().enumerate() {
        let n_values = tensor.n_values() as usize;
        for (piece, first) in (0..n_values).step_by(PIECE_VALUES).enumerate() {
            let (seed, len) = ((idx as u64) << 32 | piece as u64, PIECE_VALUES.min(n_values - first));
            pieces.push(Piece { fill: tensor.fill, seed, len, offset });
            offset += len as u64 * bytes_of(tensor.fill, dtype);
        }
    }
    pieces
}

/// Every thread takes the next piece that nobody has.
fn fill_file(file: &File, pieces: &[Piece], dtype: Dtype) -> io::Result<()> {
    let table = normal_table();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = match piece.fill {
                Fill::Fours | Fill::E4m3 => codes(piece),
                Fill::Normal | Fill::One | Fill::Scale => {
                    encode(&fill(piece.fill, piece.len, piece.seed, &table), dtype)
                }
            };
            file.write_all_at(&bytes, piece.offset)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let n_threads = thread::available_parallelism().map_or(1, NonZero::get);
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("filling does not panic"))
    })
}

/// Bytes of a value of a tensor.
fn bytes_of(fill: Fill, dtype: Dtype) -> u64 {
    match fill {
        Fill::Fours => 4,
        Fill::E4m3 => 1,
        Fill::Normal | Fill::One | Fill::Scale => dtype.bytes(),
    }
}

/// How safetensors call them.
fn name_of(fill: Fill, dtype: Dtype) -> &'static str {
    match fill {
        Fill::Fours => "I32",
        Fill::E4m3 => "F8_E4M3",
        Fill::Normal | Fill::One | Fill::Scale => dtype.safetensors_name(),
    }
}

/// Random bits; of e4m3 the highest of the exponent is none, which leaves numbers below 2.
fn codes(piece: &Piece) -> Vec<u8> {
    let mut bytes = vec![0; piece.len * bytes_of(piece.fill, Dtype::Bf16) as usize];
    SmallRng::seed_from_u64(piece.seed).fill_bytes(&mut bytes);
    if piece.fill == Fill::E4m3 {
        bytes.iter_mut().for_each(|byte| *byte &= 0b1011_1111);
    }
    bytes
}

fn fill(fill: Fill, len: usize, seed: u64, table: &[f32]) -> Vec<f32> {
    match fill {
        Fill::Fours | Fill::E4m3 => unreachable!("codes are no numbers"),
        Fill::One => vec![1.0; len],
        // Codes of four bits less their zero points, which are as random, deviate by 6.5.
        Fill::Scale => vec![STANDARD_DEVIATION / 4.0; len],
        Fill::Normal => {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut values = vec![0.0; len];
            for four in values.chunks_mut(4) {
                let bits = rng.next_u64();
                four.iter_mut()
                    .zip([0, 16, 32, 48])
                    .for_each(|(value, at)| *value = table[(bits >> at) as u16 as usize]);
            }
            values
        }
    }
}

fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => bytemuck::cast_slice(values).to_vec(),
        Dtype::Bf16 => {
            let rounded: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
            bytemuck::cast_slice(&rounded).to_vec()
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_engine::DeviceChoice;

    use super::*;
    use crate::{
        case::Case,
        in_process::{InProcess, Setup, Tuning, Weights, limits_for},
        shape::Family,
    };

    const TINY: Shape = Shape {
        name: "tiny",
        family: Family::Llama,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 32,
        vocab_size: 512,
        max_position_embeddings: 2048,
        rope_theta: 10_000.0,
        rope_factor: 1.0,
        rms_norm_eps: 1e-5,
        tie_word_embeddings: false,
    };

    fn tiny(dtype: Dtype) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        write_random(dir.path(), &TINY, dtype, None).unwrap();
        dir
    }

    #[test]
    fn the_engine_reads_a_checkpoint_and_answers_in_full_length() {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let dir = tiny(dtype);
            let limits = limits_for(&[Case::Decode(4)], Tuning::default());
            let directory = dir.path().into();
            let setup = Setup { model: directory, weights: Weights::Disk, device: DeviceChoice::Cpu, limits, seed: 1 };
            let mut engine = InProcess::open(&setup).unwrap();
            let readings = engine.sample(Case::Decode(4)).unwrap();
            assert_eq!(readings.iter().map(|reading| reading.metric).collect::<Vec<_>>(), ["tok_s", "itl_ms"]);
            assert!(readings.iter().all(|reading| reading.value.is_finite() && reading.value > 0.0), "{readings:?}");
        }
    }

    #[test]
    fn the_engine_reads_what_is_stored_quantised() {
        for (kind, stored_as) in [(Quantised::Int4, "awq"), (Quantised::Fp8Stored, "fp8")] {
            let dir = tempfile::tempdir().unwrap();
            let shape = Shape { hidden_size: 128, intermediate_size: 256, num_attention_heads: 4, ..TINY };
            write_random(dir.path(), &shape, Dtype::Bf16, Some(kind)).unwrap();
            let limits = limits_for(&[Case::Decode(4)], Tuning::default());
            let directory = dir.path().into();
            let setup = Setup { model: directory, weights: Weights::Disk, device: DeviceChoice::Cpu, limits, seed: 1 };
            let mut engine = InProcess::open(&setup).unwrap();
            let dtype = engine.engine().model().dtype.clone();
            assert!(dtype.contains(stored_as), "{dtype}");
            let readings = engine.sample(Case::Decode(4)).unwrap();
            assert!(readings.iter().all(|reading| reading.value.is_finite() && reading.value > 0.0), "{readings:?}");
        }
    }

    #[test]
    fn a_decoded_token_reads_everything_but_the_embeddings() {
        let all: u64 = TINY.tensors().iter().map(Tensor::n_values).sum();
        assert_eq!(bytes_per_token(tiny(Dtype::F32).path()).unwrap(), 4 * (all - 512 * 64));
    }

    #[test]
    fn the_same_seed_writes_the_same_file() {
        let read = |dir: &tempfile::TempDir| fs::read(dir.path().join("model.safetensors")).unwrap();
        assert_eq!(read(&tiny(Dtype::Bf16)), read(&tiny(Dtype::Bf16)));
    }

    #[test]
    fn random_weights_have_the_spread_models_are_initialised_with() {
        let values = fill(Fill::Normal, 100_000, 1, &normal_table());
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / values.len() as f32;
        // Five standard errors of the mean and of the standard deviation.
        assert!(mean.abs() < 5.0 * 0.02 / 316.0, "{mean}");
        assert!((variance.sqrt() - 0.02).abs() < 5.0 * 0.02 / 447.0, "{}", variance.sqrt());
        assert_ne!(fill(Fill::Normal, 8, 1, &normal_table()), fill(Fill::Normal, 8, 2, &normal_table()));
    }

    #[test]
    fn an_unknown_model_is_refused_with_the_known_names() {
        let dir = tempfile::tempdir().unwrap();
        let error = format!("{:#}", ensure(dir.path(), "gpt-2", Dtype::Bf16, None).unwrap_err());
        assert!(error.contains("tinyllama-1.1b") && error.contains("ember"), "{error}");
        assert!(!dir.path().join("bench").exists());
    }
}
