//! A bucket's HTTP API, S3's: which objects are below a prefix, what is published of each, ranges of the versions that were
//! listed.
//!
//! A bucket has no commits. What pins its files is a hash of their names, sizes and ETags; each request for bytes says which
//! ETag they must be of, so that a file that is replaced in the middle of a fetch ends it.

mod credentials;

use std::ops::Range;

use futures::{StreamExt, TryStreamExt, stream};
use reqsign_aws_v4::Credential;
use reqsign_core::Signer;
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{CONTENT_LENGTH, ETAG, HOST, HeaderMap, HeaderValue, IF_MATCH},
};
use serde::Deserialize;

use super::{Listing, PAGES, header, judged, plausible, repeated, whole, wrong_answer};
use crate::{
    choose::{RemoteFile, is_of_a_model},
    digest::{Crc, Digest, sha256_hex},
    error::FetchError,
    order::Access,
    source::BucketModel,
    transport::{Failure, Refusal, Request, Said, Transport},
};

/// Questions about single objects at the same time.
const HEADS: usize = 8;

/// Files of one bucket.
pub(crate) struct Bucket {
    pub(super) transport: Transport,
    model: BucketModel,
    place: Place,
    /// `None`: the bucket is asked without saying who asks.
    signer: Option<Signer<Credential>>,
    secret_name: Option<String>,
}

/// Where the bucket is.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Place {
    /// URL of the bucket, with `/` at its end.
    base: Url,
    /// Who serves it, however it is reached: AWS's bucket names are unique in the world.
    server: String,
    region: String,
}

/// What a bucket says no with.
#[derive(Debug, thiserror::Error)]
pub enum BucketRefusal {
    /// Whoever asks may not.
    #[error("{status} from {server} for {source_name}: {fix}; {said}")]
    Denied {
        /// Of the answer.
        status: StatusCode,
        /// Who was asked.
        server: String,
        /// For what.
        source_name: String,
        /// What to change.
        fix: String,
        /// The server's own words.
        said: String,
    },
    /// There is no such bucket.
    #[error(
        "404 from {server}: there is no bucket \"{bucket}\"; correct spec.model.source or AWS_ENDPOINT_URL; {said}"
    )]
    NoBucket {
        /// Who was asked.
        server: String,
        /// For which.
        bucket: String,
        /// The server's own words.
        said: String,
    },
    /// It is elsewhere.
    #[error("the bucket \"{bucket}\" is in region {region}: set AWS_REGION to that; {said}")]
    OtherRegion {
        /// Which.
        bucket: String,
        /// Where it is.
        region: String,
        /// The server's own words.
        said: String,
    },
    /// Nothing is below the prefix.
    #[error(
        "there is no file of a model at {source_name} of {server}; the name of a prefix is that of a folder, written out"
    )]
    Nothing {
        /// Who was asked.
        server: String,
        /// For what.
        source_name: String,
    },
    /// A file was replaced or removed since it was listed.
    #[error(
        "{file} of {source_name} was replaced or removed while it was fetched: publish each version of a model below a prefix of its own"
    )]
    Changed {
        /// Which.
        file: String,
        /// Of what.
        source_name: String,
    },
    /// Files are others than those that were pinned.
    #[error(
        "the files at {source_name} are others ({found}) than those that replicas were told to serve ({pinned}): put them back, or name a \
         new prefix in spec.model.source"
    )]
    Moved {
        /// Of what.
        source_name: String,
        /// What was pinned.
        pinned: String,
        /// What is there.
        found: String,
    },
    /// No credentials come of what was given.
    #[error("credentials{}: {reason}; give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or neither", crate::error::of(.secret_name))]
    Credentials {
        /// What the user knows them as.
        secret_name: Option<String>,
        /// Why not.
        reason: String,
    },
    /// The endpoint is no URL.
    #[error("AWS_ENDPOINT_URL \"{endpoint}\": {reason}; use https://HOST")]
    Endpoint {
        /// What was given.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Of `?list-type=2`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Page {
    next_continuation_token: Option<String>,
    #[serde(default)]
    contents: Vec<Object>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Object {
    key: String,
    #[serde(rename = "ETag", default)]
    etag: String,
    size: u64,
}

/// Of a refusal.
#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ErrorBody {
    code: String,
    message: String,
}

