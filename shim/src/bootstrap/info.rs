//! The questions `-info` and `-v`.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use containerd_shim_protos::types::introspection::{RuntimeInfo, RuntimeVersion};
use firn_config::{COMMIT, find_runtime};
use firn_process::reaper::Reaper;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};

use crate::action_io::{print, read_stdin, runtime};
use crate::error::{ActionError, failed};
use crate::options::{malformed, runc_options};

/// The name under which containerd and its clients know what this shim can do.
const RUNTIME_NAME: &str = "io.containerd.runc.v2";
/// Type under which containerd looks for the runtime's features, as JSON.
const FEATURES_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/features/Features";
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Options are short.
const MAX_STDIN: u64 = 1 << 20;
/// How long the runtime may take to list its features.
const LIMIT: Duration = Duration::from_secs(5);

/// What `-v` prints, for a shim that was called by this name.
pub fn version(program: Option<OsString>) -> String {
    let program = program.unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default();
    let revision = COMMIT.map_or_else(String::new, |commit| format!("  Revision: {commit}\n"));
    format!("{}:\n  Version:  {VERSION}\n{revision}", name.display())
}

/// Answers `-info`: options from stdin, the runtime's features to stdout.
pub fn info() -> Result<(), ActionError> {
    let answer = describe(&read_stdin(MAX_STDIN)?)?.write_to_bytes();
    print(&answer.map_err(ActionError::Encode)?)
}

fn describe(stdin: &[u8]) -> Result<RuntimeInfo, ActionError> {
    let sent = Any::parse_from_bytes(stdin).map_err(malformed("google.protobuf.Any"));
    let sent = sent.map_err(ActionError::Options)?;
    let options = runc_options(Some(&sent)).map_err(ActionError::Options)?;
    let binary = find_runtime(options.runtime())
        .ok_or_else(|| ActionError::NoRuntime(options.runtime().to_owned()))?;
    Ok(RuntimeInfo {
        name: RUNTIME_NAME.to_owned(),
        version: MessageField::some(RuntimeVersion {
            version: VERSION.to_owned(),
            revision: COMMIT.unwrap_or_default().to_owned(),
            ..RuntimeVersion::default()
        }),
        options: Some(sent).filter(|_| !stdin.is_empty()).into(),
        features: features(&binary)?.into(),
        ..RuntimeInfo::default()
    })
}

/// What the runtime reports of itself; nothing when it cannot (not every runtime has the command).
fn features(binary: &Path) -> Result<Option<Any>, ActionError> {
    let output = runtime()?.block_on(async {
        let reaper = Reaper::start().map_err(failed("watch for child processes"))?;
        let mut command = Command::new(binary);
        Ok::<_, ActionError>(reaper.output(command.arg("features"), LIMIT).await)
    })?;
    let json = output
        .ok()
        .filter(|output| output.success())
        .map(|output| output.stdout);
    // Passed on as it is, so that features of a later runtime arrive.
    let json =
        json.filter(|json| serde_json::from_slice::<serde_json::Value>(json).is_ok_and(|v| v.is_object()));
    Ok(json.map(|value| Any {
        type_url: FEATURES_TYPE.to_owned(),
        value,
        ..Any::default()
    }))
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::shim::oci;

    use firn_process::testing::write_program;

    use super::*;

    fn options(binary: &Path) -> Any {
        let options = oci::Options {
            binary_name: binary.to_str().unwrap().into(),
            ..oci::Options::default()
        };
        let value = options.write_to_bytes().unwrap();
        Any {
            type_url: "containerd.runc.v1.Options".into(),
            value,
            ..Any::default()
        }
    }

    fn describe_with(script: &str) -> (RuntimeInfo, Any) {
        let dir = tempfile::tempdir().unwrap();
        let binary = dir.path().join("runtime");
        write_program(&binary, &format!("#!/bin/sh\n{script}\n"));
        let sent = options(&binary);
        (describe(&sent.write_to_bytes().unwrap()).unwrap(), sent)
    }

    #[test]
    fn features_are_those_of_the_runtime() {
        let json = r#"{"ociVersionMax":"1.2","a-later-one":{"x":[1]}}"#;
        let (info, sent) = describe_with(&format!("[ $1 = features ] && echo '{json}'"));
        assert_eq!(info.name, "io.containerd.runc.v2");
        assert_eq!(info.version.version, env!("CARGO_PKG_VERSION"));
        assert_eq!(info.options.unwrap(), sent);
        assert_eq!(info.features.type_url, FEATURES_TYPE);
        assert_eq!(
            String::from_utf8(info.features.value.clone()).unwrap().trim(),
            json
        );
    }

    #[test]
    fn a_runtime_without_features_is_no_failure() {
        for script in ["exit 1", "echo not json", "kill -9 $$"] {
            assert!(describe_with(script).0.features.is_none(), "{script}");
        }
    }

    #[test]
    fn a_missing_runtime_is_a_failure() {
        let sent = options(Path::new("/nonexistent/runc")).write_to_bytes().unwrap();
        let error = describe(&sent).unwrap_err().to_string();
        assert!(
            error.starts_with("no OCI runtime \"/nonexistent/runc\" found. hint: "),
            "{error}"
        );
    }
}
