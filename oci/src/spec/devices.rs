//! Devices of a spec, and the rules of its device cgroup.

use std::path::Path;

use firn_gpu::{DeviceId, DeviceNode, NodeType};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType};
use serde::Deserialize;
use serde_json::Value;

use super::device_changes::Access;
use super::{Spec, SpecError};

/// An entry of `linux.devices`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecDevice {
    /// Path in the container, type and numbers.
    pub node: DeviceNode,
    /// Permission bits, 0666 unless given.
    pub mode: u32,
    /// Owner in the container.
    pub uid: u32,
    /// Group in the container.
    pub gid: u32,
}

/// An entry of `linux.resources.devices`. A missing or negative number stands for all devices.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRule(LinuxDeviceCgroup);

impl DeviceRule {
    fn read(entry: &Value) -> Result<Self, SpecError> {
        let mut entry = entry.clone();
        // runc takes an empty type for all types; oci-spec knows only a missing one.
        if entry["type"] == "" {
            entry["type"] = Value::Null;
        }
        let rule = LinuxDeviceCgroup::deserialize(&entry);
        rule.map(Self)
            .map_err(|error| SpecError::malformed("linux.resources.devices", Some(error)))
    }

    /// Whether the rule allows access to the devices that it names.
    pub fn is_allow(&self) -> bool {
        self.0.allow()
    }

    /// Whether the rule names more than one device.
    pub fn is_wildcard(&self) -> bool {
        self.has_all_types() || is_all(self.0.major()) || is_all(self.0.minor())
    }

    /// Whether the rule names all devices, for reading and for writing.
    fn names_all(&self) -> bool {
        let is_every_device = self.has_all_types() && is_all(self.0.major()) && is_all(self.0.minor());
        is_every_device && (Access::READ | Access::WRITE) & !self.letters() == Access::NONE
    }

    /// Whether these rules, in order, allow opening the device for reading or writing.
    pub fn open(rules: &[Self], node: &DeviceNode) -> bool {
        !(Self::access(rules, node.id()) & (Access::READ | Access::WRITE)).is_none()
    }

    /// What these rules, in order, allow with the device of this type and these numbers.
    pub(super) fn access(rules: &[Self], device: DeviceId) -> Access {
        let covering = rules.iter().filter(|rule| rule.covers(device));
        covering.fold(Access::NONE, |all, rule| {
            if rule.is_allow() {
                all | rule.letters()
            } else {
                all & !rule.letters()
            }
        })
    }

    /// The device that the rule names alone.
    pub(super) fn one_device(&self) -> Option<DeviceId> {
        let number = |number: Option<i64>| number.and_then(|number| u64::try_from(number).ok());
        let kind = match self.0.typ()? {
            LinuxDeviceType::A => return None,
            LinuxDeviceType::B => NodeType::Block,
            _ => NodeType::Char,
        };
        Some(DeviceId {
            kind,
            major: number(self.0.major())?,
            minor: number(self.0.minor())?,
        })
    }

    /// Whether the rule names this device alone.
    pub fn is_exactly(&self, node: &DeviceNode) -> bool {
        !self.is_wildcard() && self.covers(node.id())
    }

    /// Whether the rule names this device, alone or among others.
    fn covers(&self, device: DeviceId) -> bool {
        let is_block = self.0.typ() == Some(LinuxDeviceType::B);
        let has_type = self.has_all_types() || is_block == (device.kind == NodeType::Block);
        let has_number =
            |rule: Option<i64>, of_node: u64| is_all(rule) || rule.map(u64::try_from) == Some(Ok(of_node));
        has_type && has_number(self.0.major(), device.major) && has_number(self.0.minor(), device.minor)
    }

    fn has_all_types(&self) -> bool {
        matches!(self.0.typ(), None | Some(LinuxDeviceType::A))
    }

    fn letters(&self) -> Access {
        Access::of_letters(self.0.access().as_deref().unwrap_or_default())
    }
}

/// Whether a number of a rule stands for all devices.
fn is_all(number: Option<i64>) -> bool {
    number.is_none_or(|number| number < 0)
}

impl Spec {
    /// Paths of device nodes, also where the entry is malformed otherwise.
    pub(crate) fn device_paths(&self) -> impl Iterator<Item = &Path> {
        let devices = self.array("/linux/devices").iter();
        devices.filter_map(|device| device["path"].as_str().map(Path::new))
    }

    /// Device nodes of the container, without fifos.
    pub fn devices(&self) -> Result<Vec<SpecDevice>, SpecError> {
        let entries = self.array("/linux/devices").iter();
        entries
            .filter_map(|entry| parse_device(entry).transpose())
            .collect()
    }

    /// Rules of the device cgroup, in the order in which they apply.
    pub fn device_rules(&self) -> Result<Vec<DeviceRule>, SpecError> {
        let entries = self.array("/linux/resources/devices").iter();
        entries.map(DeviceRule::read).collect()
    }

    /// Whether the device cgroup allows every device of the host. Such a container is privileged: nobody has
    /// chosen its device nodes.
    pub fn opens_all_devices(&self) -> bool {
        let rules = self.device_rules().unwrap_or_default();
        let last = rules.iter().rfind(|rule| rule.names_all());
        last.is_some_and(DeviceRule::is_allow)
    }
}

/// Reads an entry of `linux.devices`; a fifo has no numbers and is left out.
pub fn parse_device(entry: &Value) -> Result<Option<SpecDevice>, SpecError> {
    let malformed = |error| SpecError::malformed("linux.devices", error);
    let device = LinuxDevice::deserialize(entry).map_err(|error| malformed(Some(error)))?;
    let kind = match device.typ() {
        LinuxDeviceType::C | LinuxDeviceType::U => NodeType::Char,
        LinuxDeviceType::B => NodeType::Block,
        LinuxDeviceType::P => return Ok(None),
        LinuxDeviceType::A => return Err(malformed(None)),
    };
    if device.path().as_os_str().is_empty() {
        return Err(malformed(None));
    }
    let number = |number: i64| u64::try_from(number).map_err(|_| malformed(None));
    Ok(Some(SpecDevice {
        node: DeviceNode {
            path: device.path().clone(),
            kind,
            major: number(device.major())?,
            minor: number(device.minor())?,
        },
        mode: device.file_mode().unwrap_or(0o666) & 0o777,
        uid: device.uid().unwrap_or(0),
        gid: device.gid().unwrap_or(0),
    }))
}
