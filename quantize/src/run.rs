//! A run: layer by layer, each shard written before the next layer is read. One that was stopped goes on behind its last shard.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stoker_engine::{
    ModelFiles,
    exec::ProjectionInput,
    model::{Checkpoint, CheckpointFormat, ModelSpec, WeightFormat, WeightStore, spec::Rank},
};

use crate::{
    calibration::{Calibration, Inputs, sequences},
    evaluate::{self, compare},
    fold::{awq, divide, smooth},
    gptq::gptq,
    layers::{Layer, Projection, layers},
    matrix::Matrix,
    output::{self, Tensor, finish, numbers, shard_name, tensors_of, write_json, write_shard},
    report::{LayerErrors, Report, html},
    round::{Grid, Rounded, round},
    scheme::{Format, Method, Scheme},
};

const CONFIG: &str = "config.json";
const STATE: &str = "quantize.json";
const PAGE: &str = "quantize.html";

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Request {
    /// Directory of the model: safetensors in bf16, f16 or f32.
    pub model: PathBuf,
    /// Directory that is made.
    pub out: PathBuf,
    /// What of it.
    pub scheme: Scheme,
    /// Text that the model is shown.
    pub calibration: Option<PathBuf>,
    /// Text on which both are compared at the end.
    pub evaluation: Option<PathBuf>,
    /// Tokens of a sequence of either.
    pub sequence: usize,
    /// Sequences of either at most.
    pub samples: usize,
}

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// So many layers of so many are written; what the last one lost.
    Layer(usize, usize, &'a LayerErrors),
    /// Both models read the text.
    Comparing,
}

/// Does it, or goes on with it.
pub fn run(request: &Request, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Report> {
    let job = Job::open(request)?;
    let mut report = job.begin()?;
    let mut calibration = job.calibration()?;
    for idx in 0..job.layers.len() {
        let is_done = idx < report.layers.len();
        let inputs = calibration.as_mut().map(|texts| texts.layer(idx, !is_done)).unwrap_or_default();
        if is_done {
            continue;
        }
        report.layers.push(job.layer(idx, inputs).with_context(|| format!("layer {idx}"))?);
        write_json(&request.out.join(STATE), &report)?;
        progress(Progress::Layer(idx + 1, job.layers.len(), &report.layers[idx]));
    }
    drop(calibration);
    job.finish()?;
    if let Some(text) = &request.evaluation {
        progress(Progress::Comparing);
        report.comparison = Some(compare(&request.model, &request.out, text, request.sequence, request.samples)?);
    }
    write_json(&request.out.join(STATE), &report)?;
    fs::write(request.out.join(PAGE), html(&report)).with_context(|| format!("write {PAGE}"))?;
    Ok(report)
}

struct Job<'a> {
    request: &'a Request,
    config: Value,
    weights: WeightStore,
    layers: Vec<Layer>,
}

impl<'a> Job<'a> {
    /// Refuses what cannot work before a weight is read.
    fn open(request: &'a Request) -> Result<Self> {
        let Request { model, scheme, calibration, .. } = request;
        scheme.check()?;
        if scheme.is_calibrated() && calibration.is_none() {
            bail!(
                "--format {} by --method {} looks at what enters projections: give it text with --calibration FILE",
                scheme.format,
                scheme.method
            );
        }
        let checkpoint = Checkpoint::open(&ModelFiles::Directory(model.clone()))?;
        let name = model.display();
        ensure!(
            checkpoint.weights.format() == CheckpointFormat::HuggingFace,
            "{name} is GGUF: take the model's safetensors"
        );
        if let Some(quantization) = &checkpoint.config.quantization {
            bail!("{name} is quantised already, as {}: take the original model", quantization.name());
        }
        let spec = ModelSpec::new(&checkpoint.config, CheckpointFormat::HuggingFace)?;
        checkpoint.weights.clone().bind(&spec, Rank::ALONE)?;
        let layers = layers(&spec);
        layers
            .iter()
            .flat_map(|layer| &layer.projections)
            .try_for_each(|projection| check_shape(projection, scheme))?;
        // Both, so that nothing is found wrong with a text when all layers are written.
        for text in calibration.iter().chain(&request.evaluation) {
            sequences(text, &checkpoint.assets.tokenizer, request.sequence, request.samples)?;
        }
        let config = fs::read(model.join(CONFIG)).with_context(|| format!("read {CONFIG}"))?;
        Ok(Self { request, config: serde_json::from_slice(&config)?, weights: checkpoint.weights, layers })
    }

