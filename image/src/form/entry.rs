//! What the entries of an archive are to a checkpoint. The archive may come from anybody: whoever looks at
//! one, signs it or restores it decides by the same rules, so that all see the same image.

use std::path::{Component, Path};

use super::{IMAGE, LAYER, MARKS, SPEC};

/// What an archive holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Archived {
    /// The files of an image directory, as containerd archives them.
    Image,
    /// The parts of a checkpoint, as the kubelet archives them.
    Parts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    Directory,
    Other,
}

/// What is done with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<'p> {
    /// A file of the image, by its name there.
    File(&'p str),
    /// What the container had written.
    Layer,
    /// The container's spec.
    Spec,
    /// Nothing: the directory of the image, or a report next to it.
    Nothing,
}

/// Why an archive is not unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    #[error("the path leads out of the checkpoint")]
    Outside,
    #[error("the name is no text")]
    Name,
    #[error("it is no regular file directly in the image")]
    Kind,
    #[error("the archive has two images")]
    TwoImages,
}

impl Archived {
    /// What an entry is, by its path and kind.
    ///
    /// # Errors
    /// The archive is not one that a checkpoint is made into.
    pub fn entry(self, path: &Path, kind: EntryKind) -> Result<Entry<'_>, EntryError> {
        let parts = parts(path)?;
        match (self, parts.as_slice(), kind) {
            (Self::Image, [], EntryKind::Directory) => Ok(Entry::Nothing),
            (Self::Image, &[name], EntryKind::File) => Ok(Entry::File(name)),
            (Self::Image, ..) => Err(EntryError::Kind),
            (Self::Parts, [IMAGE], EntryKind::Directory) => Ok(Entry::Nothing),
            (Self::Parts, &[IMAGE, name], EntryKind::File) => Ok(Entry::File(name)),
            (Self::Parts, [LAYER], EntryKind::File) => Ok(Entry::Layer),
            (Self::Parts, [IMAGE, ..] | [LAYER], _) => Err(EntryError::Kind),
            (Self::Parts, [SPEC], EntryKind::File) => Ok(Entry::Spec),
            // Who unpacks it with tar would find another image.
            (Self::Parts, [name], _) if MARKS.contains(name) => Err(EntryError::TwoImages),
            (Self::Parts, ..) => Ok(Entry::Nothing),
        }
    }
}

/// The names of a path that leads nowhere else.
fn parts(path: &Path) -> Result<Vec<&str>, EntryError> {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => parts.push(name.to_str().ok_or(EntryError::Name)?),
            Component::CurDir => {}
            _ => return Err(EntryError::Outside),
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn an_archive_of_an_image_has_its_files_and_nothing_else() {
        let entry = |path: &'static str, kind| Archived::Image.entry(Path::new(path), kind);
        for path in ["inventory.img", "./inventory.img", ".//inventory.img"] {
            assert_eq!(entry(path, EntryKind::File), Ok(Entry::File("inventory.img")));
        }
        assert_eq!(entry("./", EntryKind::Directory), Ok(Entry::Nothing));
        for (path, kind) in [
            ("./", EntryKind::File),
            ("inner/", EntryKind::Directory),
            ("inner/inventory.img", EntryKind::File),
            ("inventory.img", EntryKind::Other),
        ] {
            assert_eq!(entry(path, kind), Err(EntryError::Kind), "{path}");
        }
    }

    #[test]
    fn an_archive_of_parts_has_reports_too() {
        let entry = |path: &'static str, kind| Archived::Parts.entry(Path::new(path), kind);
        for (path, kind, expected) in [
            (
                "./checkpoint/inventory.img",
                EntryKind::File,
                Entry::File("inventory.img"),
            ),
            ("checkpoint/", EntryKind::Directory, Entry::Nothing),
            ("rootfs-diff.tar", EntryKind::File, Entry::Layer),
            ("spec.dump", EntryKind::File, Entry::Spec),
            ("spec.dump", EntryKind::Other, Entry::Nothing),
            ("config.dump", EntryKind::File, Entry::Nothing),
            ("./", EntryKind::Directory, Entry::Nothing),
        ] {
            assert_eq!(entry(path, kind), Ok(expected), "{path}");
        }
        for (path, kind) in [
            ("checkpoint", EntryKind::Other),
            ("checkpoint/inner/", EntryKind::Directory),
            ("checkpoint/inner/inventory.img", EntryKind::File),
            ("checkpoint/inventory.img", EntryKind::Other),
            ("rootfs-diff.tar", EntryKind::Directory),
        ] {
            assert_eq!(entry(path, kind), Err(EntryError::Kind), "{path}");
        }
        for mark in MARKS {
            assert_eq!(entry(mark, EntryKind::File), Err(EntryError::TwoImages));
        }
    }

    #[test]
    fn no_path_leads_elsewhere() {
        for archived in [Archived::Image, Archived::Parts] {
            for path in ["/inventory.img", "../inventory.img", "checkpoint/../../x", ".."] {
                let entry = archived.entry(Path::new(path), EntryKind::File);
                assert_eq!(entry, Err(EntryError::Outside), "{path}");
            }
            let name = Path::new(OsStr::from_bytes(b"core-\xff.img"));
            assert_eq!(archived.entry(name, EntryKind::File), Err(EntryError::Name));
        }
    }
}
