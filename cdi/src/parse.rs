//! Reads and checks a CDI file.

use std::collections::BTreeSet;
use std::path::Path;

use firn_host::bounded::read_at_most;
use firn_host::open_regular;

use crate::bounded::from_yaml;
use crate::{CdiFile, Edits, FileError, names};

/// Largest file that is read. A node of eight divided GPUs has some 200 KiB.
const MAX_BYTES: u64 = 4 << 20;

/// Released versions of the CDI specification that firn reads.
pub(crate) const VERSIONS: [&str; 8] = [
    "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
];

impl CdiFile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let file = open_regular(path).map_err(FileError::Read)?;
        let bytes = read_at_most(file, MAX_BYTES).map_err(FileError::Read)?;
        Self::parse(path, &bytes.ok_or(FileError::TooLarge { limit: MAX_BYTES })?)
    }

    /// Parses a file: JSON if its name ends with `.json`, else YAML.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, FileError> {
        let mut file: Self = if path.extension().is_some_and(|extension| extension == "json") {
            serde_json::from_slice(bytes).map_err(FileError::Json)?
        } else {
            from_yaml(bytes)?
        };
        path.clone_into(&mut file.path);
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), FileError> {
        let version = self.version.strip_prefix('v').unwrap_or(&self.version);
        if !VERSIONS.contains(&version) {
            return Err(FileError::Version(version.chars().take(40).collect()));
        }
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
        Ok(())
    }
}

#[cfg(test)]
mod tests;