    /// Looks for what an earlier run left.
    fn begin(&self) -> Result<Report> {
        let (out, settings) = (&self.request.out, self.settings());
        let (name, state) = (out.display(), out.join(STATE));
        fs::create_dir_all(out).with_context(|| format!("make {name}"))?;
        ensure!(!out.join(CONFIG).exists(), "{name} has a model already: give another --out, or remove it");
        if !state.exists() {
            let mut entries = fs::read_dir(out).with_context(|| format!("list {name}"))?;
            ensure!(entries.next().is_none(), "{name} is not empty: give another --out");
            return Ok(Report { settings, ..Report::default() });
        }
        let text = fs::read(&state).with_context(|| format!("read {STATE}"))?;
        let found: Report =
            serde_json::from_slice(&text).with_context(|| format!("{}: not what a run left", state.display()))?;
        let other = settings.iter().find(|(name, value)| found.settings.get(*name) != Some(*value));
        if let Some((setting, value)) = other {
            let before = found.settings.get(setting).map_or("nothing", String::as_str);
            bail!("{name} was begun with {setting} {before}, not {value}: go on with that, or remove it");
        }
        Ok(found)
    }

    fn settings(&self) -> BTreeMap<String, String> {
        let Request { model, scheme, calibration, sequence, samples, .. } = self.request;
        let path = |path: &Path| path.display().to_string();
        let group = (scheme.format == Format::Int4).then(|| ("group", scheme.group.to_string()));
        let texts = calibration.iter().flat_map(|text| {
            [("calibration", path(text)), ("sequence", sequence.to_string()), ("samples", samples.to_string())]
        });
        let all =
            [("model", path(model)), ("format", scheme.format.to_string()), ("method", scheme.method.to_string())];
        all.into_iter().chain(group).chain(texts).map(|(name, value)| (name.to_owned(), value)).collect()
    }

    fn calibration(&self) -> Result<Option<Calibration>> {
        let Request { model, scheme, calibration, sequence, samples, .. } = self.request;
        let Some(text) = calibration else { return Ok(None) };
        let opened = evaluate::open(model, *sequence)?;
        let sequences = sequences(text, &opened.parts.tokenizer, *sequence, *samples)?;
        Ok(Some(Calibration::new(opened.executor, &sequences, scheme.method == Method::Gptq)))
    }

    /// Writes one layer.
    fn layer(&self, idx: usize, mut inputs: BTreeMap<ProjectionInput, Inputs>) -> Result<LayerErrors> {
        let (layer, scheme) = (&self.layers[idx], &self.request.scheme);
        let mut tensors = layer
            .tensors
            .iter()
            .map(|name| Ok((name.clone(), self.numbers(name)?)))
            .collect::<Result<BTreeMap<_, _>>>()?;
        self.fold(layer, &mut tensors, &mut inputs);
        let (mut written, mut errors) = (Vec::new(), LayerErrors::new());
        for projection in &layer.projections {
            let weights = tensors.remove(&projection.tensor).expect("it was read");
            let (stored, inputs) = (self.stored(&projection.tensor), inputs.get(&projection.input));
            let rounded = rounded(&weights, scheme, stored, inputs).with_context(|| projection.tensor.clone())?;
            errors.insert(short(projection.module()).to_owned(), error(&weights, &rounded, inputs));
            let largest = inputs.filter(|_| scheme.format == Format::Fp8Static);
            let largest = largest.map(|inputs| inputs.largest.iter().copied().fold(0.0, f32::max));
            let grid = Grid::new(scheme.format, stored);
            written.extend(tensors_of(projection.module(), &rounded, grid, scheme.format, largest));
        }
        for (name, numbers) in tensors {
            let shape = self.view(&name).shape.to_vec();
            written.push(Tensor::plain(name.clone(), self.stored(&name), shape, &numbers.values));
        }
        write_shard(&self.shard(idx + 1), &written)?;
        Ok(errors)
    }

