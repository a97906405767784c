//! Paths without a look at the file system.

use std::path::{Component, Path, PathBuf};

/// The path without empty, `.` and `..` parts, which are resolved by name.
pub fn lexical(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(clean.pop()),
            Component::CurDir => {}
            part => clean.push(part),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_resolved_by_name() {
        for (path, clean) in [
            ("/run//containerd/./x.sock/ns/../id/", "/run/containerd/x.sock/id"),
            ("/a/ns/../../../b", "/b"),
            ("/ns/id", "/ns/id"),
            ("a/../../b", "b"),
        ] {
            assert_eq!(lexical(Path::new(path)), Path::new(clean), "{path}");
        }
    }
}
