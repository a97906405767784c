//! Why memory could not be copied.

use std::io;

use firn_host::Problem;

use crate::criu::ImageFault;
use firn_store::{Digest, Reader, StoreError};

/// A copy of memory that failed. The processes are as they were, except those that [`super::fill`] was
/// filling.
#[derive(Debug, thiserror::Error, Problem)]
#[problem(
    "FIRN-MEMORY",
    "see whether the process was killed or ran out of memory; without the store \
     (`firn.dev/bulk=inline`) CRIU alone copies its memory"
)]
pub enum MemoryError {
    /// The process has gone, or its mappings cannot be read.
    #[error("cannot read the mappings of process {pid}")]
    Mappings { pid: i32, source: io::Error },
    /// Its memory cannot be read.
    #[error("cannot read the memory of process {pid} at {at:#x}")]
    Read { pid: i32, at: u64, source: io::Error },
    /// Its memory cannot be written.
    #[error("cannot fill the memory of process {pid} at {at:#x}")]
    Write { pid: i32, at: u64, source: io::Error },
    /// The restored process has other mappings than the dumped one.
    #[error("process {inside} of the checkpoint has no private anonymous memory at {at:#x}")]
    #[problem("FIRN-IMAGE-CORRUPT", "make the checkpoint again")]
    Layout { inside: i32, at: u64 },
    /// A file of CRIU's is not as expected.
    #[error(transparent)]
    Image(#[from] ImageFault),
    /// CRIU has written its memory to a file that firn did not expect.
    #[error("CRIU has dumped memory that firn does not know: {file} names {pages}")]
    Unexpected { file: String, pages: String },
    /// It is not known which mount has shared memory.
    #[error("cannot make a memory file")]
    Mount { source: io::Error },
    /// CRIU has written two shared memories into one file.
    #[error(
        "a SysV segment and a memory file both have the number {number}, and CRIU writes both into one file"
    )]
    #[problem("FIRN-DUMP", "restart the container: its memory gets other numbers")]
    SameNumber { number: u64 },
    /// A pages file cannot be written.
    #[error("cannot write {file} of the checkpoint")]
    #[problem("FIRN-DUMP", "see whether the file system of the checkpoint is full")]
    Pages { file: String, source: io::Error },
    /// This node has no store.
    #[error("memory {} of the checkpoint is in store {id}, and this node names none", index.short())]
    #[problem(
        "FIRN-STORE-MISSING",
        "name the store of this node under [images] in the configuration, and bring the memory there with \
         `firn store pull URL ID`"
    )]
    NoStore { id: String, index: Digest },
    /// The image names the memory of another one.
    #[error("memory {} in the store is that of another checkpoint", index.short())]
    #[problem(
        "FIRN-IMAGE-CORRUPT",
        "somebody has changed firn.json: use the image that the checkpoint has made"
    )]
    OtherCheckpoint { index: Digest },
    /// It is not the memory of those who want it.
    #[error("memory {} in the store does not belong to {reader}", index.short())]
    #[problem(
        "FIRN-STORE-OWNER",
        "restore it in the namespace in which the checkpoint was made. The operator can give it to another \
         one: below from-dir under [restore], by `firn store name`, or signed"
    )]
    Owner { index: Digest, reader: Reader },
    #[error(transparent)]
    Store(#[from] StoreError),
}
