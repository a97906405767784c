//! The container's state, which the OCI runtime passes to hooks.
//!
//! Read as JSON and not through oci-spec: the runtime specification permits states that oci-spec does not
//! know.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firn_host::bounded::read_at_most;
use firn_oci::Spec;
use serde_json::Value;

/// Largest state that is read; annotations make up most of it.
const MAX_BYTES: u64 = 1 << 20;

/// The state of a container.
#[derive(Debug)]
pub struct State(Value);

impl State {
    /// Reads the state.
    pub fn read(input: impl Read) -> Result<Self> {
        const WHAT: &str = "the container's state";
        let bytes = read_at_most(input, MAX_BYTES)
            .with_context(|| format!("cannot read {WHAT}"))?
            .with_context(|| format!("{WHAT} is larger than {MAX_BYTES} bytes"))?;
        let state = serde_json::from_slice(&bytes).with_context(|| format!("{WHAT} is not valid JSON"))?;
        Ok(Self(state))
    }

    /// The process id of the container's init, in this pid namespace.
    pub fn pid(&self) -> Result<i32> {
        let pid = self.0["pid"]
            .as_i64()
            .and_then(|pid| i32::try_from(pid).ok())
            .filter(|pid| *pid > 0);
        pid.context("the container's state has no pid")
    }

    /// Path of the container's root file system, from the spec in its bundle.
    pub fn rootfs(&self) -> Result<PathBuf> {
        let bundle = self.bundle()?;
        root(bundle, &Spec::load(bundle)?)
    }

    /// The container's bundle.
    pub fn bundle(&self) -> Result<&Path> {
        let bundle = self.0["bundle"].as_str().filter(|bundle| !bundle.is_empty());
        Ok(Path::new(bundle.context("the container's state has no bundle")?))
    }
}

/// Path of the root file system of the container with this bundle and spec.
pub fn root(bundle: &Path, spec: &Spec) -> Result<PathBuf> {
    let root = spec.root_path().filter(|root| !root.as_os_str().is_empty());
    let root = root.with_context(|| format!("the spec in {} has no root", bundle.display()))?;
    Ok(bundle.join(root))
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
