//! Annotations of a container that mean nothing to firn.

use firn_config::names;
use serde_json::Map;

use crate::Spec;

/// Annotations that have one of these values.
const VALUES: [(&str, &[&str]); 14] = [
    (names::ANNOTATION_REMAP_POLICY, &["auto", "subset", "strict"]),
    (names::ANNOTATION_RESTORE_FALLBACK, &["cold"]),
    (names::ANNOTATION_RESTORE_RESTARTS, &["again", "cold"]),
    (names::ANNOTATION_IPC, &["none", "released-by-hook"]),
    (names::ANNOTATION_PEER_ACCESS, &["none"]),
    (names::ANNOTATION_CPU, &["any"]),
    (names::ANNOTATION_GPU, &["released-by-hook"]),
    (names::ANNOTATION_NCCL, &["sockets"]),
    (names::ANNOTATION_CUDA, &["interpose"]),
    (names::ANNOTATION_PAUSE, &["release-gpu"]),
    (
        names::ANNOTATION_GPU_BUSY,
        &["refuse", "wait", "elsewhere", "share"],
    ),
    (names::ANNOTATION_BULK, &["inline", "store"]),
    (names::ANNOTATION_TCP, &["refuse", "close", "keep", "auto"]),
    (names::ANNOTATION_EXEC, &["omit", "refuse"]),
];

/// The names of a spec's annotations that begin with `firn.dev/`.
pub fn named(spec: &Spec) -> impl Iterator<Item = &str> {
    let keys = spec.annotations().into_iter().flat_map(Map::keys);
    keys.map(String::as_str)
        .filter(|key| key.starts_with(names::FIRNS))
}

/// Whether a spec of a container may have an annotation of firn's with this name. Create removes others.
pub fn is_known(name: &str) -> bool {
    names::ANNOTATIONS_OF_SPECS.contains(&name)
}

/// Annotations whose value firn does not know, a line for each.
pub fn with_unknown_values(spec: &Spec) -> Vec<String> {
    let wrong = VALUES.into_iter().filter_map(|(name, values)| {
        let value = spec.annotation(name)?;
        let shown: String = value.chars().take(64).collect();
        let line = format!("{name} is {shown:?}, and can be {}", values.join(", "));
        (!values.contains(&value)).then_some(line)
    });
    wrong.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_that_firn_does_not_know_are_named_with_those_that_it_knows() {
        let spec = Spec::from(json!({"annotations": {
            "firn.dev/tcp": "Auto", "firn.dev/exec": "omit", "firn.dev/ipc": "nothing\n",
            "firn.dev/pausd": "x",
        }}));
        assert_eq!(
            with_unknown_values(&spec),
            [
                "firn.dev/ipc is \"nothing\\n\", and can be none, released-by-hook",
                "firn.dev/tcp is \"Auto\", and can be refuse, close, keep, auto",
            ]
        );
        let unknown: Vec<&str> = named(&spec).filter(|name| !is_known(name)).collect();
        assert_eq!(unknown, ["firn.dev/pausd"]);
    }

    #[test]
    fn the_values_are_those_of_the_documentation() {
        let page = include_str!("../../docs/reference/annotations.md");
        for (name, values) in VALUES {
            assert!(is_known(name), "{name}");
            let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            let row = format!("| `{name}` | {} |", values.join(", "));
            assert!(page.contains(&row), "{row}");
        }
    }
}
