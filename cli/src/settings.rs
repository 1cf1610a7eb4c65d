//! `--set scaling.targets.kv=0.7`: one value of the specification changed by its path. Refuses what the object refuses.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use stoker_scaling::ScalingSpec;

/// Applies settings in order and checks the result.
pub(crate) fn spec(spec: ScalingSpec, settings: &[String]) -> Result<ScalingSpec> {
    let mut value = serde_json::to_value(spec).context("write the specification as JSON")?;
    for setting in settings {
        apply(&mut value, setting)?;
    }
    let spec: ScalingSpec = serde_json::from_value(value).with_context(|| format!("set {}", settings.join(" ")))?;
    if let Some(error) = spec.errors().first() {
        bail!("{error}");
    }
    Ok(spec)
}

fn apply(value: &mut Value, setting: &str) -> Result<()> {
    let form = || format!("--set {setting}: write PATH=VALUE, such as scaling.targets.kv=0.7");
    let (path, text) = setting.split_once('=').with_context(form)?;
    let path = path.strip_prefix("scaling.").with_context(form)?;
    let new = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
    let mut place = value;
    for name in path.split('.') {
        if place.is_null() {
            *place = Value::Object(serde_json::Map::new());
        }
        let fields = place.as_object_mut().with_context(|| format!("--set {setting}: {name} is inside of a value"))?;
        place = fields.entry(name.to_owned()).or_insert(Value::Null);
    }
    *place = new;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(settings: &[&str]) -> Result<ScalingSpec> {
        let settings: Vec<_> = settings.iter().map(|setting| (*setting).to_owned()).collect();
        spec(ScalingSpec::between(1, 4), &settings)
    }

    #[test]
    fn a_value_is_changed_by_its_path() {
        let spec = set(&["scaling.targets.kv=0.7", "scaling.max=9", "scaling.toZero.afterSeconds=30"]).unwrap();
        assert_eq!((spec.targets.kv, spec.max), (0.7, 9));
        assert_eq!(spec.to_zero.map(|rule| (rule.after_seconds, rule.max_wake_seconds)), Some((30, 40)));
    }

    #[test]
    fn what_the_object_refuses_is_refused_here() {
        let refusal = |setting| format!("{:#}", set(&[setting]).unwrap_err());
        assert!(refusal("scaling.targets.kv=2").contains("at most 1"));
        assert!(refusal("scaling.targets.cpu=1").contains("unknown field `cpu`"));
        assert!(refusal("scaling.min=5").contains("raise max or lower min"));
        assert!(refusal("targets.kv=1").contains("write PATH=VALUE"));
        assert!(refusal("scaling.max.more=1").contains("inside of a value"));
    }
}
