//! Which files of a repository a model needs. Pure.
//!
//! Weights are safetensors or one .gguf file. The same weights in other formats (.bin, .pth, .onnx, `consolidated`) are
//! left where they are.

use std::collections::BTreeSet;

use reqwest::Url;
use serde::Deserialize;

use crate::digest::Digest;

/// Where large safetensors say which files they are.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Small ones.
const WEIGHTS: &str = "model.safetensors";
/// Taken if they are there.
const BESIDE_WEIGHTS: &[&str] = &[
    "1_LogitScore/config.json",
    "1_Pooling/config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "quantize_config.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// A file that a source has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RemoteFile {
    /// Path inside the repository, or below the prefix.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// What it must be.
    pub digest: Digest,
    /// Where its bytes are.
    pub url: Url,
    /// The version of it that was listed: bytes of another one are refused by its server. `None` where the URL cannot mean other
    /// bytes.
    pub etag: Option<String>,
}

/// What is needed, as far as the listing tells.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Choice {
    /// Files that are needed in any case.
    pub files: Vec<RemoteFile>,
    /// The one of them that names the shards; read it and call [`Choice::with_shards`].
    pub index: Option<RemoteFile>,
}

/// Files that are no model that can be served.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Unfit {
    /// The file that the source names is not there.
    #[error("there is no {file}; its .gguf files: {}", named(.found))]
    NoSuchFile {
        /// What was asked for.
        file: String,
        /// What there is.
        found: Vec<String>,
    },
    /// Several .gguf files and no word on which.
    #[error(
        "there are several .gguf files and one is served, name it (hf://ORG/MODEL/FILE.gguf, s3://BUCKET/PREFIX/FILE.gguf, \
         https://HOST/PATH/FILE.gguf) or publish it alone: {}",
        named(.0)
    )]
    WhichGguf(Vec<String>),
    /// Several folders that are models and no word on which.
    #[error(
        "there are several folders with a config.json, publish each model alone, or name one of an image (oci://…#path=FOLDER): {}",
        named(.0)
    )]
    WhichFolder(Vec<String>),
    /// The folder that the source names holds nothing of a model.
    #[error("its folder /{folder} is not there or holds no file of a model; folders that hold one: {}", named(.found))]
    NoSuchFolder {
        /// What was asked for.
        folder: String,
        /// What there is.
        found: Vec<String>,
    },
    /// No `config.json`.
    #[error("there is no config.json and no .gguf file: this is no model in transformers' layout")]
    NoConfig,
    /// Without it text is not tokens.
    #[error("there is no tokenizer.json, without which text cannot be made tokens")]
    NoTokenizer,
    /// No safetensors.
    #[error("there are no weights in safetensors; what there is: {}", named(.0))]
    NoWeights(Vec<String>),
    /// The index cannot be read.
    #[error("{INDEX} is no index of safetensors: {0}")]
    BadIndex(String),
    /// Not everything was uploaded.
    #[error("{INDEX} names files that are not there, the upload is not complete: {}", named(.0))]
    MissingShards(Vec<String>),
}

/// At most six names; the rest as a number.
fn named(names: &[String]) -> String {
    let shown = names.iter().take(6).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "none".to_owned(),
        n if n > 6 => format!("{shown} and {} more", n - 6),
        _ => shown,
    }
}

/// Names that files of a model may have, but those that [`INDEX`] names.
pub fn well_known() -> impl Iterator<Item = &'static str> {
    ["config.json", "tokenizer.json", WEIGHTS, INDEX].into_iter().chain(BESIDE_WEIGHTS.iter().copied())
}

/// Whether a model could be made of a file: others may change without changing the model.
pub fn is_of_a_model(path: &str) -> bool {
    let by_end = [".safetensors", ".gguf"].iter().any(|end| path.ends_with(end));
    by_end || ["config.json", "tokenizer.json", INDEX].contains(&path) || BESIDE_WEIGHTS.contains(&path)
}