impl Bucket {
    pub(super) fn new(transport: Transport, model: BucketModel, access: &Access) -> Result<Self, FetchError> {
        let place = Place::of(&model, |name| access.aws_variable(name))?;
        let secret_name = access.secret_name.clone();
        if let Some(missing) = credentials::missing(access) {
            return Err(BucketRefusal::Credentials { secret_name, reason: format!("{missing} is missing") }.into());
        }
        let signer = credentials::signer(&transport, access, &place.region);
        Ok(Self { transport, model, place, signer, secret_name })
    }

    /// The files as they are now; others than the pinned ones are none.
    pub(super) async fn listing(&self, pinned: Option<&str>) -> Result<Listing, FetchError> {
        let files = self.files().await?;
        if files.is_empty() {
            return Err(BucketRefusal::Nothing { server: self.place.server.clone(), source_name: self.name() }.into());
        }
        let commit = self.place.pin(&self.model, &files);
        match pinned.filter(|pinned| *pinned != commit) {
            None => Ok(Listing { commit, files, packed: Vec::new() }),
            Some(pinned) => {
                Err(BucketRefusal::Moved { source_name: self.name(), pinned: pinned.to_owned(), found: commit }.into())
            }
        }
    }

    async fn files(&self) -> Result<Vec<RemoteFile>, FetchError> {
        let mut files = Vec::new();
        let mut token = None;
        for _ in 0..PAGES {
            let url = self.place.page_url(&self.model, token.as_deref());
            let ask = async || whole(self.ask(Method::GET, &url, None, None).await?).await;
            let page: Page = page(&url, &repeated(&url, ask).await?)?;
            let found = page.contents.into_iter().map(|object| self.place.remote(&self.model, object));
            files.extend(found.collect::<Result<Vec<_>, _>>()?.into_iter().flatten());
            token = page.next_continuation_token.filter(|token| !token.is_empty());
            if token.is_none() {
                return Ok(files);
            }
        }
        let many = format!("more than {PAGES} pages of objects below the prefix");
        Err(wrong_answer(&self.place.base, many))
    }

