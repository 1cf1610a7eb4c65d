//! Puts a pod's volumes into folders of this machine: ConfigMaps, Secrets, projected files and the downward API as files,
//! emptyDir as a new folder, hostPath and bound claims as the folder they name. Nothing is refreshed later: what the pod
//! saw at its start is what it sees.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use k8s_openapi::{
    ByteString,
    api::{
        authentication::v1::{TokenRequest, TokenRequestSpec},
        core::v1::{
            ConfigMap, Container, KeyToPath, PersistentVolume, PersistentVolumeClaim, Pod, Secret, ServiceAccount,
            Volume, VolumeProjection,
        },
    },
};
use kube::{Api, Client, ResourceExt, api::PostParams};

use super::{
    environment::{Place, field_value},
    rewrite::{Mount, rewrite},
};

/// File names and contents of one volume.
type Files = BTreeMap<String, Vec<u8>>;

/// Where each volume of a pod is, by name.
pub(crate) type VolumeDirs = BTreeMap<String, PathBuf>;

/// What is needed to make the volumes of one pod.
#[derive(Clone, Copy)]
pub(crate) struct VolumeMaker<'a> {
    pub(crate) client: &'a Client,
    pub(crate) pod: &'a Pod,
    pub(crate) place: Place<'a>,
    /// The folder below which they are made.
    pub(crate) dir: &'a Path,
}

impl VolumeMaker<'_> {
    /// Makes every volume of the pod, or says which one could not be made and why.
    pub(crate) async fn make_all(&self) -> Result<VolumeDirs, String> {
        let mut dirs = VolumeDirs::new();
        for volume in self.pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            let dir = self.make(volume).await.map_err(|problem| format!("volume \"{}\": {problem}", volume.name))?;
            dirs.insert(volume.name.clone(), dir);
        }
        Ok(dirs)
    }

    async fn make(&self, volume: &Volume) -> Result<PathBuf, String> {
        let own = self.dir.join(&volume.name);
        let optional = |flag: Option<bool>| flag == Some(true);
        if let Some(source) = &volume.config_map {
            write(own, self.config_map(&source.name, source.items.as_deref(), optional(source.optional)).await?)
        } else if let Some(source) = &volume.secret {
            let name = source.secret_name.as_deref().unwrap_or_default();
            write(own, self.secret(name, source.items.as_deref(), optional(source.optional)).await?)
        } else if let Some(source) = &volume.projected {
            let mut files = Files::new();
            for part in source.sources.iter().flatten() {
                files.extend(self.projection(part).await?);
            }
            write(own, files)
        } else if let Some(source) = &volume.downward_api {
            let fields = source.items.iter().flatten().map(|item| (item.path.as_str(), item.field_ref.as_ref()));
            write(own, self.downward(fields)?)
        } else if volume.empty_dir.is_some() {
            write(own, Files::new())
        } else if let Some(source) = &volume.host_path {
            link(own, Path::new(&source.path))
        } else if let Some(source) = &volume.persistent_volume_claim {
            link(own, &self.claim(&source.claim_name).await?)
        } else {
            Err("this kind of volume is not supported by the process node".to_owned())
        }
    }

    async fn projection(&self, part: &VolumeProjection) -> Result<Files, String> {
        let optional = |flag: Option<bool>| flag == Some(true);
        if let Some(source) = &part.config_map {
            self.config_map(&source.name, source.items.as_deref(), optional(source.optional)).await
        } else if let Some(source) = &part.secret {
            self.secret(&source.name, source.items.as_deref(), optional(source.optional)).await
        } else if let Some(source) = &part.downward_api {
            self.downward(source.items.iter().flatten().map(|item| (item.path.as_str(), item.field_ref.as_ref())))
        } else if let Some(source) = &part.service_account_token {
            Ok(Files::from([(source.path.clone(), self.service_account_token(source.audience.as_deref()).await?)]))
        } else {
            Err("this kind of projection is not supported by the process node".to_owned())
        }
    }

    async fn config_map(&self, name: &str, items: Option<&[KeyToPath]>, optional: bool) -> Result<Files, String> {
        let api: Api<ConfigMap> = self.api();
        let Some(map) = api.get_opt(name).await.map_err(|error| error.to_string())? else {
            return if optional { Ok(Files::new()) } else { Err(format!("configmap \"{name}\" not found")) };
        };
        // A configuration that names a mount path must name the folder in its place.
        let mounts = self.path_mounts();
        let text =
            map.data.unwrap_or_default().into_iter().map(|(key, text)| (key, rewrite(&text, &mounts).into_bytes()));
        let binary = map.binary_data.unwrap_or_default().into_iter().map(|(key, bytes)| (key, bytes.0));
        select(text.chain(binary).collect(), items)
    }

    async fn secret(&self, name: &str, items: Option<&[KeyToPath]>, optional: bool) -> Result<Files, String> {
        let api: Api<Secret> = self.api();
        let Some(secret) = api.get_opt(name).await.map_err(|error| error.to_string())? else {
            return if optional { Ok(Files::new()) } else { Err(format!("secret \"{name}\" not found")) };
        };
        select(
            secret.data.unwrap_or_default().into_iter().map(|(key, ByteString(bytes))| (key, bytes)).collect(),
            items,
        )
    }

    fn downward<'f>(
        &self,
        fields: impl Iterator<Item = (&'f str, Option<&'f k8s_openapi::api::core::v1::ObjectFieldSelector>)>,
    ) -> Result<Files, String> {
        let file = |(path, field): (&str, Option<&_>)| {
            let field = field.ok_or("resourceFieldRef is not supported by the process node")?;
            Ok((path.to_owned(), field_value(self.pod, field, self.place)?.into_bytes()))
        };
        fields.map(file).collect()
    }

    async fn service_account_token(&self, audience: Option<&str>) -> Result<Vec<u8>, String> {
        let account = self.pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref()).unwrap_or("default");
        let spec =
            TokenRequestSpec { audiences: audience.map(|audience| vec![audience.to_owned()]), ..Default::default() };
        let request = TokenRequest { spec: Some(spec), ..Default::default() };
        let api: Api<ServiceAccount> = self.api();
        let answer = api
            .create_token_request(account, &PostParams::default(), &request)
            .await
            .map_err(|error| error.to_string())?;
        answer
            .status
            .and_then(|status| status.token)
            .map(String::into_bytes)
            .ok_or_else(|| "no token was issued".to_owned())
    }

    async fn claim(&self, name: &str) -> Result<PathBuf, String> {
        let claims: Api<PersistentVolumeClaim> = self.api();
        let claim = claims.get_opt(name).await.map_err(|error| error.to_string())?;
        let claim = claim.ok_or_else(|| format!("persistentvolumeclaim \"{name}\" not found"))?;
        let bound = claim
            .spec
            .and_then(|spec| spec.volume_name)
            .ok_or_else(|| format!("persistentvolumeclaim \"{name}\" is not bound"))?;
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let spec = volumes.get(&bound).await.map_err(|error| error.to_string())?.spec.unwrap_or_default();
        let path = spec.host_path.map(|source| source.path).or(spec.local.map(|source| source.path));
        path.map(PathBuf::from).ok_or_else(|| format!("persistentvolume \"{bound}\" is neither hostPath nor local"))
    }

    /// Mounts of all containers: every volume is, or will be, at its name below the folder.
    fn path_mounts(&self) -> Vec<Mount> {
        let spec = self.pod.spec.as_ref();
        let volumes = spec.and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
        let dirs: VolumeDirs =
            volumes.iter().map(|volume| (volume.name.clone(), self.dir.join(&volume.name))).collect();
        spec.into_iter().flat_map(|spec| &spec.containers).flat_map(|container| mounts(container, &dirs)).collect()
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.pod.namespace().unwrap_or_default())
    }
}