/// Names as the model's own folder has them: an archive or an image may have it below folders of its own, and is not asked which of
/// several is meant.
pub fn rooted(files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, Unfit> {
    let depth = |folder: &str| folder.matches('/').count();
    let configs = files.iter().filter_map(|file| file.path.strip_suffix("config.json"));
    let mut folders: Vec<&str> = configs.filter(|folder| folder.is_empty() || folder.ends_with('/')).collect();
    folders.sort_by_key(|folder| depth(folder));
    let root = match folders[..] {
        [] => return Ok(files),
        [first, second, ..] if depth(first) == depth(second) => {
            return Err(Unfit::WhichFolder(folders.into_iter().map(str::to_owned).collect()));
        }
        [first, ..] => first.to_owned(),
    };
    let inside = |file: RemoteFile| Some(RemoteFile { path: file.path.strip_prefix(&root)?.to_owned(), ..file });
    Ok(files.into_iter().filter_map(inside).collect())
}

/// Names as this folder has them, which is the model's; empty: the root.
pub fn inside(files: Vec<RemoteFile>, folder: &str) -> Result<Vec<RemoteFile>, Unfit> {
    let root = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let name = |file: &RemoteFile| file.path.strip_prefix(&root).map(str::to_owned);
    if !files.iter().filter_map(name).any(|name| !name.contains('/')) {
        let of_file = |file: &RemoteFile| format!("/{}", file.path.rsplit_once('/').map_or("", |(folder, _)| folder));
        let found: BTreeSet<String> = files.iter().map(of_file).collect();
        return Err(Unfit::NoSuchFolder { folder: folder.to_owned(), found: found.into_iter().collect() });
    }
    Ok(files.into_iter().filter_map(|file| Some(RemoteFile { path: name(&file)?, ..file })).collect())
}

/// Picks what the model needs of all files that its source has.
pub fn choose(listing: &[RemoteFile], file: Option<&str>) -> Result<Choice, Unfit> {
    if let Some(file) = file {
        let found = || Unfit::NoSuchFile { file: file.to_owned(), found: paths(listing, is_gguf) };
        return by_path(listing, file).cloned().map(alone).ok_or_else(found);
    }
    let Some(config) = by_path(listing, "config.json") else { return gguf(listing) };
    let weights = match by_path(listing, INDEX) {
        Some(index) => index,
        None => by_path(listing, WEIGHTS).ok_or_else(|| Unfit::NoWeights(paths(listing, is_weights)))?,
    };
    let tokenizer = by_path(listing, "tokenizer.json").ok_or(Unfit::NoTokenizer)?;
    let beside = BESIDE_WEIGHTS.iter().filter_map(|name| by_path(listing, name));
    let files = [config, tokenizer].into_iter().chain(beside).chain([weights]).cloned().collect();
    Ok(Choice { files, index: Some(weights).filter(|weights| weights.path == INDEX).cloned() })
}

impl Choice {
    /// The files with the shards that the index names.
    pub fn with_shards(self, listing: &[RemoteFile], index: &[u8]) -> Result<Vec<RemoteFile>, Unfit> {
        let names = shards(index)?;
        let missing: Vec<String> = names.iter().filter(|name| by_path(listing, name).is_none()).cloned().collect();
        if !missing.is_empty() {
            return Err(Unfit::MissingShards(missing));
        }
        let shards = names.iter().filter_map(|name| by_path(listing, name)).cloned();
        Ok(self.files.into_iter().chain(shards).collect())
    }
}

/// Names of the shards that an index has.
pub fn shards(index: &[u8]) -> Result<BTreeSet<String>, Unfit> {
    let index: Index = serde_json::from_slice(index).map_err(|error| Unfit::BadIndex(error.to_string()))?;
    Ok(index.weight_map.0)
}

/// Of `model.safetensors.index.json`: the files, each once.
#[derive(Deserialize)]
struct Index {
    weight_map: FileNames,
}

#[derive(Deserialize)]
#[serde(from = "std::collections::BTreeMap<String, String>")]
struct FileNames(BTreeSet<String>);

impl From<std::collections::BTreeMap<String, String>> for FileNames {
    fn from(files: std::collections::BTreeMap<String, String>) -> Self {
        Self(files.into_values().collect())
    }
}

/// A repository of .gguf files only.
fn gguf(listing: &[RemoteFile]) -> Result<Choice, Unfit> {
    let mut found = listing.iter().filter(|file| is_gguf(&file.path));
    match (found.next(), found.next()) {
        (None, _) => Err(Unfit::NoConfig),
        (Some(only), None) => Ok(alone(only.clone())),
        (Some(_), Some(_)) => Err(Unfit::WhichGguf(paths(listing, is_gguf))),
    }
}

fn alone(file: RemoteFile) -> Choice {
    Choice { files: vec![file], index: None }
}

fn by_path<'a>(listing: &'a [RemoteFile], path: &str) -> Option<&'a RemoteFile> {
    listing.iter().find(|file| file.path == path)
}

fn paths(listing: &[RemoteFile], which: fn(&str) -> bool) -> Vec<String> {
    listing.iter().map(|file| &file.path).filter(|path| which(path)).cloned().collect()
}

fn is_gguf(path: &str) -> bool {
    path.ends_with(".gguf")
}

