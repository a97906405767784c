//! `features`: what runc prints, with firn's annotations among those that change what the runtime does.
//! Whoever calls it has to keep them from pods.

use std::ffi::OsString;
use std::process::Command;

use firn_config::{names, search_path};
use serde_json::{Value, json};

use crate::error::Trouble;
use crate::program::runc;

/// The field for annotations that may change the runtime's behaviour.
const UNSAFE: &str = "potentiallyUnsafeConfigAnnotations";

/// What runc prints for this command line, with firn's annotations. None if it prints no features: an older
/// one, or another command line.
pub fn of_runc(words: &[OsString]) -> Result<Option<String>, Trouble> {
    let program = runc()?;
    let mut command = Command::new(&program);
    let output = command.args(words).env("PATH", search_path()).output();
    let output = output.map_err(|source| Trouble::Exec { program, source })?;
    let printed = serde_json::from_slice(&output.stdout).ok();
    Ok(printed.filter(|_| output.status.success()).and_then(with_firns))
}

fn with_firns(mut features: Value) -> Option<String> {
    let all = features
        .as_object_mut()?
        .entry(UNSAFE)
        .or_insert_with(|| json!([]));
    let all = all.as_array_mut()?;
    for name in names::ANNOTATIONS_OF_SPECS.iter().chain(&names::NEVER_IN_SPECS) {
        if !all.iter().any(|known| known == name) {
            all.push(json!(name));
        }
    }
    serde_json::to_string_pretty(&features).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firns_annotations_are_named_as_unsafe() {
        let all =
            |features: Value| -> Value { serde_json::from_str(&with_firns(features).unwrap()).unwrap() };
        let runcs = json!({"ociVersionMin": "1.0.0", UNSAFE: ["bundle", "org.criu.config"]});
        let features = all(runcs);
        assert_eq!(features["ociVersionMin"], "1.0.0");
        let named = features[UNSAFE].as_array().unwrap();
        for name in [
            "bundle",
            "org.criu.config",
            "firn.dev/criu-config",
            "firn.dev/gpu-map",
        ] {
            assert!(named.contains(&json!(name)), "{name} in {named:?}");
        }
        assert_eq!(all(features.clone()), features, "each once");
        assert!(
            all(json!({}))[UNSAFE]
                .as_array()
                .is_some_and(|all| all.len() > 20)
        );
        assert_eq!(with_firns(json!([])), None);
        assert_eq!(with_firns(json!({UNSAFE: 7})), None);
    }
}
