//! The container's state as the OCI runtime hands it to hooks.

use std::io::Read;

use anyhow::{Context, Result, ensure};

/// Largest state that is read; annotations make up most of it.
const MAX_BYTES: u64 = 1 << 20;

/// The process id of the container's init, in this pid namespace.
pub fn container_pid(input: impl Read) -> Result<i32> {
    let mut bytes = Vec::new();
    input
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .context("cannot read the container's state")?;
    ensure!(
        bytes.len() as u64 <= MAX_BYTES,
        "the container's state is larger than {MAX_BYTES} bytes"
    );
    let state: serde_json::Value =
        serde_json::from_slice(&bytes).context("the container's state is not valid JSON")?;
    let pid = state["pid"]
        .as_i64()
        .and_then(|pid| i32::try_from(pid).ok())
        .filter(|pid| *pid > 0);
    pid.context("the container's state has no pid")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pid_is_read() {
        assert_eq!(
            container_pid(&br#"{"ociVersion":"1.2.0","id":"c","pid":42}"#[..]).unwrap(),
            42
        );
    }

    #[test]
    fn a_state_without_pid_is_an_error() {
        for state in [
            "",
            "{",
            "[]",
            "{}",
            r#"{"pid":0}"#,
            r#"{"pid":"42"}"#,
            r#"{"pid":99999999999}"#,
        ] {
            assert!(container_pid(state.as_bytes()).is_err(), "{state}");
        }
        assert!(container_pid(std::io::repeat(b' ').take(2 << 20)).is_err());
    }
}
