//! A registry's HTTP API, OCI's: which manifest a tag is, which layers it has, ranges of their blobs. Everything is named by its
//! SHA-256, the manifest too: that is the commit.
//!
//! A layer is a file of the model where it says the file's name, as ORAS, ModelPack and Docker's model runner push them, or a tar of
//! files: a folder that one of those packed, KitOps' layers, those of an image that a Dockerfile makes.

mod login;

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use reqwest::{
    Response, StatusCode, Url,
    header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue, WWW_AUTHENTICATE},
};
use serde::Deserialize;

use self::login::{Challenge, Login};
use super::{Listing, elsewhere, judged, plausible, repeated, whole, wrong_answer};
use crate::{
    choose::RemoteFile,
    digest::{Digest, sha256_hex},
    error::FetchError,
    order::Access,
    source::ImageModel,
    transport::{Failure, Refusal, Request, Said, Transport},
    unpack::{Holds, Packed, Packing},
};

/// Forms of a manifest that are read.
const MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, \
                         application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json";
/// Where a layer says which file it is: ORAS and most others, ModelPack.
const NAMES: [&str; 2] = ["org.opencontainers.image.title", "org.cncf.model.filepath"];

/// That a layer is a folder, which ORAS packed.
const UNPACK: &str = "io.deis.oras.content.unpack";

/// One image of a registry.
pub(crate) struct Registry {
    pub(super) transport: Transport,
    image: ImageModel,
    /// `…/v2/REPOSITORY/`.
    base: Url,
    login: Login,
    /// What the registry took last.
    authorization: Mutex<Option<HeaderValue>>,
}

/// What a registry says no with.
#[derive(Debug, thiserror::Error)]
pub enum RegistryRefusal {
    /// Whoever asks may not.
    #[error("{status} from {server} for {image}: {fix}; {said}")]
    Denied {
        /// Of the answer.
        status: StatusCode,
        /// Who refused: the registry, or who hands out its tokens.
        server: String,
        /// What was asked for.
        image: String,
        /// What to change.
        fix: String,
        /// The server's own words.
        said: String,
    },
    /// There is no such image.
    #[error("404 from {server}: there is no {image}: correct its repository, tag or digest; {said}")]
    NoImage {
        /// Who was asked.
        server: String,
        /// For what.
        image: String,
        /// The server's own words.
        said: String,
    },
    /// An index of several images, none of which is this machine's.
    #[error("{image} is an index of several images, none for {platform}: name one by its digest ({found})")]
    NotForPlatform {
        /// The index.
        image: String,
        /// This machine's.
        platform: String,
        /// What there is.
        found: String,
    },
    /// A layer cannot be read.
    #[error("{image} has a layer of type {media_type}, which is not read: pack it as tar, with gzip or without")]
    Unread {
        /// The image.
        image: String,
        /// The layer's.
        media_type: String,
    },
    /// No layer is a file or holds some.
    #[error(
        "{image} holds no files of a model: a layer is a tar, or one file that is named by the annotation org.opencontainers.image.title, \
         as `oras push` writes it; its layers: {found}"
    )]
    NoFiles {
        /// The image.
        image: String,
        /// Media types of its layers.
        found: String,
    },
    /// Docker's configuration is none.
    #[error("the registry login{} is no config.json of Docker: {reason}", crate::error::of(.secret_name))]
    Login {
        /// What the user knows it as.
        secret_name: Option<String>,
        /// What is wrong with it.
        reason: String,
    },
}

/// Of an image, or of an index of images.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Manifest {
    layers: Vec<Descriptor>,
    manifests: Vec<Descriptor>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
struct Platform {
    os: String,
    architecture: String,
}

/// Of a refusal.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Errors {
    errors: Vec<ErrorEntry>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ErrorEntry {
    code: String,
    message: String,
}