    /// The files with the hashes that the server publishes of single objects.
    pub(super) async fn with_hashes(&self, files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, FetchError> {
        stream::iter(files).map(|file| self.with_hash(file)).buffered(HEADS).try_collect().await
    }

    async fn with_hash(&self, file: RemoteFile) -> Result<RemoteFile, FetchError> {
        let ask = async || self.ask(Method::HEAD, &file.url, None, Some(&file)).await;
        let told = repeated(&file.url, ask).await?.headers().clone();
        if header(&told, CONTENT_LENGTH.as_str()) != file.size.to_string() {
            return Err(self.changed(&file).into());
        }
        Ok(RemoteFile { digest: published(file.digest, &told), ..file })
    }

    pub(super) async fn get(&self, file: &RemoteFile, range: Option<Range<u64>>) -> Result<Response, Failure> {
        self.ask(Method::GET, &file.url, range, Some(file)).await
    }

    /// One request; about a file it is one for the version that was listed.
    async fn ask(
        &self,
        method: Method,
        url: &Url,
        range: Option<Range<u64>>,
        file: Option<&RemoteFile>,
    ) -> Result<Response, Failure> {
        let request = self.signed(&method, url, headers(&method, file)).await?;
        let answer = self.transport.once(method, &request, range).await?;
        let answer = judged(answer, said, |refusal| self.refused(refusal, file)).await?;
        // Not every server that speaks S3 heeds If-Match.
        let other = |file: &&RemoteFile| file.etag.as_deref() != Some(header(answer.headers(), ETAG.as_str()));
        match file.filter(other) {
            None => Ok(answer),
            Some(file) => Err(FetchError::from(self.changed(file)).into()),
        }
    }

    async fn signed(&self, method: &Method, url: &Url, headers: HeaderMap) -> Result<Request, Failure> {
        let Some(signer) = &self.signer else { return Ok(Request { url: url.clone(), headers }) };
        let request = http::Request::builder().method(method).uri(url.as_str()).body(());
        let (mut parts, ()) = request.map_err(|error| wrong_answer(url, error))?.into_parts();
        parts.headers = headers;
        signer.sign(&mut parts, None).await.map_err(|error| self.unsigned(&error))?;
        // The client says it itself.
        parts.headers.remove(HOST);
        Ok(Request { url: url.clone(), headers: parts.headers })
    }

    /// Why there is no signature: credentials come from servers, too, and those may be there again soon.
    fn unsigned(&self, error: &reqsign_core::Error) -> Failure {
        let reason = error.to_string();
        if error.is_retryable() {
            return Failure::passing(format!("credentials: {reason}"));
        }
        FetchError::from(BucketRefusal::Credentials { secret_name: self.secret_name.clone(), reason }).into()
    }

    fn refused(&self, refusal: Refusal, file: Option<&RemoteFile>) -> Failure {
        let Refusal { status, said: Said { code, words: said }, headers, url } = refusal;
        let (server, bucket) = (self.place.server.clone(), self.model.bucket.clone());
        let region = Some(header(&headers, "x-amz-bucket-region")).filter(|region| !region.is_empty());
        let error = match (status, file) {
            (StatusCode::PRECONDITION_FAILED | StatusCode::NOT_FOUND, Some(file)) => self.changed(file),
            (StatusCode::NOT_FOUND, None) if code == "NoSuchBucket" => BucketRefusal::NoBucket { server, bucket, said },
            _ if region.is_some_and(|region| region != self.place.region) => {
                BucketRefusal::OtherRegion { bucket, region: region.unwrap_or_default().to_owned(), said }
            }
            // Tokens that are no longer valid are a bad request to AWS.
            _ if is_denied(status, &code) => {
                BucketRefusal::Denied { status, server, source_name: self.name(), fix: self.fix(&code), said }
            }
            _ => return wrong_answer(&url, format!("{status} {code}: {said}")).into(),
        };
        FetchError::from(error).into()
    }

    /// What to change about a refusal to whoever asks.
    fn fix(&self, code: &str) -> String {
        let whose = self.secret_name.as_ref().map(|name| format!(" of {name}")).unwrap_or_default();
        match (&self.signer, code) {
            (None, _) => match &self.secret_name {
                Some(name) => format!("{name} has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: put them into it"),
                None => "it may not be read without credentials: give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in a Secret \
                         (spec.model.tokenSecret)"
                    .to_owned(),
            },
            (Some(_), "InvalidAccessKeyId") => format!("AWS_ACCESS_KEY_ID{whose} is not known there: put a valid one into it"),
            (Some(_), "SignatureDoesNotMatch") => {
                format!("AWS_SECRET_ACCESS_KEY{whose} is not that of its AWS_ACCESS_KEY_ID: put the right one into it")
            }
            (Some(_), "ExpiredToken" | "InvalidToken") => {
                format!("AWS_SESSION_TOKEN{whose} is no longer valid: put a fresh one into it")
            }
            (Some(_), _) => format!(
                "the credentials{whose} may not read it: allow them s3:ListBucket on the bucket and s3:GetObject on its objects"
            ),
        }
    }

    fn changed(&self, file: &RemoteFile) -> BucketRefusal {
        BucketRefusal::Changed { file: file.path.clone(), source_name: self.name() }
    }

    fn name(&self) -> String {
        self.model.to_string()
    }
}

fn is_denied(status: StatusCode, code: &str) -> bool {
    let of_token = matches!(code, "ExpiredToken" | "InvalidToken");
    of_token || matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// What a request about a file says beside who asks.
fn headers(method: &Method, file: Option<&RemoteFile>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let etag = file.and_then(|file| HeaderValue::from_str(file.etag.as_deref()?).ok());
    headers.extend(etag.map(|etag| (IF_MATCH, etag)));
    if method == Method::HEAD {
        headers.insert("x-amz-checksum-mode", HeaderValue::from_static("ENABLED"));
    }
    headers
}

/// What the file must be, by what its server tells of it. A checksum of the checksums of an upload's parts is none of its bytes.
fn published(listed: Digest, told: &HeaderMap) -> Digest {
    let kind = header(told, "x-amz-checksum-type");
    let in_parts = header(told, ETAG.as_str()).contains('-');
    if kind != "FULL_OBJECT" && (!kind.is_empty() || in_parts) {
        return listed;
    }
    if let Some(sha256) = Digest::sha256_of_base64(header(told, "x-amz-checksum-sha256")) {
        return sha256;
    }
    let told = |crc: Crc| crc.checksum(header(told, &format!("x-amz-checksum-{}", crc.name())));
    match listed {
        Digest::Object { listed, .. } => Digest::Object { listed, checksum: Crc::ALL.into_iter().find_map(told) },
        other => other,
    }
}

impl Place {
    /// With an endpoint the bucket is a part of the path, which every such server knows; without one it is AWS's.
    fn of(model: &BucketModel, variable: impl Fn(&str) -> Option<String>) -> Result<Self, FetchError> {
        let region =
            variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION")).unwrap_or_else(|| "us-east-1".to_owned());
        let endpoint = variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
        let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
        let bucket = &model.bucket;
        let (url, server) = match &endpoint {
            Some(endpoint) => {
                let endpoint = endpoint.trim_end_matches('/');
                (format!("{endpoint}/{bucket}/"), endpoint.to_owned())
            }
            // A certificate for *.s3.REGION holds for names without dots.
            None if bucket.contains('.') => (format!("https://s3.{region}.{domain}/{bucket}/"), format!("s3.{domain}")),
            None => (format!("https://{bucket}.s3.{region}.{domain}/"), format!("s3.{domain}")),
        };
        let wrong = |reason: String| BucketRefusal::Endpoint { endpoint: endpoint.clone().unwrap_or_default(), reason };
        let base = Url::parse(&url).map_err(|error| wrong(error.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") || base.host().is_none() || base.query().is_some() {
            return Err(wrong("not an http or https URL".to_owned()).into());
        }
        Ok(Self { base, server, region })
    }

    fn page_url(&self, model: &BucketModel, token: Option<&str>) -> Url {
        let mut url = self.base.clone();
        // Some servers take no slash behind the bucket.
        url.set_path(self.base.path().strip_suffix('/').filter(|path| !path.is_empty()).unwrap_or("/"));
        let prefix = format!("{}{}", model.prefix, model.file.as_deref().unwrap_or_default());
        let mut query = url.query_pairs_mut();
        query.append_pair("list-type", "2").append_pair("prefix", &prefix);
        if let Some(token) = token {
            query.append_pair("continuation-token", token);
        }
        drop(query);
        // A signature is over %20, and not over what forms make of a space.
        let query = url.query().map(|query| query.replace('+', "%20"));
        url.set_query(query.as_deref());
        url
    }

    /// A file that a model could be made of; `None` for what is beside it.
    fn remote(&self, model: &BucketModel, object: Object) -> Result<Option<RemoteFile>, FetchError> {
        let Object { key, etag, size } = object;
        let Some(path) = key.strip_prefix(&model.prefix).filter(|path| is_wanted(model, path)) else { return Ok(None) };
        let mut url = self.base.clone();
        url.path_segments_mut().expect("an http URL has a path").pop_if_empty().extend(key.split('/'));
        if etag.is_empty() {
            return Err(wrong_answer(&url, "it has no ETag, so nothing tells its versions apart"));
        }
        let size = plausible(&url, path, size)?;
        let digest =
            Digest::Object { listed: self.listed(model, &[path, &size.to_string(), &etag].join("\n")), checksum: None };
        Ok(Some(RemoteFile { path: path.to_owned(), size, digest, url, etag: Some(etag) }))
    }

    /// What pins files: their names, sizes and ETags.
    fn pin(&self, model: &BucketModel, files: &[RemoteFile]) -> String {
        let line =
            |file: &RemoteFile| format!("{}\n{}\n{}\n", file.path, file.size, file.etag.as_deref().unwrap_or_default());
        let mut lines: Vec<String> = files.iter().map(line).collect();
        lines.sort();
        self.listed(model, &lines.concat())
    }

    /// A name that nobody can give to files of another server or bucket.
    fn listed(&self, model: &BucketModel, what: &str) -> String {
        sha256_hex(format!("{}\n{}\n{}\n{what}", self.server, model.bucket, model.prefix).as_bytes())
    }
}

fn is_wanted(model: &BucketModel, path: &str) -> bool {
    let leads_out = |part: &str| matches!(part, "" | "." | "..");
    let is_wanted = model.file.as_ref().map_or_else(|| is_of_a_model(path), |file| file == path);
    is_wanted && !path.split('/').any(leads_out)
}

fn page(url: &Url, body: &[u8]) -> Result<Page, FetchError> {
    let wrong = |error: &dyn std::fmt::Display| wrong_answer(url, error);
    let text = std::str::from_utf8(body).map_err(|error| wrong(&error))?;
    quick_xml::de::from_str(text).map_err(|error| wrong(&error))
}

/// A bucket says it in its body.
fn said(_: &HeaderMap, body: &[u8]) -> Said {
    let body: ErrorBody = quick_xml::de::from_str(&String::from_utf8_lossy(body)).unwrap_or_default();
    let words = Some(body.message).filter(|words| !words.is_empty());
    Said { words: words.unwrap_or_else(|| "the server says nothing more".to_owned()), code: body.code }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(text: &str) -> BucketModel {
        let crate::source::Source::Bucket(model) = text.parse().unwrap() else { panic!("{text} is of a bucket") };
        model
    }

    fn place(text: &str, variables: &[(&str, &str)]) -> Result<Place, FetchError> {
        let variable = |name: &str| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| (*value).to_owned());
        Place::of(&model(text), variable)
    }

    const LISTING: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
        <ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>models</Name><Prefix>m/</Prefix><KeyCount>4</KeyCount>
        <IsTruncated>true</IsTruncated><NextContinuationToken>next=</NextContinuationToken>
        <Contents><Key>m/</Key><ETag>&quot;0&quot;</ETag><Size>0</Size></Contents>
        <Contents><Key>m/README.md</Key><ETag>&quot;1&quot;</ETag><Size>5</Size></Contents>
        <Contents><Key>m/model.safetensors</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>
          <ETag>&quot;ab-2&quot;</ETag><ChecksumAlgorithm>CRC32</ChecksumAlgorithm><Size>12</Size><StorageClass>STANDARD</StorageClass></Contents>
        <Contents><Key>m/../model.safetensors</Key><ETag>"x"</ETag><Size>12</Size></Contents>
        </ListBucketResult>"#;

    fn listed(place: &Place, text: &str, model: &BucketModel) -> Vec<RemoteFile> {
        let page = page(&place.base, text.as_bytes()).unwrap();
        page.contents.into_iter().filter_map(|object| place.remote(model, object).unwrap()).collect()
    }

    #[test]
    fn a_listing_is_read_and_only_what_a_model_is_made_of_is_taken() {
        let (model, place) = (model("s3://models/m"), place("s3://models/m", &[]).unwrap());
        let files = listed(&place, LISTING, &model);
        let [file] = &files[..] else { panic!("{files:?}") };
        assert_eq!((file.path.as_str(), file.size, file.etag.as_deref()), ("model.safetensors", 12, Some("\"ab-2\"")));
        assert_eq!(file.url.as_str(), "https://models.s3.us-east-1.amazonaws.com/m/model.safetensors");
        assert_eq!(page(&place.base, LISTING.as_bytes()).unwrap().next_continuation_token.unwrap(), "next=");
        let next = place.page_url(&model, Some("a b="));
        assert_eq!(next.query().unwrap(), "list-type=2&prefix=m%2F&continuation-token=a%20b%3D");
        assert!(page(&place.base, b"<html>").is_err());
        let without = LISTING.replace("&quot;ab-2&quot;", "");
        let wrong = page(&place.base, without.as_bytes()).unwrap().contents.remove(2);
        assert!(place.remote(&model, wrong).unwrap_err().to_string().contains("no ETag"));
    }

    #[test]
    fn another_version_or_place_is_another_pin_and_other_files_are_not() {
        let pin = |place: &Place, text: &str| {
            place.pin(&model("s3://models/m"), &listed(place, text, &model("s3://models/m")))
        };
        let here = place("s3://models/m", &[]).unwrap();
        let pinned = pin(&here, LISTING);
        assert!(crate::source::is_commit(&pinned), "{pinned}");
        assert_eq!(pin(&here, &LISTING.replace("<Size>5<", "<Size>6<")), pinned, "a README is no part of a model");
        for (was, is) in [("ab-2", "ab-3"), ("<Size>12<", "<Size>13<"), ("m/model.s", "m/other.s")] {
            assert_ne!(pin(&here, &LISTING.replace(was, is)), pinned, "{is}");
        }
        let elsewhere = place("s3://models/m", &[("AWS_ENDPOINT_URL", "https://s3.example")]).unwrap();
        assert_ne!(pin(&elsewhere, LISTING), pinned);
        let region = place("s3://models/m", &[("AWS_REGION", "eu-west-1")]).unwrap();
        assert_eq!(pin(&region, LISTING), pinned, "a bucket's name is its own in all regions");
    }

    #[test]
    fn a_bucket_is_where_the_variables_say() {
        let base = |text: &str, variables: &[(&str, &str)]| place(text, variables).unwrap().base.to_string();
        assert_eq!(base("s3://models/m", &[]), "https://models.s3.us-east-1.amazonaws.com/");
        assert_eq!(
            base("s3://my.models/m", &[("AWS_REGION", "eu-west-1")]),
            "https://s3.eu-west-1.amazonaws.com/my.models/"
        );
        assert_eq!(
            base("s3://models", &[("AWS_REGION", "cn-north-1")]),
            "https://models.s3.cn-north-1.amazonaws.com.cn/"
        );
        let own = [("AWS_ENDPOINT_URL", "http://s3.example:9000/"), ("AWS_REGION", "x")];
        assert_eq!(base("s3://models/m", &own), "http://s3.example:9000/models/");
        let wrong = place("s3://models/m", &[("AWS_ENDPOINT_URL", "s3.example")]).unwrap_err().to_string();
        assert!(wrong.contains("AWS_ENDPOINT_URL \"s3.example\"") && wrong.contains("https://HOST"), "{wrong}");
    }

    #[test]
    fn a_bucket_of_another_region_says_which() {
        let transport = Transport::new().unwrap();
        let bucket = Bucket::new(transport, model("s3://models/m"), &Access::default()).unwrap();
        let headers =
            HeaderMap::from_iter([("x-amz-bucket-region".parse().unwrap(), HeaderValue::from_static("eu-west-1"))]);
        let url = bucket.place.base.clone();
        let refusal = Refusal { status: StatusCode::MOVED_PERMANENTLY, said: Said::default(), headers, url };
        let Failure::Final(error) = bucket.refused(refusal, None) else { panic!("it does not pass") };
        assert!(error.to_string().contains("\"models\" is in region eu-west-1: set AWS_REGION"), "{error}");
    }

    #[test]
    fn a_checksum_of_parts_is_none_of_the_file() {
        let told = |pairs: &[(&'static str, &'static str)]| {
            let headers = pairs.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
            published(Digest::Object { listed: "1".repeat(64), checksum: None }, &headers.collect()).published()
        };
        let sha256 = ("x-amz-checksum-sha256", "LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=");
        let crc = ("x-amz-checksum-crc32", "NhCmhg==");
        let full = ("x-amz-checksum-type", "FULL_OBJECT");
        assert!(told(&[sha256, ("etag", "\"ab\"")]).starts_with("sha256-2cf24dba"));
        assert_eq!(told(&[crc, ("etag", "\"ab-3\""), full]), "crc32-3610a686");
        let nothing = format!("object-{}", "1".repeat(64));
        for pairs in
            [&[crc, ("etag", "\"ab-3\"")], &[crc, ("x-amz-checksum-type", "COMPOSITE")], &[full, ("etag", "\"ab\"")]]
        {
            assert_eq!(told(pairs), nothing, "{pairs:?}");
        }
    }
}