fn write(dir: PathBuf, files: Files) -> Result<PathBuf, String> {
    fs::create_dir_all(&dir).map_err(|error| format!("create {}: {error}", dir.display()))?;
    for (name, contents) in files {
        let path = dir.join(&name);
        let parent = path.parent().unwrap_or(&dir);
        let written = fs::create_dir_all(parent).and_then(|()| fs::write(&path, contents));
        written.map_err(|error| format!("write {}: {error}", path.display()))?;
    }
    Ok(dir)
}

/// A volume that exists already gets a name beside the ones that are made.
fn link(place: PathBuf, target: &Path) -> Result<PathBuf, String> {
    // Left by an earlier try that failed at a later volume.
    let _absent = fs::remove_file(&place);
    let linked = fs::metadata(target)
        .and_then(|_| fs::create_dir_all(place.parent().unwrap_or(&place)))
        .and_then(|()| symlink(target, &place));
    linked.map_err(|error| format!("{}: {error}", target.display()))?;
    Ok(place)
}

/// All files, or the ones `items` name under the paths it gives them.
fn select(mut files: Files, items: Option<&[KeyToPath]>) -> Result<Files, String> {
    let Some(items) = items else { return Ok(files) };
    let take = |item: &KeyToPath| {
        let contents = files.remove(&item.key).ok_or_else(|| format!("references non-existent key: {}", item.key))?;
        Ok((item.path.clone(), contents))
    };
    items.iter().map(take).collect()
}

/// Where the mounts of `container` are.
pub(crate) fn mounts(container: &Container, dirs: &VolumeDirs) -> Vec<Mount> {
    let mount = |mount: &k8s_openapi::api::core::v1::VolumeMount| {
        let dir = dirs.get(&mount.name)?;
        let outside = mount.sub_path.as_ref().map_or_else(|| dir.clone(), |sub_path| dir.join(sub_path));
        Some(Mount { inside: mount.mount_path.trim_end_matches('/').to_owned(), outside })
    };
    container.volume_mounts.iter().flatten().filter_map(mount).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_choose_and_rename_and_a_missing_key_is_named() {
        let files = || Files::from([("a".to_owned(), b"1".to_vec()), ("b".to_owned(), b"2".to_vec())]);
        let item = |key: &str| KeyToPath { key: key.to_owned(), path: "dir/x".to_owned(), mode: None };
        assert_eq!(select(files(), Some(&[item("b")])).unwrap(), Files::from([("dir/x".to_owned(), b"2".to_vec())]));
        assert_eq!(select(files(), Some(&[item("c")])).unwrap_err(), "references non-existent key: c");
    }

    #[test]
    fn a_mount_with_a_sub_path_is_that_part_of_the_volume() {
        let container: Container =
            serde_json::from_str(r#"{"name":"a","volumeMounts":[{"name":"v","mountPath":"/m/","subPath":"s"}]}"#)
                .unwrap();
        let dirs = VolumeDirs::from([("v".to_owned(), PathBuf::from("/run/v"))]);
        assert_eq!(mounts(&container, &dirs), [Mount { inside: "/m".to_owned(), outside: "/run/v/s".into() }]);
    }
}
