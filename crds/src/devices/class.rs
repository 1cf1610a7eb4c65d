//! Which devices a DeviceClass means. Pure.
//!
//! Classes select devices by CEL, which nobody here evaluates. Read are comparisons of the driver and of attributes with constants, joined by
//! `&&`: what the classes of GPU drivers consist of. Of a class that says anything else nobody here knows what it means, and that is said.

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceClass};

/// Driver of NVIDIA's GPUs.
const NVIDIA: &str = "gpu.nvidia.com";

/// What all devices of a class have.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Meant(Vec<Term>);

#[derive(Clone, Debug, PartialEq)]
enum Term {
    /// `device.driver == "NAME"`.
    Driver(String),
    /// `device.attributes["DOMAIN"].NAME == VALUE`.
    Attribute { domain: String, name: String, value: Constant },
}

#[derive(Clone, Debug, PartialEq)]
enum Constant {
    Text(String),
    Number(i64),
    Flag(bool),
}

impl Meant {
    /// The devices that every selector of the class selects; or the expression that is not read here.
    pub(super) fn by(class: &DeviceClass) -> Result<Self, String> {
        let selectors = class.spec.selectors.as_deref().unwrap_or_default();
        let mut terms = Vec::new();
        for selector in selectors {
            let expression = selector.cel.as_ref().map_or("", |cel| cel.expression.trim());
            let read: Option<Vec<Term>> = expression.split("&&").map(|text| term(text.trim())).collect();
            terms.extend(read.ok_or_else(|| expression.to_owned())?);
        }
        Ok(Self(terms))
    }

    /// Whole GPUs of NVIDIA's driver, whose partitions are devices, too.
    pub(super) fn nvidia() -> Self {
        let (domain, name, value) = (NVIDIA.to_owned(), "type".to_owned(), Constant::Text("gpu".to_owned()));
        Self(vec![Term::Driver(NVIDIA.to_owned()), Term::Attribute { domain, name, value }])
    }

    /// Whether it means this device of this driver. An attribute that a device has not is an error in CEL, which selects nothing.
    pub(super) fn includes(&self, driver: &str, device: &Device) -> bool {
        self.0.iter().all(|term| match term {
            Term::Driver(name) => name == driver,
            Term::Attribute { domain, name, value } => {
                attribute(driver, device, (domain.as_str(), name.as_str())).is_some_and(|found| value.is(found))
            }
        })
    }
}

impl Constant {
    fn is(&self, found: &DeviceAttribute) -> bool {
        match self {
            Self::Text(text) => found.string.as_ref() == Some(text),
            Self::Number(number) => found.int == Some(*number),
            Self::Flag(flag) => found.bool == Some(*flag),
        }
    }

    fn into_text(self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text),
            Self::Number(_) | Self::Flag(_) => None,
        }
    }
}

/// A name without a domain is one of the driver's own.
fn attribute<'a>(driver: &str, device: &'a Device, asked: (&str, &str)) -> Option<&'a DeviceAttribute> {
    let mut attributes = device.attributes.iter().flatten();
    attributes.find(|(key, _)| key.split_once('/').unwrap_or((driver, key.as_str())) == asked).map(|(_, value)| value)
}

/// What was cut inside a text has a quote too few, and is no term.
fn term(text: &str) -> Option<Term> {
    let (left, right) = text.split_once("==")?;
    let value = constant(right.trim())?;
    let left = left.trim();
    if left == "device.driver" {
        return value.into_text().map(Term::Driver);
    }
    let (domain, name) = left.strip_prefix("device.attributes[")?.split_once("].")?;
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let domain = constant(domain)?.into_text().filter(|_| is_name)?;
    Some(Term::Attribute { domain, name: name.to_owned(), value })
}

fn constant(text: &str) -> Option<Constant> {
    let quoted = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    match (quoted, text) {
        (Some(inner), _) => (!inner.contains(['"', '\'', '\\'])).then(|| Constant::Text(inner.to_owned())),
        (None, "true") => Some(Constant::Flag(true)),
        (None, "false") => Some(Constant::Flag(false)),
        (None, number) => number.parse().ok().map(Constant::Number),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn class(expressions: &[&str]) -> DeviceClass {
        let selectors: Vec<_> = expressions.iter().map(|text| json!({"cel": {"expression": text}})).collect();
        serde_json::from_value(json!({"metadata": {"name": "c"}, "spec": {"selectors": selectors}})).unwrap()
    }

    fn device() -> Device {
        serde_json::from_value(json!({"name": "gpu-0", "attributes": {
            "type": {"string": "gpu"}, "index": {"int": 3}, "ecc": {"bool": true}, "example.com/rack": {"string": "b"}}}))
        .unwrap()
    }

    fn includes(expressions: &[&str]) -> bool {
        Meant::by(&class(expressions)).unwrap().includes(NVIDIA, &device())
    }

    #[test]
    fn classes_of_gpu_drivers_are_read() {
        let whole = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
        assert!(includes(&[whole]));
        assert_eq!(Meant::by(&class(&[whole])), Ok(Meant::nvidia()));
        assert!(!includes(&["device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'"]));
        assert!(!includes(&[r#"device.driver=="gpu.example.com""#]));
        assert!(includes(&[
            "device.attributes[\"gpu.nvidia.com\"].index == 3",
            "device.attributes['gpu.nvidia.com'].ecc==true"
        ]));
        assert!(!includes(&["device.driver == 'gpu.nvidia.com'", "device.attributes['gpu.nvidia.com'].index == 4"]));
        assert!(includes(&[]), "a class that selects nothing out means all");
    }

    #[test]
    fn an_attribute_is_of_its_domain_and_without_one_of_the_driver() {
        assert!(includes(&["device.attributes['example.com'].rack == 'b'"]));
        assert!(!includes(&["device.attributes['gpu.nvidia.com'].rack == 'b'"]));
        assert!(!includes(&["device.attributes['example.com'].type == 'gpu'"]));
        assert!(!includes(&["device.attributes['gpu.nvidia.com'].index == '3'"]), "a number is no text");
    }

    #[test]
    fn what_is_not_read_is_never_taken_for_something_else() {
        for expression in [
            "",
            "true",
            "device.driver == 'a' || device.driver == 'b'",
            "device.driver == 'a' && (device.driver == 'a' || true)",
            "device.driver == 'a' ? true : 'b'",
            "device.driver != 'a'",
            "!(device.driver == 'a')",
            "device.driver == 3",
            "device.driver == 'a && b'",
            "device.driver == '\\x61'",
            "device.driver.startsWith('gpu')",
            "device.attributes['d'].name.size() == 3",
            "device.capacity['d'].memory.compareTo(quantity('40Gi')) >= 0",
            "device.attributes[d].type == 'gpu'",
        ] {
            assert_eq!(Meant::by(&class(&[expression])), Err(expression.to_owned()));
        }
    }
}
