//! The recipe of an image: what it holds and how it starts, as YAML. Owns the syntax and the variables; never touches
//! the files it names.

use std::{collections::BTreeMap, fs, path::Path};

use serde::Deserialize;

use crate::ImageError;

/// Where the loader looks without being told.
const LIBRARIES: &str = "/usr/lib";

/// What `${NAME}` stands for in a recipe.
pub type Variables = BTreeMap<String, String>;

/// An image, as written in `recipes/*.yaml`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Recipe {
    /// How a container of this image starts.
    pub config: ImageConfig,
    /// Directories that need no file to exist.
    #[serde(default)]
    pub directories: Vec<Directory>,
    /// Files and their content.
    pub files: Vec<File>,
}

/// How a container starts.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageConfig {
    /// `UID:GID` the process runs as. Numbers, so that a kubelet can check `runAsNonRoot`.
    pub user: String,
    /// The command that pods keep when they only give `args`.
    pub entrypoint: Vec<String>,
    /// Environment of the process.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Labels for people and scanners.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// An empty directory.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Directory {
    /// Where it is in the image.
    pub path: String,
    /// Permissions, in octal.
    #[serde(default = "directory_mode")]
    pub mode: String,
}

/// One file.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(try_from = "WrittenFile")]
pub struct File {
    /// Where it is in the image.
    pub path: String,
    /// Permissions, in octal.
    pub mode: String,
    /// Where its content comes from.
    pub content: Content,
}

/// Where the content of a file comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A file of this machine.
    Source(String),
    /// An executable of this machine; the shared libraries it needs come along.
    Binary(String),
    /// The text itself.
    Text(String),
}

/// A file as people write it: a path and one of `source`, `binary`, `text`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct WrittenFile {
    path: String,
    mode: Option<String>,
    source: Option<String>,
    binary: Option<String>,
    text: Option<String>,
}

impl TryFrom<WrittenFile> for File {
    type Error = String;

    fn try_from(written: WrittenFile) -> Result<Self, String> {
        let WrittenFile { path, mode, source, binary, text } = written;
        let (default_mode, content) = match (source, binary, text) {
            (Some(source), None, None) => ("0644", Content::Source(source)),
            (None, Some(binary), None) => ("0755", Content::Binary(binary)),
            (None, None, Some(text)) => ("0644", Content::Text(text)),
            _ => return Err(format!("{path}: give exactly one of source, binary and text")),
        };
        Ok(Self { path, mode: mode.unwrap_or_else(|| default_mode.to_owned()), content })
    }
}

impl Recipe {
    /// Reads a recipe and puts the variables in.
    pub fn read(path: &Path, variables: &Variables) -> Result<Self, ImageError> {
        let text = fs::read_to_string(path).map_err(ImageError::io(path))?;
        let recipe: Self = serde_norway::from_str(&text)
            .map_err(|e| ImageError::Recipe { path: path.to_owned(), reason: e.to_string() })?;
        recipe.expand(variables)
    }

    /// The same with one more shared library; those that it needs itself come along.
    pub fn with_library(mut self, library: &Path) -> Result<Self, ImageError> {
        let source = library.display().to_string();
        let name = library.file_name().ok_or_else(|| ImageError::ImagePath { path: source.clone() })?;
        let path = format!("{LIBRARIES}/{}", name.to_string_lossy());
        self.files.push(File { path, mode: "0755".to_owned(), content: Content::Binary(source) });
        Ok(self)
    }

    /// Replaces `${NAME}` in the paths of files of this machine. Nothing else in a recipe varies.
    fn expand(mut self, variables: &Variables) -> Result<Self, ImageError> {
        for file in &mut self.files {
            if let Content::Source(path) | Content::Binary(path) = &mut file.content {
                *path = expand(path, variables)?;
            }
        }
        Ok(self)
    }
}

fn expand(text: &str, variables: &Variables) -> Result<String, ImageError> {
    let Some((before, rest)) = text.split_once("${") else { return Ok(text.to_owned()) };
    let (name, after) = rest.split_once('}').ok_or_else(|| ImageError::UnclosedVariable { text: text.to_owned() })?;
    let value = variables.get(name).ok_or_else(|| ImageError::UnknownVariable { name: name.to_owned() })?;
    Ok(format!("{before}{value}{}", expand(after, variables)?))
}

fn directory_mode() -> String {
    "0755".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(yaml: &str) -> Result<Recipe, serde_norway::Error> {
        serde_norway::from_str(yaml)
    }

    #[test]
    fn variables_are_replaced_in_paths_of_this_machine() {
        let variables = Variables::from([("DIR".into(), "/out".into()), ("NAME".into(), "agent".into())]);
        assert_eq!(expand("${DIR}/x/${NAME}", &variables).unwrap(), "/out/x/agent");
        assert_eq!(expand("/etc/plain", &variables).unwrap(), "/etc/plain");
    }

    #[test]
    fn an_unknown_variable_is_an_error_that_says_how_to_set_it() {
        let error = expand("${BIN}/x", &Variables::new()).unwrap_err();
        assert_eq!(error.to_string(), "the recipe uses ${BIN}: pass --set BIN=VALUE");
        assert!(expand("${BIN", &Variables::new()).unwrap_err().to_string().contains("without `}`"));
    }

    #[test]
    fn a_library_goes_where_the_loader_looks() {
        let recipe = parse("config: {user: '1:1', entrypoint: [/x]}\nfiles: []").unwrap();
        let file = recipe.with_library(Path::new("/opt/cuda/libcublasLt.so.13")).unwrap().files.remove(0);
        assert_eq!(file.path, "/usr/lib/libcublasLt.so.13");
        assert_eq!(file.content, Content::Binary("/opt/cuda/libcublasLt.so.13".into()));
    }

    #[test]
    fn a_misspelt_field_is_refused() {
        let yaml = "config: {user: '1:1', entrypoint: [/x], enviroment: {}}\nfiles: []";
        assert!(parse(yaml).unwrap_err().to_string().contains("enviroment"));
    }

    #[test]
    fn a_file_has_exactly_one_content() {
        let file =
            |rest: &str| parse(&format!("config: {{user: '1:1', entrypoint: [/x]}}\nfiles: [{{path: /x{rest}}}]"));
        assert_eq!(file(", text: hello").unwrap().files[0].content, Content::Text("hello".into()));
        assert!(file("").unwrap_err().to_string().contains("exactly one of source, binary and text"));
        assert!(file(", text: hello, source: /y").is_err());
        assert!(file(", text: hello, optional: true").is_err());
    }
}