impl Registry {
    pub(super) fn new(transport: Transport, image: ImageModel, access: &Access) -> Result<Self, FetchError> {
        let host = login::api_host(&image.registry);
        // As Docker does: a registry of this machine needs no certificate.
        let scheme = if login::is_loopback(host) { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2/{}/", image.repository);
        let wrong = |error| FetchError::Answer { url: base.clone(), reason: format!("{error}") };
        let base = Url::parse(&base).map_err(wrong)?;
        let login = Login::of(&image, access)?;
        Ok(Self { transport, image, base, login, authorization: Mutex::new(None) })
    }

    /// The files of the manifest that is pinned, or of what the tag is now.
    pub(super) async fn listing(&self, pinned: Option<&str>) -> Result<Listing, FetchError> {
        let reference = pinned.map_or_else(|| self.image.reference(), |commit| format!("sha256:{commit}"));
        let (manifest, commit) = self.manifest(&reference).await?;
        let manifest = match self.of_this_machine(&manifest)? {
            Some(reference) => self.manifest(&reference).await?.0,
            None => manifest,
        };
        let (mut files, mut packed) = (Vec::new(), Vec::new());
        for layer in &manifest.layers {
            match self.meaning(layer)? {
                Some(Meaning::File(name)) => files.push(self.file(name, layer)?),
                Some(Meaning::Tar { packing, holds }) => {
                    // Who says the folder of an image has it anywhere.
                    let holds = if self.image.folder.is_some() { Holds::Anything } else { holds };
                    packed.push(Packed { file: self.file(layer.digest.clone(), layer)?, packing, holds });
                }
                None => {}
            }
        }
        if files.is_empty() && packed.is_empty() {
            return Err(
                RegistryRefusal::NoFiles { image: self.image.to_string(), found: types(&manifest.layers) }.into()
            );
        }
        Ok(Listing { commit, files, packed })
    }

    /// A manifest and its SHA-256.
    async fn manifest(&self, reference: &str) -> Result<(Manifest, String), FetchError> {
        let url = self.url(&format!("manifests/{reference}"));
        let body = repeated(&url, async || whole(self.get(&url, None).await?).await).await?;
        let commit = sha256_hex(&body);
        match reference.strip_prefix("sha256:").filter(|wanted| *wanted != commit) {
            Some(wanted) => {
                let (file, wanted) = (self.image.to_string(), wanted.to_owned());
                Err(FetchError::WrongHash { file, wanted, found: commit, tries: 1 })
            }
            None => Ok((serde_json::from_slice(&body).map_err(|error| wrong_answer(&url, error))?, commit)),
        }
    }

    /// Of an index, the digest of the image to take; `None` if it is an image already.
    fn of_this_machine(&self, manifest: &Manifest) -> Result<Option<String>, FetchError> {
        if manifest.manifests.is_empty() {
            return Ok(None);
        }
        let platform = format!("{}/{}", std::env::consts::OS, go_architecture());
        match taken(&manifest.manifests, &platform) {
            Some(digest) => Ok(Some(digest.to_owned())),
            None => {
                let named = |entry: &Descriptor| format!("{} {}", entry.digest, platform_of(entry));
                let found = manifest.manifests.iter().map(named).collect::<Vec<_>>().join(", ");
                Err(RegistryRefusal::NotForPlatform { image: self.image.to_string(), platform, found }.into())
            }
        }
    }

    fn meaning(&self, layer: &Descriptor) -> Result<Option<Meaning>, FetchError> {
        meaning(layer)
            .map_err(|media_type| RegistryRefusal::Unread { image: self.image.to_string(), media_type }.into())
    }

    fn file(&self, name: String, layer: &Descriptor) -> Result<RemoteFile, FetchError> {
        let url = self.url(&format!("blobs/{}", layer.digest));
        let digest = layer.digest.strip_prefix("sha256:").and_then(Digest::sha256);
        let digest = digest.ok_or_else(|| wrong_answer(&url, format!("{name} has no SHA-256")))?;
        Ok(RemoteFile { size: plausible(&url, &name, layer.size)?, path: name, digest, url, etag: None })
    }

    fn url(&self, rest: &str) -> Url {
        self.base.join(&format!("./{rest}")).expect("a path below a path")
    }

    /// One request; a registry that asks who it is is told, and asked again.
    pub(super) async fn get(&self, url: &Url, range: Option<Range<u64>>) -> Result<Response, Failure> {
        let answer = self.transport.get(&self.request(url), range.clone()).await?;
        let answer = match self.challenge(&answer) {
            None => answer,
            Some(challenge) => {
                let authorization = self.authorization(challenge).await?;
                *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(authorization);
                self.transport.get(&self.request(url), range).await?
            }
        };
        judged(answer, said, |refusal| self.refused(refusal)).await
    }

    fn request(&self, url: &Url) -> Request {
        let mut request = Request::plain(url.clone());
        if url.path().contains("/manifests/") {
            request.headers.insert(ACCEPT, HeaderValue::from_static(MANIFESTS));
        }
        let known = self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone();
        request.headers.extend(known.map(|known| (AUTHORIZATION, known)));
        request
    }

    /// What the registry itself wants to know.
    fn challenge(&self, answer: &Response) -> Option<Challenge> {
        let asks = answer.status() == StatusCode::UNAUTHORIZED && answer.url().origin() == self.base.origin();
        let all = answer.headers().get_all(WWW_AUTHENTICATE);
        asks.then(|| all.iter().filter_map(|one| one.to_str().ok()).find_map(Challenge::parse)).flatten()
    }

    /// What answers a challenge: the login, or a token for it.
    async fn authorization(&self, challenge: Challenge) -> Result<HeaderValue, Failure> {
        let Challenge::Bearer { realm, service, scope } = challenge else {
            return match self.login.basic() {
                Some(basic) => Ok(basic),
                None => {
                    let words = "the registry asks for a login".to_owned();
                    Err(self.denied(StatusCode::UNAUTHORIZED, words, &self.base))
                }
            };
        };
        if self.base.scheme() == "https" && realm.scheme() != "https" {
            return Err(wrong_answer(&realm, "tokens come from there, and it is not encrypted").into());
        }
        let scope = scope.unwrap_or_else(|| format!("repository:{}:pull", self.image.repository));
        let mut url = realm;
        url.query_pairs_mut().extend_pairs(service.map(|service| ("service", service))).append_pair("scope", &scope);
        let mut request = Request::plain(url.clone());
        request.headers.extend(self.login.basic().map(|basic| (AUTHORIZATION, basic)));
        let answer = self.transport.get(&request, None).await?;
        let answer =
            judged(answer, said, |refusal| self.denied(refusal.status, refusal.said.words, &refusal.url)).await?;
        login::bearer(&whole(answer).await?).ok_or_else(|| wrong_answer(&url, "there is no token in it").into())
    }

    fn refused(&self, refusal: Refusal) -> Failure {
        if refusal.url.origin() != self.base.origin() {
            return elsewhere(refusal);
        }
        let Refusal { status, said: Said { code, words: said }, url, .. } = refusal;
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.denied(status, said, &url),
            StatusCode::NOT_FOUND => {
                let (server, image) = (self.image.registry.clone(), self.image.to_string());
                FetchError::from(RegistryRefusal::NoImage { server, image, said }).into()
            }
            _ => wrong_answer(&url, format!("{status} {code}: {said}")).into(),
        }
    }

