//! Device rules that systemd keeps for a container's unit (v2).
//!
//! systemd attaches a program of its own to the cgroup at every `daemon-reload`, next to the one of the
//! container's runtime. An access needs the consent of both.

use std::process::Command;
use std::time::Duration;

use firn_gpu::NodeType;
use firn_oci::{DeviceChange, DeviceRule};

use super::{Cgroup, CgroupError, Version};
use crate::reaper::Reaper;

impl Cgroup {
    /// Lets the container's systemd unit have the devices that `new` allows and `old` does not, until the
    /// unit ends. Call it before [`Cgroup::replace_device_rules`], which alone takes away what goes: the
    /// unit keeps that, and the container still cannot open it.
    pub async fn allow_in_unit(
        &self,
        reaper: &Reaper,
        old: &[DeviceRule],
        new: &[DeviceRule],
        limit: Duration,
    ) -> Result<(), CgroupError> {
        let changes = DeviceRule::changes(old, new).ok_or(CgroupError::DeviceRanges)?;
        let properties: Vec<_> = changes.iter().filter_map(property).collect();
        if properties.is_empty() {
            return Ok(());
        }
        let place = self.own()?;
        let unit = place.path.file_name().and_then(|name| name.to_str());
        let unit = unit.unwrap_or_default().to_owned();
        if self.version == Version::V1 {
            // There systemd writes the list that the container has, so that it would have too much.
            return Err(CgroupError::UnitOfV1 { unit });
        }
        let mut command = Command::new("systemctl");
        command
            .args(["set-property", "--runtime", "--", &unit])
            .args(properties);
        match reaper.output(&mut command, limit).await?.printed() {
            Ok(_) => Ok(()),
            Err(complaint) => Err(CgroupError::Unit { unit, complaint }),
        }
    }
}

/// The property by which a unit may use what is new.
fn property(change: &DeviceChange) -> Option<String> {
    let kind = match change.kind {
        NodeType::Block => "block",
        NodeType::Char => "char",
    };
    let DeviceChange { major, minor, .. } = change;
    let gained = change.gained();
    (!gained.is_none()).then(|| format!("DeviceAllow=/dev/{kind}/{major}:{minor} {}", change.after))
}

#[cfg(test)]
mod tests {
    use firn_oci::{Access, Spec};
    use serde_json::json;

    use super::super::testing::{LIMIT, Scratch};
    use super::*;

    #[test]
    fn a_unit_gets_all_that_the_new_rules_allow_with_a_device() {
        let change = |before: &str, after: &str| {
            property(&DeviceChange {
                kind: NodeType::Char,
                major: 195,
                minor: 1,
                before: Access::of_letters(before),
                after: Access::of_letters(after),
            })
        };
        assert_eq!(change("", "rwm").unwrap(), "DeviceAllow=/dev/char/195:1 rwm");
        // systemd replaces what it has for the device.
        assert_eq!(change("rm", "rw").unwrap(), "DeviceAllow=/dev/char/195:1 rw");
        assert_eq!(change("rw", "r"), None);
        assert_eq!(change("rw", ""), None);
    }

    #[tokio::test]
    async fn a_cgroup_that_is_no_unit_is_an_error() {
        let reaper = Reaper::start().unwrap();
        let rules = |devices: serde_json::Value| {
            let spec = Spec::from(json!({"linux": {"resources": {"devices": devices}}}));
            spec.device_rules().unwrap()
        };
        let new = rules(json!([{"allow": true, "type": "c", "major": 195, "minor": 1, "access": "rw"}]));
        for scratch in Scratch::all() {
            let allowed = scratch.cgroup.allow_in_unit(&reaper, &[], &new, LIMIT).await;
            let error = allowed.unwrap_err();
            if scratch.cgroup.is_v1() {
                assert!(matches!(error, CgroupError::UnitOfV1 { .. }), "{error:?}")
            } else {
                // A host without systemd has no such program.
                assert!(
                    matches!(error, CgroupError::Unit { .. } | CgroupError::Systemctl(_)),
                    "{error:?}"
                )
            }
            let allowed = scratch.cgroup.allow_in_unit(&reaper, &new, &[], LIMIT).await;
            allowed.unwrap();
        }
    }
}
