//! The user's CRIU configuration file of a container.
//!
//! CRIU runs as root in the host's namespaces, and its options can run programs and write files there.
//! Whoever may name such a file for a container must not become root by it. So a file is taken only if nobody
//! but root can change it, and one that an annotation names may have only the options of [`OPTIONS`]. The
//! operator's own file, /etc/criu/runc.conf, may have any.

use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::bounded::read_at_most;
use firn_host::{UnlessAbsent, atomic_file, of_root, open_regular};

use super::CriuError;
use crate::Spec;

/// Largest file that is read.
pub(super) const MAX_BYTES: u64 = 64 << 10;

/// Longest path that is kept in the bundle.
const MAX_PATH: u64 = 4096;

/// What CRIU dumps, and how: options that name no program, no file and no place outside of the container.
const OPTIONS: [&str; 18] = [
    "allow-uprobes",
    "auto-dedup",
    "cpu-cap",
    "display-stats",
    "evasive-devices",
    "ext-unix-sk",
    "file-locks",
    "file-validation",
    "force-irmap",
    "ghost-fiemap",
    "ghost-limit",
    "link-remap",
    "network-lock",
    "shell-job",
    "skip-in-flight",
    "tcp-close",
    "tcp-established",
    "timeout",
];

/// Options with which a dump would have its image, or a part of it, elsewhere, or not end by itself.
const MISLEADING: [&str; 6] = [
    "images-dir",
    "lazy-pages",
    "leave-stopped",
    "page-server",
    "prev-images-dir",
    "stream",
];

/// Which file it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UsersFile {
    /// The spec demands that there is none.
    None,
    /// The one that runc reads when the spec names none: the operator's.
    Operators,
    /// The one that the spec names.
    Named(PathBuf),
}

impl UsersFile {
    /// The file that runc would take for this spec. In a spec that firn has edited, the file in the bundle
    /// shows what it had named.
    pub(super) fn of(spec: &Spec, bundle: &Path) -> Self {
        match spec.annotation(names::ANNOTATION_CRIU_CONFIG) {
            Some(path) if is_firns(path) => Self::noted(bundle),
            Some("") => Self::None,
            Some(path) => Self::Named(path.into()),
            None => Self::Operators,
        }
    }

    /// What an earlier process has noted in this bundle. A spec that has come from another bundle names none
    /// here: the path in it may be anybody's.
    fn noted(bundle: &Path) -> Self {
        let note = bundle.join(names::BUNDLE_USERS_CRIU_CONFIG);
        let read = if note.is_absolute() {
            open_regular(&note).and_then(|file| read_at_most(file, MAX_PATH))
        } else {
            Ok(None)
        };
        match read {
            Ok(Some(path)) if path.is_empty() => Self::None,
            Ok(Some(path)) => Self::Named(std::ffi::OsString::from_vec(path).into()),
            _ => Self::Operators,
        }
    }

    /// Notes it in the bundle, for processes that find a spec that firn has edited.
    pub(super) fn note(&self, bundle: &Path) -> io::Result<()> {
        let name = names::BUNDLE_USERS_CRIU_CONFIG;
        let path = match self {
            Self::Operators => return std::fs::remove_file(bundle.join(name)).unless_absent(),
            Self::None => &b""[..],
            Self::Named(path) => path.as_os_str().as_bytes(),
        };
        atomic_file::write(bundle, name, path, 0o600)
    }

    pub(super) fn path(&self) -> Option<&Path> {
        match self {
            Self::None => None,
            Self::Operators => Some(Path::new(names::RUNC_CRIU_CONFIG)),
            Self::Named(path) => Some(path),
        }
    }

    /// Its lines; empty if there is no file.
    pub(super) fn lines(&self) -> Result<String, CriuError> {
        let text = self.text()?;
        match (self, text.lines().find(|line| !is_harmless(line))) {
            (Self::Named(path), Some(line)) => Err(CriuError::Option {
                path: path.clone(),
                line: shown(line),
            }),
            _ => Ok(text),
        }
    }

    /// The same, also with lines that are the operator's alone.
    pub(super) fn text(&self) -> Result<String, CriuError> {
        let Some(path) = self.path() else {
            return Ok(String::new());
        };
        let unreadable = |source| CriuError::Read {
            path: path.to_owned(),
            source,
        };
        let Some(found) = path.canonicalize().if_present().map_err(unreadable)? else {
            return Ok(String::new());
        };
        for place in found.ancestors() {
            let is_file = place == found;
            if !is_of_root(&place.symlink_metadata().map_err(unreadable)?, is_file) {
                return Err(CriuError::NotRoots {
                    path: path.to_owned(),
                    place: place.to_owned(),
                });
            }
        }
        let bytes = open_regular(&found).and_then(|file| read_at_most(file, MAX_BYTES));
        let text = bytes.map_err(unreadable)?;
        let text = text.and_then(|bytes| String::from_utf8(bytes).ok());
        let text = text.filter(|text| !text.contains('\0'));
        text.ok_or_else(|| CriuError::NotText {
            path: path.to_owned(),
        })
    }
}

/// The first line with an option of [`MISLEADING`], or with the beginning of its name. CRIU puts dashes
/// before the first word of a line, and takes others as they are: `ghost-limit 1G --images-dir /srv` has two
/// options.
pub(super) fn misleading(text: &str) -> Option<&str> {
    let is_one = |option: &str| {
        let name = option.split('=').next().unwrap_or_default();
        name.len() > 1 && MISLEADING.iter().any(|misleading| misleading.starts_with(name))
    };
    // Of an image directory, and of tasks that stay stopped.
    let is_short = |word: &str| ["-D", "-s"].iter().any(|short| word.starts_with(short));
    text.lines().find(|line| {
        let words = line.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\''));
        let words = words.filter(|word| !word.is_empty());
        let mut words = words.take_while(|word| !word.starts_with('#'));
        let first = words.next().unwrap_or_default();
        is_one(first) || words.any(|word| is_short(word) || word.strip_prefix("--").is_some_and(is_one))
    })
}

/// A line as a message shows it.
pub(super) fn shown(line: &str) -> String {
    let replace = |c: char| if c.is_control() { '?' } else { c };
    line.chars().take(80).map(replace).collect()
}

/// Whether this is firn's file of any bundle, and no user's.
fn is_firns(path: &str) -> bool {
    Path::new(path).file_name() == Some(names::BUNDLE_CRIU_CONFIG.as_ref())
}

/// Whether nobody but root can put something else into its place.
fn is_of_root(found: &Metadata, is_file: bool) -> bool {
    if is_file {
        found.uid() == 0 && found.mode() & 0o022 == 0
    } else {
        of_root::holds_for_root(found)
    }
}

/// Whether the line is empty, or one option of [`OPTIONS`] with a plain value. CRIU takes every further word
/// of a line for an option, and the beginning of a name for the name.
fn is_harmless(line: &str) -> bool {
    let words = line.split([' ', '\t']).filter(|word| !word.is_empty());
    let words: Vec<&str> = words.take_while(|word| !word.starts_with('#')).collect();
    let is_value = |value: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | ',' | ':' | '+');
        value.chars().all(is_plain)
    };
    match *words {
        [] => true,
        [option] => match option.split_once('=') {
            Some((option, value)) => OPTIONS.contains(&option) && is_value(value),
            None => OPTIONS.contains(&option),
        },
        [option, value] => OPTIONS.contains(&option) && is_value(value),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
