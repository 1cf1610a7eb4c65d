//! Whole checkpoints: what is written is what our engine reads, all families, runs that were stopped, and what is refused.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use stoker_engine::{ModelFiles, model::describe};
use stoker_quantize::{Comparison, Format, Method, Progress, Report, Request, Scheme, run};
use tempfile::TempDir;

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Conversations that ember was not trained on, as texts: every second one, from `first` on.
fn texts(dir: &TempDir, first: usize, n_texts: usize) -> PathBuf {
    let heldout = fs::read_to_string(at("models/ember/eval/heldout.jsonl")).unwrap();
    let text = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let said = |role: &str, content: &Value| format!("<|{role}|>{}<|end|>", content.as_str().unwrap());
        let messages = row["messages"].as_array().unwrap();
        let asked: String = messages.iter().map(|one| said(one["role"].as_str().unwrap(), &one["content"])).collect();
        json!({"text": asked + &said("assistant", &row["expected"])}).to_string()
    };
    let path = dir.path().join(format!("texts-{first}.jsonl"));
    let lines: Vec<String> = heldout.lines().skip(first).step_by(2).take(n_texts).map(text).collect();
    fs::write(&path, lines.join("\n")).unwrap();
    path
}

fn request(dir: &TempDir, model: PathBuf, format: Format, method: Method) -> Request {
    let scheme = Scheme { format, method, group: 32 };
    let out = dir.path().join(format!("{format}-{method}"));
    Request { model, out, scheme, calibration: None, evaluation: None, sequence: 256, samples: 60 }
}

/// Ember, shown some conversations and compared on others.
fn ember(dir: &TempDir, format: Format, method: Method) -> Request {
    let request = request(dir, at("models/ember"), format, method);
    Request { calibration: Some(texts(dir, 0, 24)), evaluation: Some(texts(dir, 1, 24)), ..request }
}

fn done(request: &Request) -> Report {
    run(request, &mut |_| {}).unwrap_or_else(|error| panic!("{error:#}"))
}

fn compared(report: &Report) -> Comparison {
    report.comparison.expect("a text was given")
}

/// Figures of the whole held-out set are in docs/quantisation.md; these are bounds that a mistake would break.
#[test]
fn ember_answers_nearly_as_before_in_every_format_and_methods_lose_less() {
    let dir = tempfile::tempdir().unwrap();
    let of = |format, method| {
        let found = compared(&done(&ember(&dir, format, method)));
        println!("{format} {method}: {found:?}");
        found
    };
    for (format, method, most) in [
        (Format::Fp8, Method::Nearest, 0.015),
        (Format::Fp8Static, Method::Nearest, 0.015),
        (Format::Int8, Method::Nearest, 0.005),
        (Format::Int8, Method::SmoothQuant, 0.005),
    ] {
        let found = of(format, method);
        assert!(found.divergence < most && found.agreement > 0.94, "{format} {method}: {found:?}");
    }
    let [nearest, awq, gptq] =
        [Method::Nearest, Method::Awq, Method::Gptq].map(|method| of(Format::Int4, method).divergence);
    assert!(nearest < 0.2 && awq < nearest && gptq < 0.7 * nearest, "{nearest} {awq} {gptq}");
}

#[test]
fn the_engine_reads_the_formats_that_were_written() {
    let dir = tempfile::tempdir().unwrap();
    for (format, words) in [
        (Format::Fp8, "mlp.down_proj.weight [256, 768], e4m3, scales by output"),
        (Format::Int8, "mlp.down_proj.weight [256, 768], int8, scales by output"),
        (Format::Int4, "mlp.down_proj.weight [256, 768], int4 packed, scales by 32 inputs"),
    ] {
        let request = request(&dir, at("models/ember"), format, Method::Nearest);
        let report = done(&request);
        let described = describe(&ModelFiles::Directory(request.out.clone())).unwrap();
        assert!(described.contains(words), "{described}");
        assert_eq!((report.layers.len(), report.layers[0].len()), (8, 7));
        for file in ["tokenizer.json", "chat_template.jinja", "quantize.json", "quantize.html"] {
            assert!(request.out.join(file).is_file(), "{file}");
        }
    }
}

/// Killed behind its third layer, in the middle of the fourth.
#[test]
fn a_run_that_was_stopped_goes_on_and_ends_with_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Request { evaluation: None, ..ember(&dir, Format::Int4, Method::Gptq) };
    let stopped = Request { out: dir.path().join("stopped"), ..whole.clone() };
    done(&whole);
    let stop = std::panic::AssertUnwindSafe(|| {
        run(&stopped, &mut |progress| {
            if let Progress::Layer(3, ..) = progress {
                std::panic::resume_unwind(Box::new("killed"));
            }
        })
    });
    std::panic::catch_unwind(stop).unwrap_err();
    fs::write(stopped.out.join("model-00004-of-00009.part"), "half").unwrap();
    let other = Request { scheme: Scheme { group: 64, ..stopped.scheme }, ..stopped.clone() };
    refused(&other, &["was begun with group 32, not 64: go on with that, or remove it"]);
    let mut written = Vec::new();
    run(&stopped, &mut |progress| {
        if let Progress::Layer(done, of, _) = progress {
            written.push((done, of));
        }
    })
    .unwrap();
    assert_eq!(written, [(4, 8), (5, 8), (6, 8), (7, 8), (8, 8)]);
    for entry in fs::read_dir(&whole.out).unwrap() {
        let name = entry.unwrap().file_name();
        assert_eq!(fs::read(whole.out.join(&name)).unwrap(), fs::read(stopped.out.join(&name)).unwrap(), "{name:?}");
    }
    refused(&stopped, &["has a model already: give another --out, or remove it"]);
}

