//! The container's state as the OCI runtime hands it to hooks, and the bundle that it names.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use firn_config::names;
use serde_json::Value;

/// Largest state that is read; annotations make up most of it.
const MAX_BYTES: u64 = 1 << 20;

/// Largest spec that is read.
const MAX_SPEC: u64 = 16 << 20;

/// The state of a container.
#[derive(Debug)]
pub struct State(Value);

impl State {
    /// Reads it.
    pub fn read(input: impl Read) -> Result<Self> {
        Ok(Self(json(input, MAX_BYTES, "the container's state")?))
    }

    /// The process id of the container's init, in this pid namespace.
    pub fn pid(&self) -> Result<i32> {
        let pid = self.0["pid"]
            .as_i64()
            .and_then(|pid| i32::try_from(pid).ok())
            .filter(|pid| *pid > 0);
        pid.context("the container's state has no pid")
    }

    /// The container's root file system, as the spec in its bundle names it.
    pub fn rootfs(&self) -> Result<PathBuf> {
        let bundle = self.bundle()?;
        root(bundle, &spec(bundle)?)
    }

    /// The container's bundle.
    pub fn bundle(&self) -> Result<&Path> {
        let bundle = self.0["bundle"].as_str().filter(|bundle| !bundle.is_empty());
        Ok(Path::new(bundle.context("the container's state has no bundle")?))
    }
}

/// The spec in a bundle.
pub fn spec(bundle: &Path) -> Result<Value> {
    let path = bundle.join(names::BUNDLE_SPEC);
    let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    json(file, MAX_SPEC, &path.display().to_string())
}

/// The root file system that the spec of this bundle names.
pub fn root(bundle: &Path, spec: &Value) -> Result<PathBuf> {
    let root = spec.pointer("/root/path").and_then(Value::as_str);
    let root = root.filter(|root| !root.is_empty());
    Ok(bundle.join(root.with_context(|| format!("the spec in {} names no root", bundle.display()))?))
}

fn json(input: impl Read, limit: u64, what: &str) -> Result<Value> {
    let mut bytes = Vec::new();
    input
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {what}"))?;
    ensure!(bytes.len() as u64 <= limit, "{what} is larger than {limit} bytes");
    serde_json::from_slice(&bytes).with_context(|| format!("{what} is not valid JSON"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(text: &str) -> Result<State> {
        State::read(text.as_bytes())
    }

    #[test]
    fn the_pid_is_read() {
        let state = state(r#"{"ociVersion":"1.2.0","id":"c","pid":42}"#).unwrap();
        assert_eq!(state.pid().unwrap(), 42);
        assert!(state.rootfs().is_err());
    }

    #[test]
    fn a_state_without_pid_is_an_error() {
        for text in [
            "",
            "{",
            "[]",
            "{}",
            r#"{"pid":0}"#,
            r#"{"pid":"42"}"#,
            r#"{"pid":99999999999}"#,
        ] {
            assert!(state(text).and_then(|state| state.pid()).is_err(), "{text}");
        }
        assert!(State::read(std::io::repeat(b' ').take(2 << 20)).is_err());
    }

    #[test]
    fn the_root_is_that_of_the_bundles_spec() {
        let bundle = tempfile::tempdir().unwrap();
        let state = state(&serde_json::json!({"bundle": bundle.path()}).to_string()).unwrap();
        assert!(state.rootfs().is_err());
        for (root, expected) in [
            ("rootfs", bundle.path().join("rootfs")),
            ("/run/root", "/run/root".into()),
        ] {
            let spec = serde_json::json!({"root": {"path": root}});
            std::fs::write(bundle.path().join("config.json"), spec.to_string()).unwrap();
            assert_eq!(state.rootfs().unwrap(), expected);
        }
        std::fs::write(bundle.path().join("config.json"), "{}").unwrap();
        assert!(state.rootfs().is_err());
    }
}
