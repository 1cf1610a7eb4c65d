//! The archive: an OCI image layout that is a docker archive at the same time, as `docker save` writes it. One layer,
//! stored as it is: a registry or a runtime compresses better where it matters, and the bytes stay comparable.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType};

use crate::{ImageError, ImageReference, Recipe, RootFs, layer};

const MEDIA_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const MEDIA_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MEDIA_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Images carry no build time, or the same source would give another digest every minute.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// What was written.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ImageSummary {
    /// Digest of the image manifest, `sha256:…`: what a registry and a pod's `imageID` show.
    pub digest: String,
    /// Files, directories and links in the image.
    pub n_entries: usize,
    /// Size of the layer.
    pub layer_bytes: usize,
}

/// Bytes with the digest that names them.
struct Blob {
    bytes: Vec<u8>,
    hex: String,
    media: &'static str,
}

/// Writes the image of `recipe` with the content `tree` to `out`, under every one of `names`.
pub fn write_archive(
    recipe: &Recipe,
    tree: &RootFs,
    names: &[ImageReference],
    out: &Path,
) -> Result<ImageSummary, ImageError> {
    let layer = Blob::new(layer::pack(tree).map_err(ImageError::io(out))?, MEDIA_LAYER);
    let config = Blob::json(&image_config(recipe, &layer), MEDIA_CONFIG);
    let manifest = Blob::json(&image_manifest(&config, &layer), MEDIA_MANIFEST);
    write_tar(out, names, &[&manifest, &config, &layer]).map_err(ImageError::io(out))?;
    Ok(ImageSummary { digest: manifest.digest(), n_entries: tree.entries().count(), layer_bytes: layer.bytes.len() })
}

impl Blob {
    fn new(bytes: Vec<u8>, media: &'static str) -> Self {
        let hex = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        Self { bytes, hex, media }
    }

    fn json(value: &Value, media: &'static str) -> Self {
        Self::new(value.to_string().into_bytes(), media)
    }

    fn digest(&self) -> String {
        format!("sha256:{}", self.hex)
    }

    fn path(&self) -> String {
        format!("blobs/sha256/{}", self.hex)
    }

    fn descriptor(&self) -> Value {
        json!({"mediaType": self.media, "digest": self.digest(), "size": self.bytes.len()})
    }
}

fn image_config(recipe: &Recipe, layer: &Blob) -> Value {
    let env: Vec<String> = recipe.config.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    json!({
        "created": CREATED,
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "User": recipe.config.user,
            "Entrypoint": recipe.config.entrypoint,
            "Env": env,
            "WorkingDir": "/",
            "Labels": recipe.config.labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.digest()]},
        "history": [{"created": CREATED, "created_by": "stoker-image"}],
    })
}

fn image_manifest(config: &Blob, layer: &Blob) -> Value {
    json!({
        "schemaVersion": 2,
        "mediaType": MEDIA_MANIFEST,
        "config": config.descriptor(),
        "layers": [layer.descriptor()],
    })
}

/// The OCI index: one descriptor per name, with the annotations that containerd and skopeo read names from.
fn oci_index(names: &[ImageReference], manifest: &Blob) -> Value {
    let descriptors: Vec<Value> = names.iter().map(|name| named_descriptor(name, manifest)).collect();
    json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": descriptors})
}

fn named_descriptor(name: &ImageReference, manifest: &Blob) -> Value {
    let mut descriptor = manifest.descriptor();
    descriptor["annotations"] = json!({
        "io.containerd.image.name": name.to_string(),
        "org.opencontainers.image.ref.name": name.tag(),
    });
    descriptor["platform"] = json!({"architecture": architecture(), "os": "linux"});
    descriptor
}

/// The older form beside it: docker, and tools that came before the OCI layout, read only this file.
fn docker_manifest(names: &[ImageReference], config: &Blob, layer: &Blob) -> Value {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    json!([{"Config": config.path(), "RepoTags": names, "Layers": [layer.path()]}])
}

