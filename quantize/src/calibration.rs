//! Texts that a model is shown, and what is noted of what enters its projections on them.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};
use faer::Mat;
use serde::Deserialize;
use stoker_engine::{
    TokenId, Tokenizer,
    exec::{CpuExecutor, Passage, ProjectionInput},
};

use crate::matrix::Matrix;

/// Rows of inputs that are kept as they are, to try factors and to measure errors on; spread over all texts.
const KEPT_ROWS: usize = 512;

/// A line of a file of texts.
#[derive(Deserialize)]
struct Line {
    text: String,
}

/// Texts of a file as sequences of `length` tokens at most, `most` of them: each text by itself, long ones cut. A `.jsonl` file has an object
/// with `text` a line, any other file is one text.
pub(crate) fn sequences(path: &Path, tokenizer: &Tokenizer, length: usize, most: usize) -> Result<Vec<Vec<TokenId>>> {
    let name = path.display();
    let content = fs::read_to_string(path).with_context(|| format!("read {name}"))?;
    let is_jsonl = path.extension().is_some_and(|extension| extension == "jsonl");
    let texts = if is_jsonl { lines(&content, path)? } else { vec![content] };
    let mut found = Vec::new();
    for (idx, text) in texts.iter().enumerate() {
        let tokens = tokenizer.encode(text, true).with_context(|| format!("{name}, text {}", idx + 1))?;
        // One token alone foretells nothing.
        found.extend(tokens.chunks(length).filter(|tokens| tokens.len() > 1).map(<[TokenId]>::to_vec));
        if found.len() >= most {
            break;
        }
    }
    found.truncate(most);
    ensure!(!found.is_empty(), "{name} has no text of two tokens: give it some");
    Ok(found)
}

fn lines(content: &str, path: &Path) -> Result<Vec<String>> {
    let line = |(idx, line): (usize, &str)| {
        let place = || {
            format!(
                "{} line {}: expected an object with `text`, such as {{\"text\": \"...\"}}",
                path.display(),
                idx + 1
            )
        };
        serde_json::from_str(line).map(|line: Line| line.text).with_context(place)
    };
    content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(line).collect()
}

/// What entered some projections of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    n_rows: usize,
    /// By column.
    pub(crate) mean_square: Vec<f32>,
    /// By column.
    pub(crate) mean_size: Vec<f32>,
    /// By column.
    pub(crate) largest: Vec<f32>,
    /// Some rows as they are.
    pub(crate) rows: Matrix,
    /// How columns go together, where that was asked for.
    pub(crate) gram: Option<Mat<f32>>,
}

impl Inputs {
    fn new(width: usize, with_gram: bool) -> Self {
        Self {
            n_rows: 0,
            mean_square: vec![0.0; width],
            mean_size: vec![0.0; width],
            largest: vec![0.0; width],
            rows: Matrix { width, values: Vec::new() },
            gram: with_gram.then(|| Mat::zeros(width, width)),
        }
    }

    /// Takes rows in; of them `kept` are kept, evenly spread.
    fn take(&mut self, rows: &Matrix, kept: usize) {
        let n_rows = rows.n_rows();
        let before = self.n_rows as f32 / (self.n_rows + n_rows) as f32;
        let each = 1.0 / (self.n_rows + n_rows) as f32;
        self.n_rows += n_rows;
        self.mean_square.iter_mut().chain(&mut self.mean_size).for_each(|mean| *mean *= before);
        for row in rows.values.chunks_exact(rows.width) {
            for (column, value) in row.iter().enumerate() {
                self.mean_square[column] += value * value * each;
                self.mean_size[column] += value.abs() * each;
                self.largest[column] = self.largest[column].max(value.abs());
            }
        }
        let step = n_rows.div_ceil(kept.max(1));
        self.rows.values.extend(rows.values.chunks_exact(rows.width).step_by(step).flatten());
        if let Some(gram) = &mut self.gram {
            rows.add_gram_to(gram);
        }
    }