    fn denied(&self, status: StatusCode, said: String, url: &Url) -> Failure {
        let server = url.host_str().unwrap_or_default().to_owned();
        let denied =
            RegistryRefusal::Denied { status, server, image: self.image.to_string(), fix: self.login.fix(), said };
        FetchError::from(denied).into()
    }
}

/// As registries name what Rust calls otherwise.
fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn platform_of(entry: &Descriptor) -> String {
    entry.platform.as_ref().map(|of| format!("{}/{}", of.os, of.architecture)).unwrap_or_default()
}

/// The only image of an index, or the one for `platform`. What attests to an image is for no platform.
fn taken<'a>(entries: &'a [Descriptor], platform: &str) -> Option<&'a str> {
    let images: Vec<&Descriptor> = entries.iter().filter(|entry| platform_of(entry) != "unknown/unknown").collect();
    match &images[..] {
        [only] => Some(&only.digest),
        several => several.iter().find(|entry| platform_of(entry) == platform).map(|entry| &*entry.digest),
    }
}

/// What a layer is to a model.
#[derive(Debug, PartialEq)]
enum Meaning {
    /// The file of this name.
    File(String),
    /// A tar of files.
    Tar { packing: Packing, holds: Holds },
}

/// `None`: nothing of a model. An error is a type that cannot be read.
fn meaning(layer: &Descriptor) -> Result<Option<Meaning>, String> {
    let media_type = &*layer.media_type;
    let of_image = ["application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs."]
        .iter()
        .any(|of| media_type.starts_with(of));
    let name = name(layer);
    let (before, packing) = match media_type.rsplit_once(['+', '.']) {
        Some((before, "gzip")) => (before, Packing::TarGzip),
        Some((before, "zstd")) if before.ends_with("tar") => return Err(media_type.to_owned()),
        _ => (media_type, Packing::Tar),
    };
    // ORAS gives every file the type of a plain tar. A folder that it packed is compressed, and most say what they are.
    let says_folder = layer.annotations.as_ref().and_then(|said| said.get(UNPACK)).is_some_and(|said| said == "true");
    let is_folder = says_folder || name.is_some() && packing == Packing::TarGzip;
    let is_file = !before.ends_with(".tar") || of_image && name.is_some() && !is_folder;
    let holds = if of_image && !is_folder { Holds::RootOfImage } else { Holds::Anything };
    Ok(if is_file { name.map(Meaning::File) } else { Some(Meaning::Tar { packing, holds }) })
}

fn types(layers: &[Descriptor]) -> String {
    let types: Vec<&str> = layers.iter().map(|layer| &*layer.media_type).collect();
    if types.is_empty() { "none".to_owned() } else { types.join(", ") }
}

/// Which file a layer is; `None` if it does not say, or says one that leads out of a folder.
fn name(layer: &Descriptor) -> Option<String> {
    let annotations = layer.annotations.as_ref();
    let said = NAMES.iter().find_map(|name| annotations?.get(*name).cloned());
    // Docker's model runner has images of one such file, which needs no name.
    let said = said
        .or_else(|| layer.media_type.starts_with("application/vnd.docker.ai.gguf").then(|| "model.gguf".to_owned()));
    let said = said?.trim_start_matches("./").to_owned();
    let leads_out = |part: &str| matches!(part, "" | "." | "..");
    (!said.split('/').any(leads_out)).then_some(said)
}

