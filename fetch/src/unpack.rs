//! Files out of layers that hold several. Each is left where a download of it would be, whole, so that it is held to its SHA-256 and
//! becomes a blob of the cache as every other file does.
//!
//! The layer was held to its hash before. Links, devices and owners are nothing to a model.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufReader, Read, Write},
    path::{Component, Path},
};

use flate2::read::MultiGzDecoder;

use crate::{
    blob::note_whole,
    cache::Cache,
    choose::{RemoteFile, is_of_a_model},
    digest::Digest,
    error::FetchError,
};

/// Of one read.
const PIECE_BYTES: usize = 1 << 20;
/// Where an image keeps its model, if it is not at its root.
const FOLDER_OF_IMAGE: &str = "models";

/// A file that holds others.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    pub(crate) file: RemoteFile,
    pub(crate) packing: Packing,
    pub(crate) holds: Holds,
}

/// How it holds them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Packing {
    Tar,
    TarGzip,
}

/// Where in it a model may be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Holds {
    /// It was packed as a model.
    Anything,
    /// It is a part of a file system: at its root or below `/models`, and what later layers say of a file holds.
    RootOfImage,
}

/// Files of a model by their path.
type Found = BTreeMap<String, RemoteFile>;

/// Takes the files of a model out of layers that are whole in the cache, in their order.
pub(crate) fn unpack(cache: &Cache, key: &str, layers: &[Packed]) -> Result<Vec<RemoteFile>, FetchError> {
    let mut found = Found::new();
    for layer in layers {
        let path = cache.blob(&layer.file.digest);
        let bad = |error| FetchError::io("unpack", &path)(error);
        let file = BufReader::with_capacity(PIECE_BYTES, File::open(&path).map_err(bad)?);
        let bytes: Box<dyn Read> = match layer.packing {
            Packing::Tar => Box::new(file),
            Packing::TarGzip => Box::new(MultiGzDecoder::new(file)),
        };
        let mut archive = tar::Archive::new(bytes);
        for entry in archive.entries().map_err(bad)? {
            take(cache, key, layer, entry.map_err(bad)?, &mut found)?;
        }
    }
    Ok(found.into_values().collect())
}

fn take(
    cache: &Cache,
    key: &str,
    layer: &Packed,
    mut entry: tar::Entry<'_, impl Read>,
    found: &mut Found,
) -> Result<(), FetchError> {
    let bad = |error| FetchError::io("unpack", cache.blob(&layer.file.digest))(error);
    let Some(path) = plain(&entry.path().map_err(bad)?) else { return Ok(()) };
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", &path));
    if let Some(gone) = name.strip_prefix(".wh.") {
        remove(found, folder, gone);
    } else if entry.header().entry_type().is_file() && layer.holds.may_have(&path) && is_of_a_model(name) {
        let (size, digest) = store(cache, key, &mut entry).map_err(bad)?;
        let url = layer.file.url.clone();
        found.insert(path.clone(), RemoteFile { path, size, digest, url, etag: None });
    }
    Ok(())
}

impl Holds {
    fn may_have(self, path: &str) -> bool {
        let below = path.strip_prefix(FOLDER_OF_IMAGE).is_some_and(|rest| rest.starts_with('/'));
        self == Self::Anything || !path.contains('/') || below
    }
}