    /// The same of inputs whose columns were divided by these factors.
    pub(crate) fn divide(&mut self, factors: &[f32]) {
        for (column, factor) in factors.iter().enumerate() {
            self.mean_square[column] /= factor * factor;
            self.mean_size[column] /= factor;
            self.largest[column] /= factor;
        }
        let inverse: Vec<f32> = factors.iter().map(|factor| factor.recip()).collect();
        self.rows.scale_columns(&inverse);
        if let Some(gram) = &mut self.gram {
            for (values, own) in gram.col_iter_mut().zip(&inverse) {
                values.iter_mut().zip(&inverse).for_each(|(value, factor)| *value *= factor * own);
            }
        }
    }
}

/// Texts on their way through a model.
pub(crate) struct Calibration {
    model: CpuExecutor,
    passages: Vec<Passage>,
    with_grams: bool,
}

impl Calibration {
    /// Before the first layer.
    pub(crate) fn new(mut model: CpuExecutor, sequences: &[Vec<TokenId>], with_grams: bool) -> Self {
        let passages = sequences.iter().map(|tokens| model.passage(tokens)).collect();
        Self { model, passages, with_grams }
    }

    /// Goes through the next layer, and notes what entered its projections, if that is wanted.
    pub(crate) fn layer(&mut self, idx: usize, is_noted: bool) -> BTreeMap<ProjectionInput, Inputs> {
        let Self { model, passages, with_grams } = self;
        let (mut noted, kept) = (BTreeMap::new(), KEPT_ROWS.div_ceil(passages.len()));
        for passage in passages {
            model.pass(passage, idx, &mut |input, rows| {
                if is_noted {
                    let rows = Matrix { width: rows.width, values: rows.values.to_vec() };
                    noted.entry(input).or_insert_with(|| Inputs::new(rows.width, *with_grams)).take(&rows, kept);
                }
            });
        }
        noted
    }
}

#[cfg(test)]
mod tests {
    use faer::mat;

    use super::*;

    fn written(name: &str, content: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        (dir, path)
    }

    #[test]
    fn a_bad_line_is_named_and_no_text_is_refused() {
        let (_dir, path) = written("c.jsonl", "{\"text\": \"abcd\"}\n\n{\"txt\": 1}\n");
        let refused = format!("{:#}", sequences(&path, &Tokenizer::bytes(), 2, 9).unwrap_err());
        assert!(refused.contains("c.jsonl line 3: expected an object with `text`"), "{refused}");
        let (_dir, path) = written("c.txt", "");
        let refused = sequences(&path, &Tokenizer::bytes(), 8, 9).unwrap_err().to_string();
        assert!(refused.ends_with("c.txt has no text of two tokens: give it some"), "{refused}");
    }

    #[test]
    fn each_text_is_cut_by_itself() {
        let (_dir, path) = written("c.jsonl", "{\"text\": \"abcdefg\"}\n{\"text\": \"xy\"}\n{\"text\": \"z\"}\n");
        let of = |most| sequences(&path, &Tokenizer::bytes(), 3, most).unwrap();
        assert_eq!(of(9), [vec![97, 98, 99], vec![100, 101, 102], vec![120, 121]]);
        assert_eq!(of(1), [[97, 98, 99]]);
    }

    #[test]
    fn inputs_are_noted_by_column_and_divided_with_all_that_is_known_of_them() {
        let mut inputs = Inputs::new(2, true);
        inputs.take(&Matrix { width: 2, values: vec![1.0, -4.0, 3.0, 0.0] }, 1);
        inputs.take(&Matrix { width: 2, values: vec![2.0, 2.0] }, 1);
        let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(close(&inputs.mean_square, &[14.0 / 3.0, 20.0 / 3.0]) && close(&inputs.mean_size, &[2.0, 2.0]));
        assert_eq!(
            (inputs.largest.as_slice(), inputs.rows.values.as_slice()),
            ([3.0, 4.0].as_slice(), [1.0, -4.0, 2.0, 2.0].as_slice())
        );
        assert_eq!(inputs.gram, Some(mat![[14.0, 0.0], [0.0, 20.0]]));
        inputs.divide(&[2.0, 4.0]);
        assert!(close(&inputs.mean_square, &[14.0 / 12.0, 20.0 / 48.0]) && close(&inputs.largest, &[1.5, 1.0]));
        assert_eq!(inputs.rows.values, [0.5, -1.0, 1.0, 0.5]);
        assert_eq!(inputs.gram, Some(mat![[3.5, 0.0], [0.0, 1.25]]));
    }
}
