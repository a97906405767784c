//! The version of the CDI specification that a file needs for the features it uses.

use crate::file::{CdiFile, Edits};

/// Released versions that firn reads, oldest first.
const KNOWN: [&str; 8] = [
    "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
];

/// A version that a file cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadVersion {
    /// Not among the known ones.
    #[error("cdiVersion {0:?} is not one of {known}", known = KNOWN.join(", "))]
    Unknown(String),
    /// The file uses a feature of a later version.
    #[error("cdiVersion {declared} does not know {feature}, which came with {needed}")]
    TooOld {
        declared: String,
        needed: &'static str,
        feature: &'static str,
    },
}

/// Checks the version that a file declares against what it uses.
pub(crate) fn check(file: &CdiFile) -> Result<(), BadVersion> {
    let declared = file.version.strip_prefix('v').unwrap_or(&file.version);
    let place = |version: &str| KNOWN.iter().position(|known| *known == version);
    let at = place(declared).ok_or_else(|| BadVersion::Unknown(declared.chars().take(40).collect()))?;
    match needed(file) {
        Some((version, feature)) if place(version) > Some(at) => Err(BadVersion::TooOld {
            declared: declared.to_owned(),
            needed: version,
            feature,
        }),
        _ => Ok(()),
    }
}

/// The latest version that a feature of the file needs, and that feature.
fn needed(file: &CdiFile) -> Option<(&'static str, &'static str)> {
    let edits: Vec<&Edits> = file
        .devices
        .iter()
        .map(|device| &device.edits)
        .chain([&file.edits])
        .collect();
    let any = |uses: fn(&Edits) -> bool| edits.iter().any(|edits| uses(edits));
    let rdt = |key: &str| {
        edits
            .iter()
            .filter_map(|edits| edits.intel_rdt.as_ref())
            .any(|rdt| rdt.get(key).is_some_and(|value| !value.is_null()))
    };
    let class = file.kind.split_once('/').map_or("", |(_, class)| class);
    let digit = |device: &crate::Device| device.name.starts_with(|c: char| c.is_ascii_digit());
    let annotated = file.annotated || file.devices.iter().any(|device| device.annotated);
    let uses = [
        ("1.1.0", "netDevices", any(|e| !e.net_devices.is_empty())),
        ("1.1.0", "intelRdt.schemata", rdt("schemata")),
        ("1.1.0", "intelRdt.enableMonitoring", rdt("enableMonitoring")),
        ("0.7.0", "intelRdt", any(|e| e.intel_rdt.is_some())),
        ("0.7.0", "additionalGids", any(|e| !e.additional_gids.is_empty())),
        ("0.6.0", "annotations", annotated),
        ("0.6.0", "a class with a dot", class.contains('.')),
        (
            "0.5.0",
            "device names that begin with a digit",
            file.devices.iter().any(digit),
        ),
        (
            "0.5.0",
            "hostPath of deviceNodes",
            any(|e| e.device_nodes.iter().any(|node| node.host_path.is_some())),
        ),
        (
            "0.4.0",
            "type of mounts",
            any(|e| e.mounts.iter().any(|mount| mount.kind.is_some())),
        ),
    ];
    uses.into_iter()
        .find_map(|(version, feature, used)| used.then_some((version, feature)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::FileError;

    fn file(version: &str, kind: &str, name: &str, edits: Value) -> Result<CdiFile, FileError> {
        let device = json!({"name": name, "containerEdits": edits});
        let text = json!({"cdiVersion": version, "kind": kind, "devices": [device]}).to_string();
        CdiFile::parse("/etc/cdi/x.json".as_ref(), text.as_bytes())
    }

    #[test]
    fn every_feature_needs_the_version_that_brought_it() {
        let node = json!({"deviceNodes": [{"path": "/dev/x"}]});
        let host = json!({"deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/y"}]});
        let mount = json!({"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]});
        let rdt = |rdt: Value| json!({"intelRdt": rdt});
        let net = json!({"netDevices": [{"hostInterfaceName": "eth1", "name": "net1"}]});
        for (before, since, kind, name, edits) in [
            ("0.3.0", "0.4.0", "v/c", "d", &mount),
            ("0.4.0", "0.5.0", "v/c", "0", &node),
            ("0.4.0", "0.5.0", "v/c", "d", &host),
            ("0.5.0", "0.6.0", "v/c.d", "d", &node),
            ("0.6.0", "0.7.0", "v/c", "d", &rdt(json!({"closID": "a"}))),
            ("0.6.0", "0.7.0", "v/c", "d", &json!({"additionalGids": [44]})),
            (
                "1.0.0",
                "1.1.0",
                "v/c",
                "d",
                &rdt(json!({"schemata": ["L3:0=f"]})),
            ),
            (
                "1.0.0",
                "1.1.0",
                "v/c",
                "d",
                &rdt(json!({"enableMonitoring": true})),
            ),
            ("1.0.0", "1.1.0", "v/c", "d", &net),
        ] {
            let message = file(before, kind, name, edits.clone()).unwrap_err().to_string();
            assert!(
                message.contains(&format!("which came with {since}")),
                "{edits}: {message}"
            );
            for version in [since, "1.1.0"] {
                assert!(
                    file(version, kind, name, edits.clone()).is_ok(),
                    "{version} {edits}"
                );
            }
        }
        assert!(file("0.3.0", "v/c", "d", node).is_ok());
    }

    #[test]
    fn annotations_need_0_6() {
        for at in ["/annotations", "/devices/0/annotations"] {
            let mut value = json!({"cdiVersion": "0.5.0", "kind": "v/c", "devices": [
                {"name": "d", "containerEdits": {"env": ["A=b"]}}
            ]});
            let (parent, key) = at.rsplit_once('/').unwrap();
            value.pointer_mut(parent).unwrap()[key] = json!({"k": "v"});
            let message = CdiFile::parse("x.json".as_ref(), value.to_string().as_bytes()).unwrap_err();
            assert!(message.to_string().contains("annotations"), "{message}");
        }
    }

    #[test]
    fn versions_that_are_not_known_are_refused() {
        let node = json!({"deviceNodes": [{"path": "/dev/x"}]});
        for version in ["", "0.2.0", "0.3", "1.2.0", "2.0.0", "latest"] {
            let message = file(version, "v/c", "d", node.clone()).unwrap_err().to_string();
            assert!(message.contains("is not one of 0.3.0"), "{version:?}: {message}");
        }
        assert!(file("v1.1.0", "v/c", "d", node).is_ok());
    }
}