fn write_tar(out: &Path, names: &[ImageReference], [manifest, config, layer]: &[&Blob; 3]) -> io::Result<()> {
    let mut tar = Builder::new(BufWriter::new(File::create(out)?));
    add(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    add(&mut tar, "index.json", oci_index(names, manifest).to_string().as_bytes())?;
    add(&mut tar, "manifest.json", docker_manifest(names, config, layer).to_string().as_bytes())?;
    for blob in [manifest, config, layer] {
        add(&mut tar, &blob.path(), &blob.bytes)?;
    }
    tar.into_inner()?.flush()
}

fn add(tar: &mut Builder<impl Write>, path: &str, bytes: &[u8]) -> io::Result<()> {
    tar.append_data(&mut layer::header(EntryType::Regular, 0o644, bytes.len() as u64), path, bytes)
}

/// The machine's architecture in the words of image registries.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs, io::Read};

    use super::*;

    const RECIPE: &str = "
config: {user: '65532:65532', entrypoint: [/usr/bin/x, --flag], env: {A: '1', B: '2'}}
directories: [{path: /tmp, mode: '1777'}]
files: [{path: /usr/bin/x, mode: '0755', text: hello}]";

    fn image(names: &[&str]) -> (ImageSummary, Vec<u8>) {
        let recipe: Recipe = serde_norway::from_str(RECIPE).unwrap();
        let tree = RootFs::collect(&recipe).unwrap();
        let names: Vec<ImageReference> = names.iter().map(|n| n.parse().unwrap()).collect();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("image.tar");
        let summary = write_archive(&recipe, &tree, &names, &out).unwrap();
        (summary, fs::read(out).unwrap())
    }

    fn unpack(tar: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(tar);
        let read = |mut entry: tar::Entry<'_, &[u8]>| {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().display().to_string(), bytes)
        };
        archive.entries().unwrap().map(|entry| read(entry.unwrap())).collect()
    }

    fn json_at(files: &BTreeMap<String, Vec<u8>>, path: &str) -> Value {
        serde_json::from_slice(&files[path]).unwrap()
    }

    #[test]
    fn the_same_recipe_gives_the_same_bytes() {
        assert_eq!(image(&["localhost/x:1"]), image(&["localhost/x:1"]));
    }

    #[test]
    fn every_blob_is_named_by_its_own_digest() {
        let files = unpack(&image(&["localhost/x:1"]).1);
        let blobs: Vec<_> =
            files.iter().filter_map(|(path, bytes)| Some((path.strip_prefix("blobs/sha256/")?, bytes))).collect();
        assert_eq!(blobs.len(), 3);
        for (name, bytes) in blobs {
            assert_eq!(name, Blob::new(bytes.clone(), "").hex);
        }
    }

    #[test]
    fn the_oci_index_and_the_docker_manifest_lead_to_the_same_config_and_layer() {
        let (summary, tar) = image(&["localhost/x:1", "localhost/x:2"]);
        let files = unpack(&tar);
        let index = json_at(&files, "index.json");
        assert_eq!(index["manifests"].as_array().unwrap().len(), 2);
        assert_eq!(index["manifests"][1]["annotations"]["io.containerd.image.name"], "localhost/x:2");
        assert_eq!(index["manifests"][0]["digest"], summary.digest);
        let manifest = json_at(&files, &format!("blobs/sha256/{}", &summary.digest[7..]));
        let docker = json_at(&files, "manifest.json");
        let blob = |value: &Value| format!("blobs/sha256/{}", &value["digest"].as_str().unwrap()[7..]);
        assert_eq!(docker[0]["Config"], blob(&manifest["config"]));
        assert_eq!(docker[0]["Layers"][0], blob(&manifest["layers"][0]));
        assert_eq!(docker[0]["RepoTags"], json!(["localhost/x:1", "localhost/x:2"]));
    }

    #[test]
    fn the_layer_holds_nothing_of_this_machine_or_this_moment() {
        let recipe: Recipe = serde_norway::from_str(RECIPE).unwrap();
        let bytes = layer::pack(&RootFs::collect(&recipe).unwrap()).unwrap();
        let mut archive = tar::Archive::new(bytes.as_slice());
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.mtime().unwrap(), header.uid().unwrap(), header.gid().unwrap()), (0, 0, 0));
            assert_eq!(header.username().unwrap(), Some(""));
        }
    }

    #[test]
    fn a_container_starts_as_the_recipe_says() {
        let (summary, tar) = image(&["localhost/x:1"]);
        let files = unpack(&tar);
        let manifest = json_at(&files, &format!("blobs/sha256/{}", &summary.digest[7..]));
        let config = json_at(&files, &format!("blobs/sha256/{}", &manifest["config"]["digest"].as_str().unwrap()[7..]));
        assert_eq!(config["config"]["User"], "65532:65532");
        assert_eq!(config["config"]["Entrypoint"], json!(["/usr/bin/x", "--flag"]));
        assert_eq!(config["config"]["Env"], json!(["A=1", "B=2"]));
    }
}
