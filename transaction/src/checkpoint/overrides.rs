//! Settings of a client that count for one checkpoint, instead of the container's annotations: a job
//! that has run for a week need not be created again for a setting.

use std::collections::BTreeMap;

use firn_config::{Tcp, names};
use firn_host::Problem;
use firn_oci::{Spec, SpecError};

/// Annotations whose value a client may give for one checkpoint. Those that count when the container is
/// created (`firn.dev/nccl`), or that name a hook of it, are none of them.
const OVERRIDABLE: [&str; 4] = [
    names::ANNOTATION_TCP,
    names::ANNOTATION_EXEC,
    names::ANNOTATION_IPC,
    names::ANNOTATION_PEER_ACCESS,
];

/// The values, by annotation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides(BTreeMap<&'static str, String>);

/// A setting that no checkpoint has.
#[derive(Debug, thiserror::Error, Problem)]
#[error("no checkpoint has the setting {name}={value}")]
#[problem(
    "FIRN-OVERRIDE",
    "`firn checkpoint --help` has the settings for one checkpoint: --tcp, --exec, --ipc, --peer-access"
)]
pub struct UnknownOverride {
    name: String,
    value: String,
}

impl Overrides {
    /// Those of a client: every pair has to be one.
    pub fn of<'a>(
        pairs: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Self, UnknownOverride> {
        let pairs = pairs.into_iter().map(|(name, value)| {
            let known = OVERRIDABLE.into_iter().find(|known| known == name);
            match known.filter(|known| is_value(known, value)) {
                Some(known) => Ok((known, value.clone())),
                None => Err(UnknownOverride {
                    name: name.chars().take(64).collect(),
                    value: value.chars().take(64).collect(),
                }),
            }
        });
        pairs.collect::<Result<_, _>>().map(Self)
    }

    /// Those among the annotations of an update, which has others, too.
    pub fn among<'a>(
        annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<Self, UnknownOverride> {
        let annotations = annotations.into_iter();
        Self::of(annotations.filter(|(name, _)| OVERRIDABLE.contains(&&***name)))
    }

    /// Gives the spec these annotations, in memory.
    pub fn apply(&self, spec: &mut Spec) -> Result<(), SpecError> {
        if !self.0.is_empty() {
            let annotations = spec.object_mut("annotations")?;
            for (name, value) in &self.0 {
                annotations.insert((*name).to_owned(), value.clone().into());
            }
        }
        Ok(())
    }

    /// Whether all connections are to continue in the copy.
    pub fn keeps_connections(&self) -> bool {
        self.tcp() == Some(Tcp::Keep)
    }

    /// What becomes of TCP connections, if a client has chosen.
    pub(super) fn tcp(&self) -> Option<Tcp> {
        self.0
            .get(names::ANNOTATION_TCP)
            .and_then(|word| Tcp::of_word(word))
    }
}

fn is_value(name: &str, value: &str) -> bool {
    match name {
        names::ANNOTATION_TCP => Tcp::of_word(value).is_some(),
        names::ANNOTATION_EXEC => matches!(value, "omit" | "refuse"),
        _ => value == "none",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    fn of(given: &[(&str, &str)]) -> Result<Overrides, UnknownOverride> {
        let given = pairs(given);
        Overrides::of(given.iter().map(|(name, value)| (name, value)))
    }

    #[test]
    fn a_setting_replaces_the_containers_annotation() {
        let mut spec = Spec::from(json!({"annotations": {"firn.dev/tcp": "refuse", "a": "b"}}));
        let overrides = of(&[("firn.dev/tcp", "auto"), ("firn.dev/exec", "omit")]).unwrap();
        overrides.apply(&mut spec).unwrap();
        assert_eq!(overrides.tcp(), Some(Tcp::Auto));
        for (name, value) in [("firn.dev/tcp", "auto"), ("firn.dev/exec", "omit"), ("a", "b")] {
            assert_eq!(spec.annotation(name), Some(value));
        }
        let untouched = Spec::from(json!({}));
        let mut spec = untouched.clone();
        Overrides::default().apply(&mut spec).unwrap();
        assert_eq!(spec.value(), untouched.value());
    }

    #[test]
    fn what_no_checkpoint_has_is_refused() {
        for (name, value) in [
            ("firn.dev/tcp", "Auto"),
            ("firn.dev/tcp", ""),
            ("firn.dev/exec", "none"),
            // These need a hook, or what was set at the start.
            ("firn.dev/ipc", "released-by-hook"),
            ("firn.dev/gpu", "released-by-hook"),
            ("firn.dev/nccl", "sockets"),
            ("firn.dev/hook-prepare", "/bin/sh"),
            ("firn.dev/gpu-map", "GPU-a=GPU-b"),
        ] {
            let refused = of(&[(name, value)]).unwrap_err();
            assert_eq!(refused.code(), "FIRN-OVERRIDE", "{name}={value}");
        }
        let update = pairs(&[("firn.dev/checkpoint-pod", "{}"), ("firn.dev/ipc", "none")]);
        let among =
            |update: &[(String, String)]| Overrides::among(update.iter().map(|(name, value)| (name, value)));
        assert_eq!(among(&update).unwrap(), of(&[("firn.dev/ipc", "none")]).unwrap());
        let wrong = pairs(&[("firn.dev/checkpoint-pod", "{}"), ("firn.dev/ipc", "no")]);
        assert!(among(&wrong).is_err());
    }
}
