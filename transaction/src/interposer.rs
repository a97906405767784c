//! firn's library between a container's programs and NVIDIA's driver: how a container gets it, and its copy.
//!
//! The bundle has a copy of the library, so an upgrade of firn changes nothing under a running container. An
//! image has a copy too, because CRIU restores processes only with the file that they had mapped. It is the
//! container's, like every other file of the image: it is never run outside of a container.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use firn_config::{Cuda, INSTALL_CUDA_LIBRARY, Interpose, find_cuda_library, names};
use firn_host::bounded::read_at_most;
use firn_host::{Problem, UnlessAbsent, atomic_file};
use firn_image::manifest::UntrustedDir;
use firn_oci::{Spec, SpecError, cuda};

/// A library is smaller.
const MOST: u64 = 16 << 20;

/// A container that cannot have firn's library, or an image that cannot.
#[derive(Debug, thiserror::Error, Problem)]
pub enum InterposeError {
    /// The node has no library to give.
    #[error("the container is to have libfirn_cuda.so, which this node does not have")]
    #[problem("FIRN-CUDA-LIBRARY", INSTALL_CUDA_LIBRARY)]
    Missing,
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    #[problem(
        "FIRN-CUDA-LIBRARY",
        "see whether the file is whole: firn's release has another one"
    )]
    Read { path: PathBuf, source: io::Error },
    /// Its copy cannot be written.
    #[error("cannot write {}", path.display())]
    #[problem(
        "FIRN-CUDA-LIBRARY",
        "check that the file system of the bundle or of the image is writable and not full"
    )]
    Write { path: PathBuf, source: io::Error },
    /// The spec is malformed where the edit changes it.
    #[error("cannot edit the spec")]
    Spec(#[from] SpecError),
}

/// Gives a new container the node's library, if it has NVIDIA's GPUs and its annotation or the configuration
/// requests it.
pub(crate) fn add(
    spec: &mut Spec,
    bundle: &Path,
    has_nvidia: bool,
    config: &Cuda,
) -> Result<(), InterposeError> {
    // There nothing can be run from a bundle in /run, and nothing is checkpointed.
    let has_users = spec.has_namespace("user");
    if !has_nvidia || has_users || !cuda::is_wanted(spec, config.interpose) {
        let annotation = names::ANNOTATION_CUDA;
        if !has_nvidia || !cuda::is_requested(spec) {
            // Nothing is missing.
        } else if has_users {
            log::warn!("the annotation {annotation} has no effect: the container has a user namespace");
        } else if config.interpose == Interpose::Never {
            log::warn!("the annotation {annotation} has no effect: interpose under [cuda] is \"never\"");
        }
        return remove(spec, bundle);
    }
    let library = find_cuda_library(config.library.as_deref()).ok_or(InterposeError::Missing)?;
    let bytes = File::open(&library).and_then(whole);
    let bytes = bytes.map_err(|source| InterposeError::Read {
        path: library,
        source,
    })?;
    write(bundle, names::CUDA_LIBRARY, &bytes, 0o444)?;
    Ok(cuda::interpose(spec, &copy_of(bundle))?)
}

/// Takes the library out of a bundle: clients without containerd create containers again in the same one.
pub(crate) fn remove(spec: &mut Spec, bundle: &Path) -> Result<(), InterposeError> {
    let path = copy_of(bundle);
    if fs::remove_file(&path)
        .if_present()
        .map_err(|source| InterposeError::Write { path, source })?
        .is_some()
    {
        cuda::remove(spec)?;
    }
    Ok(())
}

/// Gives a container that is restored the library that its processes had.
pub(crate) fn add_restored(spec: &mut Spec, bundle: &Path) -> Result<(), InterposeError> {
    Ok(cuda::interpose(spec, &copy_of(bundle))?)
}

/// Copies the library out of an image, which is not trusted, into a bundle.
pub(crate) fn unpack(image: &Path, bundle: &Path) -> Result<(), InterposeError> {
    let bytes = UntrustedDir::open(image)
        .and_then(|dir| dir.file(names::CUDA_LIBRARY_IMAGE))
        .and_then(whole);
    let bytes = bytes.map_err(|source| InterposeError::Read {
        path: image.join(names::CUDA_LIBRARY_IMAGE),
        source,
    })?;
    write(bundle, names::CUDA_LIBRARY, &bytes, 0o444)
}

/// Copies the library of a bundle into the directory of an image.
pub(crate) fn pack(bundle: &Path, image: &Path) -> Result<(), InterposeError> {
    let path = copy_of(bundle);
    let bytes = File::open(&path).and_then(whole);
    let bytes = bytes.map_err(|source| InterposeError::Read { path, source })?;
    write(image, names::CUDA_LIBRARY_IMAGE, &bytes, 0o600)
}

/// Whether the container of this bundle has the library.
pub(crate) fn is_in(bundle: &Path) -> bool {
    copy_of(bundle).is_file()
}

/// The copy of the library in a bundle, as the container has it.
pub(crate) fn copy_of(bundle: &Path) -> PathBuf {
    bundle.join(names::CUDA_LIBRARY)
}

fn whole(file: File) -> io::Result<Vec<u8>> {
    read_at_most(file, MOST)?.ok_or_else(|| io::ErrorKind::FileTooLarge.into())
}

fn write(dir: &Path, name: &str, bytes: &[u8], mode: u32) -> Result<(), InterposeError> {
    atomic_file::write(dir, name, bytes, mode).map_err(|source| InterposeError::Write {
        path: dir.join(name),
        source,
    })
}