/// A tiny model of a family: its configuration and the shapes of its tensors from the goldens, drawn numbers.
fn family(dir: &TempDir, name: &str) -> PathBuf {
    let (golden, out) = (at("tests/goldens/families").join(name), dir.path().join(name));
    fs::create_dir(&out).unwrap();
    fs::copy(golden.join("config.json"), out.join("config.json")).unwrap();
    fs::copy(at("tests/goldens/engine/gqa-f32/tokenizer.json"), out.join("tokenizer.json")).unwrap();
    let golden: Value = serde_json::from_slice(&fs::read(golden.join("golden.json")).unwrap()).unwrap();
    let (mut header, mut data, mut state) = (serde_json::Map::new(), Vec::new(), 1u32);
    for tensor in golden["tensors"].as_array().unwrap() {
        let n_values: u64 = tensor[1].as_array().unwrap().iter().map(|size| size.as_u64().unwrap()).product();
        let start = data.len();
        for _ in 0..n_values {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let drawn = 0.2 * (f32::from((state >> 16) as u16) / 32_768.0 - 1.0) + tensor[2].as_f64().unwrap() as f32;
            data.extend(drawn.to_le_bytes());
        }
        let info = json!({"dtype": "F32", "shape": tensor[1], "data_offsets": [start, data.len()]});
        header.insert(tensor[0].as_str().unwrap().to_owned(), info);
    }
    let mut header = Value::from(header).to_string();
    header.push_str(&" ".repeat((8 - header.len() % 8) % 8));
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    fs::write(out.join("model.safetensors"), bytes).unwrap();
    out
}

/// What is made larger in one place must be smaller in another: norms of each kind, fused projections, biases, shared heads. A fold that
/// missed one would change answers by orders more than eight bits do.
#[test]
fn folds_change_no_answer_of_any_family() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.txt");
    fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(20)).unwrap();
    let mut names: Vec<_> =
        fs::read_dir(at("tests/goldens/families")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert!(names.len() >= 14, "{names:?}");
    for name in names {
        let name = name.into_string().unwrap();
        let model = family(&dir, &name);
        let divergence = |method| {
            let asked = request(&dir, model.clone(), Format::Int8, method);
            let out = dir.path().join(format!("{name}-{method}"));
            let (calibration, evaluation) = (Some(text.clone()), Some(text.clone()));
            compared(&done(&Request { out, calibration, evaluation, sequence: 64, samples: 4, ..asked })).divergence
        };
        let [nearest, smooth] = [Method::Nearest, Method::SmoothQuant].map(divergence);
        println!("{name}: {nearest:.1e} by the nearest, {smooth:.1e} smoothed");
        assert!(smooth < 4.0 * nearest + 1e-6, "{name}: {smooth} against {nearest}");
    }
}

fn refused(request: &Request, parts: &[&str]) {
    let message = format!("{:#}", run(request, &mut |_| {}).expect_err("it was taken"));
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn what_cannot_work_is_refused_before_a_weight_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let plain = request(&dir, at("models/ember"), Format::Int4, Method::Nearest);
    let with = |change: &dyn Fn(&mut Request)| {
        let mut changed = plain.clone();
        change(&mut changed);
        changed
    };
    refused(&with(&|one| one.scheme.method = Method::Gptq), &["--format int4 by --method gptq", "--calibration FILE"]);
    refused(
        &with(&|one| one.scheme.group = 512),
        &["q_proj.weight has 256 inputs, which groups of 512 do not divide: --group 128 would do"],
    );
    refused(&with(&|one| one.model = dir.path().join("nowhere")), &["config.json"]);
    refused(&with(&|one| one.out = at("models/ember")), &["has a model already"]);
    let text = dir.path().join("bad.jsonl");
    fs::write(&text, "{\"text\": \"good\"}\nbad\n").unwrap();
    for change in [|one: &mut Request, text| one.calibration = text, |one: &mut Request, text| one.evaluation = text] {
        refused(&with(&|one| change(one, Some(text.clone()))), &["bad.jsonl line 2: expected an object with `text`"]);
    }
    assert!(!plain.out.exists(), "nothing was made");
    fs::create_dir(&plain.out).unwrap();
    fs::write(plain.out.join("mine"), "").unwrap();
    refused(&plain, &["is not empty: give another --out"]);
    fs::remove_file(plain.out.join("mine")).unwrap();
    done(&plain);
    let again = Request { out: dir.path().join("again"), ..Request { model: plain.out.clone(), ..plain.clone() } };
    refused(&again, &["is quantised already, as int4: take the original model"]);
}

#[test]
fn a_weight_that_is_no_number_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = family(&dir, "llama3");
    let (path, name) = (model.join("model.safetensors"), "model.layers.1.mlp.down_proj.weight");
    let mut bytes = fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let start = data + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    let asked = request(&dir, model, Format::Int8, Method::Nearest);
    refused(&asked, &[&format!("layer 1: tensor {name} has something that is no number")]);
}