/// A registry says it in its body.
fn said(_: &HeaderMap, body: &[u8]) -> Said {
    let body: Errors = serde_json::from_slice(body).unwrap_or_default();
    let first = body.errors.into_iter().next().unwrap_or_default();
    let words = Some(first.message).filter(|words| !words.is_empty());
    Said { words: words.unwrap_or_else(|| "the server says nothing more".to_owned()), code: first.code }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(media_type: &str, annotations: &[(&str, &str)]) -> Descriptor {
        let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Descriptor {
            media_type: media_type.to_owned(),
            digest: format!("sha256:{}", "0a".repeat(32)),
            size: 1,
            annotations: Some(annotations),
            platform: None,
        }
    }

    #[test]
    fn a_layer_is_the_file_that_it_says() {
        let title = |name| layer("application/octet-stream", &[(NAMES[0], name)]);
        assert_eq!(name(&title("config.json")).unwrap(), "config.json");
        assert_eq!(name(&title("./a/config.json")).unwrap(), "a/config.json");
        let of_model_pack = layer("application/vnd.cncf.model.weight.v1.raw", &[(NAMES[1], "model.safetensors")]);
        assert_eq!(name(&of_model_pack).unwrap(), "model.safetensors");
        assert_eq!(name(&layer("application/vnd.docker.ai.gguf.v3", &[])).unwrap(), "model.gguf");
        for wrong in ["../x", "/etc/passwd", "a//b", ""] {
            assert_eq!(name(&title(wrong)), None, "{wrong}");
        }
        assert_eq!(name(&layer("application/vnd.oci.image.layer.v1.tar", &[])), None);
    }

    #[test]
    fn a_layer_is_a_file_or_a_tar_by_its_type_and_what_it_says() {
        let said = |media_type: &str, annotations: &[(&str, &str)]| meaning(&layer(media_type, annotations));
        let file = |name: &str| Ok(Some(Meaning::File(name.to_owned())));
        let tar = |packing, holds| Ok(Some(Meaning::Tar { packing, holds }));
        let (oci, title) = ("application/vnd.oci.image.layer.v1.tar", (NAMES[0], "m"));
        // As ORAS pushes a file and a folder.
        assert_eq!(said(oci, &[title]), file("m"));
        assert_eq!(said(oci, &[title, (UNPACK, "true")]), tar(Packing::Tar, Holds::Anything));
        assert_eq!(said(&format!("{oci}+gzip"), &[title]), tar(Packing::TarGzip, Holds::Anything));
        // As a Dockerfile makes an image.
        assert_eq!(said(oci, &[]), tar(Packing::Tar, Holds::RootOfImage));
        let docker = "application/vnd.docker.image.rootfs.diff.tar.gzip";
        assert_eq!(said(docker, &[]), tar(Packing::TarGzip, Holds::RootOfImage));
        // ModelPack, KitOps, Docker's model runner.
        assert_eq!(said("application/vnd.cncf.model.weight.v1.raw", &[(NAMES[1], "w")]), file("w"));
        assert_eq!(
            said("application/vnd.cncf.model.weight.v1.tar", &[(NAMES[1], "w")]),
            tar(Packing::Tar, Holds::Anything)
        );
        assert_eq!(
            said("application/vnd.kitops.modelkit.model.v1.tar+gzip", &[]),
            tar(Packing::TarGzip, Holds::Anything)
        );
        assert_eq!(said("application/vnd.docker.ai.gguf.v3", &[]), file("model.gguf"));
        assert_eq!(said("application/vnd.docker.ai.license", &[]), Ok(None));
        let zstd = format!("{oci}+zstd");
        assert_eq!(said(&zstd, &[]), Err(zstd.clone()));
    }

    #[test]
    fn of_an_index_the_only_image_or_this_machines_is_taken() {
        let entry = |digest: &str, os: &str, architecture: &str| Descriptor {
            digest: digest.to_owned(),
            platform: Some(Platform { os: os.to_owned(), architecture: architecture.to_owned() }),
            ..layer("", &[])
        };
        let attested = [entry("a", "linux", "amd64"), entry("b", "unknown", "unknown")];
        assert_eq!(taken(&attested, "linux/arm64"), Some("a"));
        let two = [entry("a", "linux", "amd64"), entry("b", "linux", "arm64")];
        assert_eq!(taken(&two, "linux/arm64"), Some("b"));
        assert_eq!(taken(&two, "linux/riscv64"), None);
    }
}
