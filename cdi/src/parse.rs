//! Reads and checks a CDI file.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;

use firn_host::open_regular;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::bounded::from_yaml;
use crate::file::or_default;
use crate::{CdiFile, Device, Edits, FileError, names, version};

/// Largest file that is read. A node of eight divided GPUs has some 200 KiB.
const MAX_BYTES: u64 = 4 << 20;

/// The fields of a file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    #[serde(default)]
    cdi_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default, deserialize_with = "or_default")]
    annotations: Map<String, Value>,
    #[serde(default, deserialize_with = "or_default")]
    devices: Vec<RawDevice>,
    #[serde(default, deserialize_with = "or_default")]
    container_edits: Edits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDevice {
    #[serde(default)]
    name: String,
    #[serde(default, deserialize_with = "or_default")]
    annotations: Map<String, Value>,
    #[serde(default, deserialize_with = "or_default")]
    container_edits: Edits,
}

impl CdiFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let file = open_regular(path).map_err(FileError::Read)?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(FileError::Read)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(FileError::TooLarge { limit: MAX_BYTES });
        }
        Self::parse(path, &bytes)
    }

    /// Parses a file: JSON if its name ends with `.json`, else YAML.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, FileError> {
        let raw: Raw = match path.extension().is_some_and(|extension| extension == "json") {
            true => serde_json::from_slice(bytes).map_err(FileError::Json)?,
            false => from_yaml(bytes)?,
        };
        let devices = raw.devices.into_iter().map(|device| Device {
            name: device.name,
            edits: device.container_edits,
            annotated: !device.annotations.is_empty(),
        });
        let file = Self {
            path: path.to_owned(),
            version: raw.cdi_version,
            kind: raw.kind,
            annotated: !raw.annotations.is_empty(),
            devices: devices.collect(),
            edits: raw.container_edits,
        };
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), FileError> {
        names::check_kind(&self.kind)?;
        self.edits.check("containerEdits")?;
        let mut seen = BTreeSet::new();
        for device in &self.devices {
            names::check_device(&device.name)?;
            if !seen.insert(&device.name) {
                return Err(FileError::Twice(device.name.clone()));
            }
            let of = format!("device {:?}", device.name);
            device.edits.check(&of)?;
            if device.edits == Edits::default() {
                return Err(FileError::Edit {
                    of,
                    what: "it has no edits".to_owned(),
                });
            }
        }
        if self.devices.is_empty() {
            return Err(FileError::NoDevices);
        }
        Ok(version::check(self)?)
    }
}

#[cfg(test)]
mod tests;
