//! The environment of a container: what the node gives every process, then the pod's `env` in order, each value seeing
//! the ones before. Reads ConfigMaps and Secrets when an entry refers to one; never inherits the node's own variables.

use std::{collections::BTreeMap, net::Ipv4Addr};

use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod, Secret};
use kube::{Api, Client, ResourceExt};

use super::launch::expand;

/// Where a pod runs, as `fieldRef` and the node's own variables say it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) node: &'a str,
    pub(crate) host: Ipv4Addr,
    pub(crate) address: Ipv4Addr,
}

/// Name and value pairs, later ones winning.
pub(crate) type Variables = Vec<(String, String)>;

/// Everything `container` of `pod` finds in its environment, or what could not be found out.
pub(crate) async fn environment(
    client: &Client,
    pod: &Pod,
    container: &Container,
    place: Place<'_>,
) -> Result<Variables, String> {
    let mut variables: BTreeMap<String, String> = given(pod, place).into_iter().collect();
    let mut order: Vec<String> = variables.keys().cloned().collect();
    for entry in container.env.iter().flatten() {
        if let Some(value) = value_of(client, pod, entry, place, &variables).await? {
            order.push(entry.name.clone());
            variables.insert(entry.name.clone(), value);
        }
    }
    order.sort();
    order.dedup();
    Ok(order
        .into_iter()
        .map(|name| {
            let value = variables[&name].clone();
            (name, value)
        })
        .collect())
}

/// `STOKER_HOST` makes a server listen on the pod's own address: without network namespaces, listening on all addresses
/// would take the port from every other pod.
fn given(pod: &Pod, place: Place) -> [(String, String); 4] {
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    [
        ("PATH".to_owned(), path.to_owned()),
        ("HOME".to_owned(), "/".to_owned()),
        ("HOSTNAME".to_owned(), pod.name_any()),
        ("STOKER_HOST".to_owned(), place.address.to_string()),
    ]
}

/// `None` when an optional reference leads nowhere.
async fn value_of(
    client: &Client,
    pod: &Pod,
    entry: &EnvVar,
    place: Place<'_>,
    before: &BTreeMap<String, String>,
) -> Result<Option<String>, String> {
    match &entry.value_from {
        None => Ok(Some(expand(entry.value.as_deref().unwrap_or_default(), before))),
        Some(EnvVarSource { field_ref: Some(field), .. }) => field_value(pod, field, place).map(Some),
        Some(EnvVarSource { config_map_key_ref: Some(key), .. }) => {
            let api: Api<ConfigMap> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
            let map = api.get_opt(&key.name).await.map_err(|error| error.to_string())?;
            let value = map.and_then(|map| map.data?.remove(&key.key));
            found_or_optional(value, key.optional, || {
                format!("couldn't find key {} in ConfigMap {}", key.key, key.name)
            })
        }
        Some(EnvVarSource { secret_key_ref: Some(key), .. }) => {
            let api: Api<Secret> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
            let secret = api.get_opt(&key.name).await.map_err(|error| error.to_string())?;
            let value = secret.and_then(|secret| String::from_utf8(secret.data?.remove(&key.key)?.0).ok());
            found_or_optional(value, key.optional, || format!("couldn't find key {} in Secret {}", key.key, key.name))
        }
        Some(_) => Err(format!(
            "env {}: the process node supports fieldRef, configMapKeyRef and secretKeyRef only",
            entry.name
        )),
    }
}

fn found_or_optional(
    value: Option<String>,
    optional: Option<bool>,
    problem: impl FnOnce() -> String,
) -> Result<Option<String>, String> {
    if value.is_none() && optional != Some(true) { Err(problem()) } else { Ok(value) }
}

/// The downward API.
pub(crate) fn field_value(pod: &Pod, field: &ObjectFieldSelector, place: Place) -> Result<String, String> {
    let spec = pod.spec.as_ref();
    let value = match field.field_path.as_str() {
        "metadata.name" => pod.name_any(),
        "metadata.namespace" => pod.namespace().unwrap_or_default(),
        "metadata.uid" => pod.uid().unwrap_or_default(),
        "spec.nodeName" => place.node.to_owned(),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        "status.hostIP" | "status.hostIPs" => place.host.to_string(),
        "status.podIP" | "status.podIPs" => place.address.to_string(),
        path => keyed(pod, path).ok_or_else(|| format!("fieldRef {path} is not supported"))?,
    };
    Ok(value)
}

/// `metadata.labels['KEY']` and `metadata.annotations['KEY']`.
fn keyed(pod: &Pod, path: &str) -> Option<String> {
    let (map, rest) = path.split_once("['")?;
    let key = rest.strip_suffix("']")?;
    let values = match map {
        "metadata.labels" => pod.labels(),
        "metadata.annotations" => pod.annotations(),
        _ => return None,
    };
    Some(values.get(key).cloned().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, expected: Result<&str, &str>) {
        let pod: Pod =
            serde_json::from_str(r#"{"metadata":{"name":"p","namespace":"n","labels":{"a.b/c":"l"}}}"#).unwrap();
        let place = Place { node: "node-0", host: Ipv4Addr::new(127, 77, 0, 1), address: Ipv4Addr::new(127, 77, 0, 9) };
        let field = ObjectFieldSelector { field_path: path.to_owned(), ..Default::default() };
        assert_eq!(field_value(&pod, &field, place).as_deref().map_err(String::as_str), expected);
    }

    #[test]
    fn fields_of_the_downward_api_are_found() {
        check("metadata.name", Ok("p"));
        check("status.podIP", Ok("127.77.0.9"));
        check("metadata.labels['a.b/c']", Ok("l"));
        check("metadata.annotations['none']", Ok(""));
        check("spec.unknown", Err("fieldRef spec.unknown is not supported"));
    }
}
