//! The file tree of an image: sorted paths and their content, every parent present. Owns what goes where; never
//! decides how it is packed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    ImageError,
    libraries::libraries_of,
    recipe::{Content, File, Recipe},
};

/// Where `/lib` and `/lib64` lead: one tree under `/usr`, as the distributions have it. The loader's path inside each
/// binary starts with `/lib64`, so without these links nothing would start.
const MERGED_USR: [(&str, &str); 2] = [("/lib", "usr/lib"), ("/lib64", "usr/lib64")];

/// What is at one path.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Entry {
    /// A directory with its permissions.
    Directory {
        /// Permissions.
        mode: u32,
    },
    /// A file with its permissions.
    File {
        /// Permissions.
        mode: u32,
        /// Content.
        bytes: Vec<u8>,
    },
    /// A symbolic link.
    Link {
        /// Where it leads.
        target: String,
    },
}

/// The file tree of an image, by path without the leading slash.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RootFs {
    entries: BTreeMap<String, Entry>,
}

impl RootFs {
    /// Reads every file that the recipe names.
    pub fn collect(recipe: &Recipe) -> Result<Self, ImageError> {
        let mut tree = Self::default();
        for directory in &recipe.directories {
            tree.add(&directory.path, Entry::Directory { mode: parse_mode(&directory.mode, &directory.path)? })?;
        }
        for file in &recipe.files {
            tree.add_file(file)?;
        }
        Ok(tree)
    }

    /// Paths (without the leading slash, in order) and what is there.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(path, entry)| (path.as_str(), entry))
    }

    fn add_file(&mut self, file: &File) -> Result<(), ImageError> {
        let mode = parse_mode(&file.mode, &file.path)?;
        let bytes = match &file.content {
            Content::Text(text) => text.clone().into_bytes(),
            Content::Source(source) => read(Path::new(source))?,
            Content::Binary(source) => {
                self.add_libraries(Path::new(source))?;
                read(Path::new(source))?
            }
        };
        self.add(&file.path, Entry::File { mode, bytes })
    }

    fn add_libraries(&mut self, binary: &Path) -> Result<(), ImageError> {
        for library in libraries_of(binary)? {
            for (path, target) in MERGED_USR {
                self.add(path, Entry::Link { target: target.to_owned() })?;
            }
            let bytes = read(&library)?;
            self.add(&merged_usr(&library).to_string_lossy(), Entry::File { mode: 0o755, bytes })?;
        }
        Ok(())
    }

    fn add(&mut self, path: &str, entry: Entry) -> Result<(), ImageError> {
        let key = image_path(path)?;
        self.add_parents(&key)?;
        match self.entries.get(&key) {
            Some(there) if *there == entry => Ok(()),
            // A parent that was implied is given its own mode by the recipe.
            Some(Entry::Directory { .. }) if matches!(entry, Entry::Directory { .. }) => {
                self.entries.insert(key, entry);
                Ok(())
            }
            Some(_) => Err(ImageError::Conflict { path: path.to_owned() }),
            None => {
                self.entries.insert(key, entry);
                Ok(())
            }
        }
    }

    fn add_parents(&mut self, key: &str) -> Result<(), ImageError> {
        for (end, _) in key.match_indices('/') {
            let parent = self.entries.entry(key[..end].to_owned()).or_insert(Entry::Directory { mode: 0o755 });
            if !matches!(parent, Entry::Directory { .. }) {
                return Err(ImageError::Conflict { path: format!("/{}", &key[..end]) });
            }
        }
        Ok(())
    }
}

/// `/lib/x` and `/usr/lib/x` are one file; keep the one under `/usr`.
fn merged_usr(library: &Path) -> PathBuf {
    let moved = MERGED_USR.iter().any(|(old, _)| library.starts_with(old));
    if moved { Path::new("/usr").join(library.strip_prefix("/").unwrap_or(library)) } else { library.to_owned() }
}

fn image_path(path: &str) -> Result<String, ImageError> {
    let refuse = || ImageError::ImagePath { path: path.to_owned() };
    let key = path.strip_prefix('/').ok_or_else(refuse)?;
    let plain = key.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if plain { Ok(key.to_owned()) } else { Err(refuse()) }
}

fn parse_mode(mode: &str, path: &str) -> Result<u32, ImageError> {
    let refuse = || ImageError::Mode { mode: mode.to_owned(), path: path.to_owned() };
    let value = u32::from_str_radix(mode, 8).map_err(|_| refuse())?;
    if value <= 0o7777 { Ok(value) } else { Err(refuse()) }
}

fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    fs::read(path).map_err(ImageError::io(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(files: &str) -> Recipe {
        serde_norway::from_str(&format!("config: {{user: '1:1', entrypoint: [/x]}}\n{files}")).unwrap()
    }

    fn paths(tree: &RootFs) -> Vec<&str> {
        tree.entries().map(|(path, _)| path).collect()
    }

    #[test]
    fn every_parent_of_a_file_is_there_and_the_order_is_by_path() {
        let tree = RootFs::collect(&recipe("files: [{path: /usr/bin/b, text: b}, {path: /etc/a, text: a}]")).unwrap();
        assert_eq!(paths(&tree), ["etc", "etc/a", "usr", "usr/bin", "usr/bin/b"]);
    }

    #[test]
    fn the_same_path_with_other_content_is_refused() {
        let twice = recipe("files: [{path: /a, text: x}, {path: /a, text: y}]");
        assert!(matches!(RootFs::collect(&twice), Err(ImageError::Conflict { path }) if path == "/a"));
        let below = recipe("files: [{path: /a, text: x}, {path: /a/b, text: y}]");
        assert!(matches!(RootFs::collect(&below), Err(ImageError::Conflict { path }) if path == "/a"));
    }

    #[test]
    fn paths_that_leave_the_image_are_refused() {
        for path in ["etc/a", "/../a", "/a//b", "/a/./b", "/"] {
            let recipe = recipe(&format!("files: [{{path: {path}, text: x}}]"));
            assert!(matches!(RootFs::collect(&recipe), Err(ImageError::ImagePath { .. })), "{path}");
        }
    }

    #[test]
    fn a_mode_that_is_not_octal_is_refused() {
        let recipe = recipe("files: []\ndirectories: [{path: /tmp, mode: '1779'}]");
        assert!(RootFs::collect(&recipe).unwrap_err().to_string().contains("octal"));
    }

    #[test]
    fn a_dynamic_binary_brings_its_loader_and_libraries_under_usr() {
        let tree =
            RootFs::collect(&recipe("files: [{path: /usr/bin/env, mode: '0755', binary: /usr/bin/env}]")).unwrap();
        let paths = paths(&tree);
        assert!(paths.iter().any(|p| p.starts_with("usr/lib") && p.contains("/libc.so")), "{paths:?}");
        assert!(paths.iter().any(|p| p.contains("/ld-linux")), "{paths:?}");
        assert!(!paths.iter().any(|p| p.starts_with("lib/") || p.starts_with("lib64/")), "{paths:?}");
    }
}