fn is_weights(path: &str) -> bool {
    [".bin", ".pth", ".pt", ".h5", ".msgpack", ".onnx", ".safetensors", ".gguf"].iter().any(|end| path.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Vec<RemoteFile> {
        let digest = |number| Digest::git_blob(&format!("{number:040x}")).unwrap();
        let url = Url::parse("https://hub.example/").unwrap();
        let file = |(number, name): (usize, &&str)| RemoteFile {
            path: (*name).to_owned(),
            size: 1,
            digest: digest(number),
            url: url.clone(),
            etag: None,
        };
        names.iter().enumerate().map(file).collect()
    }

    fn chosen(names: &[&str], index: Option<&str>) -> Result<Vec<String>, String> {
        let listing = listing(names);
        let choice = choose(&listing, None).map_err(|unfit| unfit.to_string())?;
        let files = match index {
            Some(index) => choice.with_shards(&listing, index.as_bytes()).map_err(|unfit| unfit.to_string())?,
            None => choice.files,
        };
        Ok(files.into_iter().map(|file| file.path).collect())
    }

    /// As repositories of the hub are: Llama's, GPT-2's, Mistral's.
    #[test]
    fn other_formats_of_the_same_weights_stay_where_they_are() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "flax_model.msgpack",
            "generation_config.json",
            "model.safetensors",
            "onnx/decoder_model.onnx",
            "original/consolidated.00.pth",
            "pytorch_model.bin",
            "tf_model.h5",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.json",
        ];
        let wanted = [
            "config.json",
            "tokenizer.json",
            "generation_config.json",
            "tokenizer_config.json",
            "vocab.json",
            "model.safetensors",
        ];
        assert_eq!(chosen(&names, None).unwrap(), wanted);
    }

    #[test]
    fn the_index_says_which_shards_and_others_are_left() {
        let names = [
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ];
        let index = r#"{"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"}}"#;
        let files = chosen(&names, Some(index)).unwrap();
        assert_eq!(files[2..], [names[4], names[2], names[3]]);
        let half = [names[0], names[2], names[4], names[5]];
        assert!(chosen(&half, Some(index)).unwrap_err().contains("not complete: model-00002-of-00002.safetensors"));
        assert!(chosen(&names, Some("<html>")).unwrap_err().contains("no index of safetensors"));
    }

    #[test]
    fn what_cannot_be_served_says_what_is_missing() {
        let refused = |names: &[&str]| chosen(names, None).unwrap_err();
        assert!(refused(&["README.md"]).contains("no config.json"));
        assert!(refused(&["config.json", "model.safetensors"]).contains("no tokenizer.json"));
        let pickled = refused(&["config.json", "tokenizer.json", "pytorch_model.bin"]);
        assert!(pickled.contains("no weights in safetensors") && pickled.contains("pytorch_model.bin"), "{pickled}");
        assert!(refused(&["a-q4.gguf", "a-q8.gguf"]).contains("one is served, name it"));
        let many: Vec<String> = (0..9).map(|number| format!("{number}.gguf")).collect();
        assert!(refused(&many.iter().map(String::as_str).collect::<Vec<_>>()).ends_with("5.gguf and 3 more"));
    }

    #[test]
    fn a_gguf_file_is_a_model_alone() {
        assert_eq!(chosen(&["README.md", "a-q8.gguf"], None).unwrap(), ["a-q8.gguf"]);
        let listing = listing(&["a-q4.gguf", "a-q8.gguf"]);
        assert_eq!(choose(&listing, Some("a-q8.gguf")).unwrap().files[0].path, "a-q8.gguf");
        let absent = choose(&listing, Some("a-q2.gguf")).unwrap_err().to_string();
        assert_eq!(absent, "there is no a-q2.gguf; its .gguf files: a-q4.gguf, a-q8.gguf");
    }

    #[test]
    fn the_folder_of_the_model_is_where_its_configuration_is() {
        let files = |names: &[&str]| {
            let rooted = rooted(listing(names)).map_err(|unfit| unfit.to_string())?;
            Ok::<_, String>(rooted.into_iter().map(|file| file.path).collect::<Vec<_>>())
        };
        assert_eq!(
            files(&["m/config.json", "m/1_Pooling/config.json", "LICENSE"]).unwrap(),
            ["config.json", "1_Pooling/config.json"]
        );
        assert_eq!(files(&["config.json", "a/config.json"]).unwrap(), ["config.json", "a/config.json"]);
        assert_eq!(files(&["a/model.gguf", "my_config.json"]).unwrap(), ["a/model.gguf", "my_config.json"]);
        let two = files(&["chat/config.json", "draft/config.json", "chat/a/config.json"]).unwrap_err();
        assert!(two.contains("(oci://…#path=FOLDER): chat/, draft/"), "{two}");
    }

    #[test]
    fn a_folder_that_is_named_is_the_model_and_must_hold_one() {
        let named = |folder: &str, names: &[&str]| {
            let inside = inside(listing(names), folder).map_err(|unfit| unfit.to_string())?;
            Ok::<_, String>(inside.into_iter().map(|file| file.path).collect::<Vec<_>>())
        };
        let two = ["m/chat/config.json", "m/chat/1_Pooling/config.json", "m/draft/config.json", "m/chatty/config.json"];
        assert_eq!(named("m/chat", &two).unwrap(), ["config.json", "1_Pooling/config.json"]);
        assert_eq!(named("", &["config.json", "a/config.json"]).unwrap(), ["config.json", "a/config.json"]);
        for (absent, names) in [("m", &two[..]), ("other", &two), ("", &two), ("m/chat/config.json", &two)] {
            let refused = named(absent, names).unwrap_err();
            assert!(refused.starts_with(&format!("its folder /{absent} is not there")), "{refused}");
            assert!(refused.ends_with("/m/chat, /m/chat/1_Pooling, /m/chatty, /m/draft"), "{refused}");
        }
    }
}