/// What an image's layer says is gone: one name of a folder, with what is below it, or all of the folder.
fn remove(found: &mut Found, folder: &str, gone: &str) {
    let within = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let all = gone == ".wh..opq";
    let is_gone = |path: &str| {
        let rest = path.strip_prefix(&within);
        rest.is_some_and(|rest| {
            all || rest.strip_prefix(gone).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    };
    found.retain(|path, _| !is_gone(path));
}

/// A path that leads nowhere else; `None` for one that does, or is none of a file.
fn plain(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => parts.push(name.to_str()?),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

/// A small file that was unpacked, if it was.
pub(crate) fn read(cache: &Cache, key: &str, file: &RemoteFile) -> Option<Vec<u8>> {
    let bytes = fs::read(cache.partial_dir(key).join(file.digest.to_string())).ok()?;
    let mut hasher = file.digest.hasher(file.size);
    hasher.update(&bytes);
    (hasher.finish() == file.digest).then_some(bytes)
}

/// Writes a file, and notes that all of it is there.
fn store(cache: &Cache, key: &str, bytes: &mut impl Read) -> io::Result<(u64, Digest)> {
    let made = cache.partial_dir(key).join("unpacked");
    let mut file = File::create(&made)?;
    let (mut size, mut buffer) = (0, vec![0; PIECE_BYTES]);
    let mut hasher = Digest::Sha256(String::new()).hasher(0);
    loop {
        let count = bytes.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
        file.write_all(&buffer[..count])?;
        size += count as u64;
    }
    let digest = hasher.finish();
    let place = cache.partial_dir(key).join(digest.to_string());
    fs::rename(made, &place)?;
    note_whole(&place, size)?;
    Ok((size, digest))
}

#[cfg(test)]
mod tests {
    use reqwest::Url;

    use super::*;

    const KEY: &str = "oci--m@0";

    fn tar_of(files: &[(&str, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            builder.append_data(&mut header, path, content.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    /// Paths and contents that come out of layers.
    fn unpacked(layers: &[(Vec<u8>, Packing, Holds)]) -> Result<Vec<(String, String)>, FetchError> {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(root.path(), None).unwrap();
        fs::create_dir_all(cache.partial_dir(KEY)).unwrap();
        let packed = |(bytes, packing, holds): &(Vec<u8>, Packing, Holds)| {
            let digest = Digest::sha256(&crate::digest::sha256_hex(bytes)).unwrap();
            fs::write(cache.blob(&digest), bytes).unwrap();
            let url = Url::parse("https://registry.example/").unwrap();
            let file = RemoteFile { path: "layer".to_owned(), size: bytes.len() as u64, digest, url, etag: None };
            Packed { file, packing: *packing, holds: *holds }
        };
        let layers: Vec<Packed> = layers.iter().map(packed).collect();
        let files = unpack(&cache, KEY, &layers)?;
        let content = |file: RemoteFile| {
            let content = String::from_utf8(read(&cache, KEY, &file).unwrap()).unwrap();
            assert_eq!(file.size, content.len() as u64);
            (file.path, content)
        };
        Ok(files.into_iter().map(content).collect())
    }

    fn pair(path: &str, content: &str) -> (String, String) {
        (path.to_owned(), content.to_owned())
    }

    #[test]
    fn files_of_a_model_come_out_and_others_stay() {
        let files =
            [("./m/config.json", "{}"), ("m/model.safetensors", "w"), ("m/README.md", "no"), ("m/run.sh", "no")];
        let wanted = [pair("m/config.json", "{}"), pair("m/model.safetensors", "w")];
        let plain = tar_of(&files);
        assert_eq!(unpacked(&[(gzip(&plain), Packing::TarGzip, Holds::Anything)]).unwrap(), wanted);
        assert_eq!(unpacked(&[(plain, Packing::Tar, Holds::Anything)]).unwrap(), wanted);
    }

    #[test]
    fn of_an_image_the_last_layer_counts_and_only_root_and_models() {
        let base = tar_of(&[
            ("etc/config.json", "no"),
            ("models/a/config.json", "old"),
            ("models/b/model.gguf", "gone"),
            ("merges.txt", "m"),
        ]);
        let top = tar_of(&[("models/a/config.json", "new"), ("models/.wh.b", ""), (".wh.merges.txt", "")]);
        let layers =
            |top: Vec<u8>| [(base.clone(), Packing::Tar, Holds::RootOfImage), (top, Packing::Tar, Holds::RootOfImage)];
        assert_eq!(unpacked(&layers(top)).unwrap(), [pair("models/a/config.json", "new")]);
        let opaque = tar_of(&[("models/.wh..wh..opq", ""), ("models/model.gguf", "w")]);
        assert_eq!(unpacked(&layers(opaque)).unwrap(), [pair("merges.txt", "m"), pair("models/model.gguf", "w")]);
    }

    #[test]
    fn what_leads_out_or_is_no_tar_comes_to_nothing() {
        assert_eq!(plain(Path::new("../model.gguf")), None);
        assert_eq!(plain(Path::new("a/../../model.gguf")), None);
        assert_eq!(plain(Path::new("/a/./model.gguf")).unwrap(), "a/model.gguf");
        for (bytes, packing) in [(vec![7; 2000], Packing::Tar), (vec![7; 2000], Packing::TarGzip)] {
            let error = unpacked(&[(bytes, packing, Holds::Anything)]).unwrap_err().to_string();
            assert!(error.starts_with("unpack "), "{error}");
        }
        let cut = gzip(&tar_of(&[("model.gguf", &"w".repeat(5000))]));
        assert!(unpacked(&[(cut[..cut.len() / 2].to_vec(), Packing::TarGzip, Holds::Anything)]).is_err());
    }
}
