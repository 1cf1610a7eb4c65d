//! The file of tenants, and what follows when it changes. What cannot be read leaves what was known. Decides nothing.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context;

use crate::{gateway::Gateway, reread::reread, tenants::Tenants};

/// Reads the file.
pub fn read(path: &Path) -> anyhow::Result<Tenants> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read tenants: {}", path.display()))?;
    Tenants::parse(&text).with_context(|| format!("read tenants: {}", path.display()))
}

/// Where it is: files that it names are there, too.
pub fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Follows the file for ever.
pub async fn follow(gateway: Arc<Gateway>, path: PathBuf) {
    let learn = |tenants: Option<Tenants>| {
        gateway.metrics.tenants_stale.set(i64::from(tenants.is_none()));
        if tenants.is_some_and(|tenants| gateway.learn_tenants(tenants, folder(&path))) {
            tracing::info!(path = %path.display(), "tenants changed");
        }
    };
    reread("the list of tenants", || read(&path), learn).await;
}
