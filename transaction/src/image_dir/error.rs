//! Errors of an image directory, with the code and the remedy that users see.

use std::io;
use std::path::{Path, PathBuf};

use firn_host::Problem;

/// An image directory that cannot be used, or that has changed.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ImageDirError {
    #[error("the image in {image} is incomplete: {missing} is missing")]
    #[problem("FIRN-DUMP", "the log names what CRIU could not dump")]
    Incomplete { image: PathBuf, missing: &'static str },
    #[error("the image directory {image} has gone, or is another one, or files of it have gone")]
    #[problem(
        "FIRN-IMAGE-GONE",
        "leave the client running, and the directory alone, until the checkpoint has ended"
    )]
    Gone { image: PathBuf },
    #[error("others may enter the image directory {image} (owner {owner}, mode {mode:o})")]
    #[problem(
        "FIRN-IMAGE-OPEN",
        "name a new or empty directory, or make it root's with mode 700; see open-image-dir in the \
         configuration"
    )]
    OpenToOthers { image: PathBuf, mode: u32, owner: u32 },
    #[error("cannot use the image directory {image}")]
    #[problem(
        "FIRN-DUMP",
        "name a directory, not a link to one, on a file system that answers"
    )]
    Io { image: PathBuf, source: io::Error },
}

impl ImageDirError {
    pub(crate) fn gone(image: &Path) -> Self {
        Self::Gone {
            image: image.to_owned(),
        }
    }

    pub(super) fn io(image: &Path, source: io::Error) -> Self {
        Self::Io {
            image: image.to_owned(),
            source,
        }
    }
}