    /// Makes inputs that matter larger, where the method does.
    fn fold(
        &self,
        layer: &Layer,
        tensors: &mut BTreeMap<String, Matrix>,
        inputs: &mut BTreeMap<ProjectionInput, Inputs>,
    ) {
        let scheme = &self.request.scheme;
        if !matches!(scheme.method, Method::Awq | Method::SmoothQuant) {
            return;
        }
        for source in &layer.sources {
            let fed: Vec<&String> =
                layer.projections.iter().filter(|one| one.input == source.input).map(|one| &one.tensor).collect();
            let Some(inputs) = inputs.get_mut(&source.input) else { continue };
            let weights: Vec<&Matrix> = fed.iter().map(|name| &tensors[*name]).collect();
            let factors = match scheme.method {
                Method::Awq => awq(&weights, inputs, scheme, self.stored(fed[0])),
                _ => smooth(&weights, inputs),
            };
            for name in fed {
                tensors.get_mut(name).expect("it was read").scale_columns(&factors);
            }
            divide(source, &factors, tensors);
            inputs.divide(&factors);
        }
    }

    /// What is no layer's, and all that makes a directory a model.
    fn finish(&self) -> Result<()> {
        let of_layers: Vec<&String> = self.layers.iter().flat_map(|layer| &layer.tensors).collect();
        let rest = self.weights.tensors().filter(|tensor| !of_layers.iter().any(|name| *name == tensor.name));
        let rest = rest.map(|tensor| {
            let (name, shape, bytes) = (tensor.name.to_owned(), tensor.shape.to_vec(), tensor.bytes.to_vec());
            Tensor { name, dtype: output::dtype(tensor.format.unwrap_or(WeightFormat::F32)), shape, bytes }
        });
        let n_shards = self.layers.len() + 1;
        write_shard(&self.shard(n_shards), &rest.collect::<Vec<_>>())?;
        let shards: Vec<PathBuf> = (1..=n_shards).map(|idx| self.shard(idx)).collect();
        let quantization = self.request.scheme.config(&["lm_head".to_owned()]);
        finish(&self.request.model, &self.request.out, &shards, self.config.clone(), quantization)
    }

    fn shard(&self, idx: usize) -> PathBuf {
        self.request.out.join(shard_name(idx, self.layers.len() + 1))
    }

    fn view(&self, name: &str) -> stoker_engine::model::TensorView<'_> {
        self.weights.tensors().find(|tensor| tensor.name == name).expect("it was found when the model was opened")
    }

    fn stored(&self, name: &str) -> WeightFormat {
        self.view(name).format.expect("a number format was found when the model was opened")
    }

    fn numbers(&self, name: &str) -> Result<Matrix> {
        let view = self.view(name);
        let numbers = numbers(self.stored(name), view.shape, view.bytes);
        ensure!(numbers.values.iter().all(|value| value.is_finite()), "tensor {name} has something that is no number");
        Ok(numbers)
    }
}

fn check_shape(projection: &Projection, scheme: &Scheme) -> Result<()> {
    let (name, n_inputs, group) = (&projection.tensor, projection.n_inputs, scheme.group);
    if scheme.format != Format::Int4 || n_inputs.is_multiple_of(group) {
        return Ok(());
    }
    let nearest = [128, 64, 32].into_iter().find(|size| n_inputs.is_multiple_of(*size));
    let advice = nearest.map_or("take --format int8".to_owned(), |size| format!("--group {size} would do for it"));
    bail!("{name} has {n_inputs} inputs, which groups of {group} do not divide: {advice}")
}

fn rounded(weights: &Matrix, scheme: &Scheme, stored: WeightFormat, inputs: Option<&Inputs>) -> Result<Rounded> {
    match inputs {
        Some(Inputs { gram: Some(gram), .. }) => gptq(weights, scheme, stored, gram),
        // Eight bits lose little, whatever the largest code stands for.
        _ if scheme.format != Format::Int4 => Ok(round(weights, scheme, stored, None)),
        Some(inputs) => Ok(round(weights, scheme, stored, Some(&inputs.mean_square))),
        None => Ok(round(weights, scheme, stored, Some(&vec![1.0; weights.width]))),
    }
}

/// See [`LayerErrors`].
fn error(weights: &Matrix, rounded: &Rounded, inputs: Option<&Inputs>) -> f64 {
    let lost = weights.minus(&rounded.numbers());
    let energy = |matrix: &Matrix| match inputs {
        Some(inputs) => matrix.energy_with(&inputs.rows),
        None => matrix.values.iter().map(|value| f64::from(value * value)).sum(),
    };
    let whole = energy(weights);
    let share = if whole > 0.0 { (energy(&lost) / whole).sqrt() } else { 0.0 };
    // What is read back from a file is then what was written.
    (share * 1e6).round() / 1e6
}

/// The last part of a module's name.
fn short(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}
