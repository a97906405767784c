//! Where a checkpoint is: an image of containerd's, a tar file, or an image directory.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use firn_host::Problem;

/// What an argument is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// The name of an image in containerd.
    Ref,
    /// A tar file.
    File,
    /// An image directory.
    Dir,
}

/// A checkpoint's place, by the argument that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    Ref(String),
    File(PathBuf),
    Dir(PathBuf),
}

/// An argument that may be two things.
#[derive(Debug, thiserror::Error, Problem)]
#[error("{text:?} may be the name of an image, and is a {found} here")]
#[problem(
    "FIRN-PLACE",
    "write ./NAME for the file or directory, or add --as ref for the image"
)]
pub struct Ambiguous {
    text: String,
    found: &'static str,
}

impl Location {
    /// A path begins with `/`, `./` or `../`, or ends with `/` or `.tar`. Everything else is the name of an
    /// image, unless there is a file or directory of that name.
    pub fn of(text: &str, kind: Option<Kind>) -> Result<Self, Ambiguous> {
        let path = Path::new(text);
        match kind {
            Some(Kind::Ref) => return Ok(Self::Ref(text.to_owned())),
            Some(Kind::File) => return Ok(Self::File(path.to_owned())),
            Some(Kind::Dir) => return Ok(Self::Dir(path.to_owned())),
            None => {}
        }
        let begins = ["/", "./", "../"].iter().any(|begin| text.starts_with(begin));
        let is_path = begins || text == "." || text == ".." || text.ends_with('/') || text.ends_with(".tar");
        if !is_path && let Ok(found) = path.metadata() {
            return Err(Ambiguous {
                text: text.to_owned(),
                found: if found.is_dir() { "directory" } else { "file" },
            });
        }
        Ok(match is_path {
            false => Self::Ref(text.to_owned()),
            true if path.is_dir() => Self::Dir(path.to_owned()),
            true if path.exists() || text.ends_with(".tar") => Self::File(path.to_owned()),
            true => Self::Dir(path.to_owned()),
        })
    }

    /// For a command that only reads: what is there counts as a file or directory, whatever its name is.
    pub fn to_read(text: &str, kind: Option<Kind>) -> Self {
        let path = Path::new(text).to_owned();
        match Self::of(text, kind) {
            Ok(place) => place,
            Err(_) if path.is_dir() => Self::Dir(path),
            Err(_) => Self::File(path),
        }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Self::Ref(_) => "ref",
            Self::File(_) => "file",
            Self::Dir(_) => "dir",
        }
    }

    pub fn shown(&self) -> String {
        match self {
            Self::Ref(name) => name.clone(),
            Self::File(path) | Self::Dir(path) => path.display().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_an_argument_decides() {
        for (text, kind) in [
            ("checkpoint/job", "ref"),
            ("docker.io/library/job:1", "ref"),
            ("job.tar", "file"),
            ("./job.tar", "file"),
            ("/nowhere/job", "dir"),
            ("./job", "dir"),
            ("../job/", "dir"),
            ("/etc/passwd", "file"),
            ("/etc", "dir"),
            (".", "dir"),
        ] {
            assert_eq!(Location::of(text, None).unwrap().kind(), kind, "{text}");
        }
        let forced = Location::of("/etc", Some(Kind::Ref)).unwrap();
        assert_eq!(forced, Location::Ref("/etc".to_owned()));
    }

    #[test]
    fn a_name_that_is_also_a_file_is_refused() {
        // Tests run in the crate's directory.
        let refused = Location::of("src", None).unwrap_err();
        assert_eq!(refused.code(), "FIRN-PLACE");
        assert!(refused.to_string().contains("is a directory here"), "{refused}");
        assert_eq!(Location::of("src", Some(Kind::Ref)).unwrap().kind(), "ref");
    }
}
