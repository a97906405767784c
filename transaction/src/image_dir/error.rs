//! Errors of an image directory, with the code and the remedy that users see.

use std::io;
use std::path::{Path, PathBuf};

use firn_host::{Problem, Remedy, remedy};

/// An image directory that cannot be used, or that has changed.
#[derive(Debug, thiserror::Error)]
pub enum ImageDirError {
    #[error("the image in {} is incomplete: {missing} is missing", image.display())]
    Incomplete { image: PathBuf, missing: &'static str },
    #[error("the image directory {} has gone, or is another one, or files of it have gone", image.display())]
    Gone { image: PathBuf },
    #[error("others may enter the image directory {} (owner {owner}, mode {mode:o})", image.display())]
    OpenToOthers { image: PathBuf, mode: u32, owner: u32 },
    #[error("cannot use the image directory {}", image.display())]
    Io {
        image: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Problem for ImageDirError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Incomplete { .. } => remedy("FIRN-DUMP", "the log names what CRIU could not dump"),
            Self::Gone { .. } => remedy(
                "FIRN-IMAGE-GONE",
                "leave the client running, and the directory alone, until the checkpoint has ended",
            ),
            Self::OpenToOthers { .. } => remedy(
                "FIRN-IMAGE-OPEN",
                "name a new or empty directory, or make it root's with mode 700; \
                 see open-image-dir in the configuration",
            ),
            Self::Io { .. } => remedy(
                "FIRN-DUMP",
                "name a directory, not a link to one, on a file system that answers",
            ),
        }
    }
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
