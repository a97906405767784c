//! Which containers were restored by name, for programs that may not see bundles.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use firn_host::UnlessAbsent;

/// Notes it in `dir`, and removes the notes of containers whose bundles are gone.
pub fn note(dir: &Path, id: &str, bundle: &Path) -> io::Result<()> {
    let bundles = bundle.parent().ok_or(ErrorKind::InvalidInput)?;
    let notes = dir.join(bundles.file_name().ok_or(ErrorKind::InvalidInput)?);
    fs::create_dir_all(&notes)?;
    for note in fs::read_dir(&notes)?.flatten() {
        if !bundles.join(note.file_name()).exists() {
            fs::remove_file(note.path()).unless_absent()?;
        }
    }
    fs::write(notes.join(id), "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_those_of_containers_that_are_there() {
        let root = tempfile::tempdir().unwrap();
        let (dir, bundles) = (root.path().join("restored"), root.path().join("k8s.io"));
        for id in ["a", "b"] {
            fs::create_dir_all(bundles.join(id)).unwrap();
            note(&dir, id, &bundles.join(id)).unwrap();
        }
        let is_noted = |id: &str| dir.join("k8s.io").join(id).exists();
        assert!(is_noted("a") && is_noted("b"));
        fs::remove_dir(bundles.join("a")).unwrap();
        note(&dir, "b", &bundles.join("b")).unwrap();
        assert!(!is_noted("a") && is_noted("b"));
    }
}
