//! Who asks a bucket: keys of the environment, a Kubernetes service account's role (a web identity), or what a server of the
//! node hands out to the container. The crate that signs knows them and renews them; it reads no variable that it is not given.

use std::collections::HashMap;

use bytes::Bytes;
use reqsign_aws_v4::{
    AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider, EnvCredentialProvider,
    RequestSigner,
};
use reqsign_core::{Context, Error, ErrorKind, FileRead, HttpSend, ProvideCredentialChain, Signer, StaticEnv};
use reqwest::Client;

use crate::{
    order::Access,
    transport::{Transport, error_chain},
};

/// Variables that say who asks.
const SOURCES: [&str; 4] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
];

/// A key whose other half is there: nobody means that.
pub(super) fn missing(access: &Access) -> Option<&'static str> {
    let halves = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
    match halves.map(|name| access.aws_variable(name).is_some()) {
        [true, false] => Some(halves[1]),
        [false, true] => Some(halves[0]),
        _ => None,
    }
}

/// What signs requests; `None` where no variable says who asks.
pub(super) fn signer(transport: &Transport, access: &Access, region: &str) -> Option<Signer<Credential>> {
    SOURCES.iter().find_map(|name| access.aws_variable(name))?;
    let envs: HashMap<String, String> =
        access.aws.keys().filter_map(|name| Some((name.clone(), access.aws_variable(name)?))).collect();
    let context = Context::new()
        .with_env(StaticEnv { home_dir: None, envs })
        .with_file_read(Files)
        .with_http_send(Sender(transport.client().clone()));
    let chain = ProvideCredentialChain::new()
        .push(EnvCredentialProvider::new())
        .push(AssumeRoleWithWebIdentityCredentialProvider::new())
        .push(ECSCredentialProvider::new());
    Some(Signer::new(context, chain, RequestSigner::new("s3", region)))
}

/// A service account's token is a file.
#[derive(Debug)]
struct Files;

impl FileRead for Files {
    async fn file_read(&self, path: &str) -> reqsign_core::Result<Vec<u8>> {
        std::fs::read(path).map_err(|error| Error::config_invalid(format!("read {path}: {error}")))
    }
}

/// What asks for credentials: as the bucket is asked.
#[derive(Debug)]
struct Sender(Client);

impl HttpSend for Sender {
    async fn http_send(&self, request: http::Request<Bytes>) -> reqsign_core::Result<http::Response<Bytes>> {
        let failed = |error: reqwest::Error| Error::new(ErrorKind::Unexpected, error_chain(&error)).set_retryable(true);
        let request = reqwest::Request::try_from(request).map_err(failed)?;
        let answer = self.0.execute(request).await.map_err(failed)?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let mut told = http::Response::new(answer.bytes().await.map_err(failed)?);
        (*told.status_mut(), *told.headers_mut()) = (status, headers);
        Ok(told)
    }
}
