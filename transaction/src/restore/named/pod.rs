//! A container's part of a pod's checkpoint, which `firn cri-pods` restores.
//!
//! It makes a directory of links under a random name, and notes in it for which sandbox. The name lets nobody
//! have the checkpoint: it is in the pod's annotation, which others may read. So messages show neither it nor
//! the link.

use std::fs;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::Absent;

use super::NameError;

/// What a restore is from, for the log.
pub(super) const ORIGIN: &str = "a pod's checkpoint";

/// Where the link leads, if it was made for a container of this sandbox.
pub(super) fn place(link: &Path, sandbox: &str) -> Result<PathBuf, NameError> {
    let of = link
        .parent()
        .map(|dir| fs::read_to_string(dir.join(names::POD_SANDBOX)));
    let is_its = match of {
        Some(Ok(of)) => !sandbox.is_empty() && of == sandbox,
        Some(Err(error)) if !error.is_absent() => return Err(unreadable(&error)),
        Some(Err(_)) | None => false,
    };
    if !is_its {
        return Err(NameError::NoPod);
    }
    fs::read_link(link).map_err(|error| {
        if error.is_absent() {
            NameError::NoPod
        } else {
            unreadable(&error)
        }
    })
}

fn unreadable(error: &std::io::Error) -> NameError {
    NameError::Unreadable {
        path: names::POD_CHECKPOINTS.into(),
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_is_followed_for_the_pod_that_it_was_made_for() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("0123456789abcdef0123456789abcdef");
        fs::create_dir(&dir).unwrap();
        let link = dir.join("server");
        symlink("/checkpoints/two/server", &link).unwrap();
        let none = Err(NameError::NoPod);
        assert_eq!(place(&link, "sandbox-1"), none, "the pod is being made");
        fs::write(dir.join(names::POD_SANDBOX), "sandbox-1").unwrap();
        assert_eq!(place(&link, "sandbox-1"), Ok("/checkpoints/two/server".into()));
        // Somebody has read the annotation.
        assert_eq!(place(&link, "sandbox-2"), none);
        assert_eq!(place(&link, ""), none);
        fs::write(dir.join(names::POD_SANDBOX), "").unwrap();
        assert_eq!(place(&link, ""), none);
        fs::write(dir.join(names::POD_SANDBOX), "sandbox-1").unwrap();
        assert_eq!(place(&dir.join("other"), "sandbox-1"), none);
        fs::remove_file(&link).unwrap();
        assert_eq!(place(&link, "sandbox-1"), none, "it was started");
        let error = place(&link, "sandbox-1").unwrap_err().to_string();
        assert!(!error.contains("0123456789abcdef"), "{error}");
    }
}
