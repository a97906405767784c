//! The mounts that a restore needs.
//!
//! CRIU rebuilds the mount tree of the dump. A bind mount was left out of the image and must be there again, at the
//! same destination, from whatever source the target's own spec gives; without it the restore fails late and unclearly.
//! The manifest's list is only compared with the spec: nothing in it is ever mounted.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Spec, SpecError};

/// A bind mount that the container had at the dump.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequiredMount {
    /// Path in the container.
    pub destination: PathBuf,
    /// Last part of the source's path: driver libraries carry the driver version there. Shown to people, never opened.
    pub source_name: String,
}

/// A mount that a restore needs and cannot have.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The checkpoint had a bind mount that the spec does not give.
    #[error("the checkpoint needs a mount at {} (source {source_name:?}), which the spec does not have", destination.display())]
    NotInSpec {
        destination: PathBuf,
        source_name: String,
    },
    /// The source of a bind mount of the spec is not there.
    #[error("source {} of the mount at {} does not exist on this node", source_path.display(), destination.display())]
    SourceMissing {
        source_path: PathBuf,
        destination: PathBuf,
    },
    /// The spec's mounts cannot be read.
    #[error("cannot read the mounts of the spec")]
    Spec(#[from] SpecError),
}

impl MountError {
    /// The code shown to users.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotInSpec { .. } => "FIRN-MOUNT-NOT-IN-SPEC",
            Self::SourceMissing { .. } => "FIRN-MOUNT-SOURCE-MISSING",
            Self::Spec(error) => error.code(),
        }
    }

    /// What the operator can do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotInSpec { .. } => "give the restored container the same mounts as the source had",
            Self::SourceMissing { .. } => {
                "make the path, or install the same driver and CDI spec as on the source (file names of the driver \
                 carry its version)"
            }
            Self::Spec(error) => error.hint(),
        }
    }
}

/// The mounts of a container that its restore will need.
pub fn required(spec: &Spec) -> Result<Vec<RequiredMount>, MountError> {
    let binds = spec.mounts()?.into_iter().filter(|mount| mount.is_bind());
    let name = |path: &Path| {
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    Ok(binds
        .map(|m| RequiredMount {
            source_name: name(&m.source),
            destination: m.destination,
        })
        .collect())
}

/// Whether everything that a restore will mount is there: each required mount has its place in the spec, and the
/// source of each bind mount of the spec exists. A relative source counts from the bundle.
pub fn check(spec: &Spec, bundle: &Path, required: &[RequiredMount]) -> Result<(), MountError> {
    let mounts = spec.mounts()?;
    for mount in mounts.iter().filter(|mount| mount.is_bind()) {
        if !bundle.join(&mount.source).exists() {
            let (source_path, destination) = (mount.source.clone(), mount.destination.clone());
            return Err(MountError::SourceMissing {
                source_path,
                destination,
            });
        }
    }
    // Compared by components, so that a trailing or doubled slash makes no difference.
    let given = |wanted: &&RequiredMount| mounts.iter().any(|mount| mount.destination == wanted.destination);
    match required.iter().find(|wanted| !given(wanted)) {
        None => Ok(()),
        Some(wanted) => {
            let RequiredMount {
                destination,
                source_name,
            } = wanted.clone();
            Err(MountError::NotInSpec {
                destination,
                source_name,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(source: &Path, destination: &str) -> Spec {
        Spec::from(json!({"mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": destination, "source": source, "options": ["ro", "rbind"]},
        ]}))
    }

    #[test]
    fn bind_mounts_are_required_others_are_not() {
        let required = required(&spec(
            Path::new("/usr/lib/libcuda.so.580.95.05"),
            "/lib/libcuda.so",
        ))
        .unwrap();
        assert_eq!(required.len(), 1);
        assert_eq!(required[0].destination, Path::new("/lib/libcuda.so"));
        assert_eq!(required[0].source_name, "libcuda.so.580.95.05");
    }

    #[test]
    fn a_spec_with_all_mounts_passes_wherever_they_come_from() {
        let dir = tempfile::tempdir().unwrap();
        let needed = required(&spec(Path::new("/elsewhere"), "/data")).unwrap();
        check(&spec(dir.path(), "/data/"), Path::new("/"), &needed).unwrap();
        std::fs::write(dir.path().join("hosts"), "").unwrap();
        check(&spec(Path::new("hosts"), "/data"), dir.path(), &needed).unwrap();
    }

    #[test]
    fn a_missing_mount_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let needed = required(&spec(Path::new("/x/libcuda.so.1"), "/data")).unwrap();
        let error = check(&spec(dir.path(), "/other"), Path::new("/"), &needed).unwrap_err();
        assert_eq!(error.code(), "FIRN-MOUNT-NOT-IN-SPEC");
        assert!(
            error.to_string().contains("/data") && error.to_string().contains("libcuda.so.1"),
            "{error}"
        );
    }

    #[test]
    fn a_missing_source_is_named() {
        let error = check(
            &spec(Path::new("/nonexistent/libcuda.so.1"), "/data"),
            Path::new("/"),
            &[],
        )
        .unwrap_err();
        assert_eq!(error.code(), "FIRN-MOUNT-SOURCE-MISSING");
        assert!(error.to_string().contains("/nonexistent/libcuda.so.1"), "{error}");
    }
}
