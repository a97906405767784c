//! The checkpoint that a pod's annotations name for one of its containers.
//!
//! Whoever may create a pod in a namespace may restore what the operator has put into that namespace's
//! directory, or has allowed it of containerd's images, and nothing else: a checkpoint holds all that its
//! processes knew. The directory of a name is an image directory, or an archive of the kubelet that was
//! unpacked there: the image in `checkpoint`, and next to it what the container had written. An image of
//! containerd's is unpacked in this way, into a directory that goes with the container's bundle.

mod image;
mod noted;
mod source;

use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use firn_config::{Config, find_program, names};
use firn_host::{Absent, Problem};
use firn_image::form::CheckpointDir;
use firn_image::signature::{self, Wanted};
use firn_oci::Spec;
use firn_process::OrWarn;
use firn_process::blocking::stoppable;
use firn_process::cancel::CancellationToken;
use firn_process::reaper::Reaper;

use super::compare;
use super::error::Refusal;
use super::prepare::left_image;
use crate::configured::configured;
use crate::memory_owner::Chosen;

use image::Permit;
pub use image::{FoundImage, ImageStore, NoImages, remove_unpacked};
#[cfg(any(test, fuzzing, feature = "testing"))]
pub use source::fuzz;
pub use source::{Source, is_name, name_for};

/// A checkpoint that a container is restored from because its pod names it.
#[derive(Debug, PartialEq, Eq)]
pub struct Named {
    /// Where it comes from, for the log: empty where that is the image directory.
    pub origin: String,
    /// The image directory.
    pub image: PathBuf,
    /// The layer with the files that the container had written.
    pub layer: Option<PathBuf>,
    /// Most bytes that this layer may take; none: half of what is free.
    pub cap: Option<u64>,
    /// Who has chosen it, among what the operator permits.
    pub chosen: Chosen,
}

impl Named {
    /// Notes in the bundle, and in the log, that the container is restored from it.
    pub fn note(&self, id: &str, bundle: &Path) {
        let noted = fs::write(
            bundle.join(names::BUNDLE_RESTORED_FROM),
            self.image.as_os_str().as_bytes(),
        );
        let noted = noted.and_then(|()| noted::note(Path::new(names::RESTORED), id, bundle));
        let _noted = noted.or_warn(format_args!("container {id}: cannot note its checkpoint"));
        let image = self.image.display();
        match &*self.origin {
            "" => log::info!("container {id} is restored from {image}"),
            origin => log::info!("container {id} is restored from {origin}"),
        }
    }

    /// Unpacks the files that the container had written into the root file system in this bundle, unless the
    /// client no longer waits for the container.
    pub async fn unpack_layer(
        &self,
        bundle: &Path,
        reaper: &Reaper,
        cancel: &CancellationToken,
    ) -> Result<(), Refusal> {
        let Some(layer) = &self.layer else {
            return Ok(());
        };
        let config = configured();
        let mut command = Command::new(find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?);
        command.arg("apply-layer").arg(bundle.join("rootfs")).arg(layer);
        // What is used up is not what has no bound.
        command.arg(self.cap.map_or(0, |cap| cap.max(1)).to_string());
        let done = compare::printed(&mut command, config.deadlines.verify, reaper);
        let done = cancel.unless_cancelled(done).await.ok_or(Refusal::Killed)?;
        let devices = done.map_err(|output| Refusal::Layer {
            layer: layer.clone(),
            output,
        })?;
        if devices.trim_ascii() != b"0" {
            let devices = String::from_utf8_lossy(&devices);
            log::warn!(
                "{}: device nodes that were left out: {}",
                layer.display(),
                devices.trim_end()
            );
        }
        Ok(())
    }
}

/// Why no checkpoint can be taken by the name in an annotation.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Problem)]
pub enum NameError {
    #[error("annotation {key} is {value:?}")]
    #[problem(
        "FIRN-RESTORE-FROM",
        "restore-from is NAME or CONTAINER=NAME,..., where a NAME is that of a directory, image:IMAGE or \
         store:NAME; restore-fallback is cold, restore-restarts again or cold"
    )]
    Value { key: &'static str, value: String },
    #[error(
        "the pod names checkpoint {name:?}, and no pod of namespace {namespace:?} may be restored by name"
    )]
    #[problem(
        "FIRN-RESTORE-FROM",
        "the operator allows it by from-dir under [restore] in the configuration, and a directory with the \
         namespace's name in it; a name in the store by from-store there, and `firn store name`"
    )]
    NotAllowed { name: String, namespace: String },
    #[error("this node has no checkpoint {path}")]
    #[problem(
        "FIRN-RESTORE-FROM",
        "put it there: an image directory, or an archive of the kubelet, unpacked"
    )]
    Absent { path: PathBuf },
    #[error("the pod names image {image:?}, and no pod of namespace {namespace:?} may be restored from it")]
    #[problem(
        "FIRN-RESTORE-FROM",
        "the operator allows it by from-images under [restore] in the configuration"
    )]
    ImageNotAllowed { image: String, namespace: String },
    #[error("checkpoint {dir} has to be signed for namespace {namespace:?}, and nobody may sign")]
    #[problem(
        "FIRN-SIGNATURE-KEY",
        "trusted-keys under [restore] in the configuration names the directory with the keys of those who may"
    )]
    NoKeys { dir: PathBuf, namespace: String },
    #[error("containerd cannot give image {image:?}: {reason}")]
    #[problem(
        "FIRN-RESTORE-FROM",
        "pull it on this node into containerd's namespace of the pod, by the name that the annotation has"
    )]
    NoImage { image: String, reason: String },
    #[error("cannot unpack image {image:?}: {output}")]
    #[problem(
        "FIRN-IMAGE-UNPACK",
        "see that it is a checkpoint, pull it again if it is damaged, and that the disk has room for it: \
         image-cap under [restore] limits it"
    )]
    Unpack { image: String, output: String },
    #[error("cannot look for checkpoint {path}: {reason}")]
    #[problem("FIRN-RESTORE-FROM", "see what is in the directory, and that it can be read")]
    Unreadable { path: PathBuf, reason: String },
}

/// The wishes of a pod for a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    source: Source,
    namespace: String,
    /// Whether the container starts without its checkpoint if that cannot be restored.
    pub falls_back: bool,
}

impl Wish {
    /// What the annotations request for the container of this spec; none for the pod's sandbox, for a
    /// container that they do not name, and for a restart that is to start cold.
    pub fn of(spec: &Spec) -> Result<Option<Self>, NameError> {
        let Some(value) = spec.annotation(names::ANNOTATION_RESTORE_FROM) else {
            return Ok(None);
        };
        let container = spec.annotation(names::ANNOTATION_CRI_NAME);
        let (Some("container"), Some(container)) = (spec.annotation(names::ANNOTATION_CRI_TYPE), container)
        else {
            return Ok(None);
        };
        let falls_back = one_of(spec, names::ANNOTATION_RESTORE_FALLBACK, &["cold"])? == Some("cold");
        let restarts = one_of(spec, names::ANNOTATION_RESTORE_RESTARTS, &["again", "cold"])?;
        // Without this rule a checkpoint that fails after Create would be tried for ever.
        let restarts_cold = restarts.map_or(falls_back, |restarts| restarts == "cold");
        let is_restart = spec
            .annotation(names::ANNOTATION_RESTARTS)
            .is_some_and(|count| count != "0");
        let Some(source) = Source::of(value, container)? else {
            return Ok(None);
        };
        if is_restart && restarts_cold {
            log::warn!(
                "container {container} of a pod was started before, and starts without its checkpoint"
            );
            return Ok(None);
        }
        let text = |key| spec.annotation(key).unwrap_or_default().to_owned();
        Ok(Some(Self {
            source,
            namespace: text(names::ANNOTATION_CRI_NAMESPACE),
            falls_back,
        }))
    }

    /// The checkpoint, on this node. Does not wait for a file system that hangs, nor once the client no
    /// longer waits for the container.
    pub async fn find(&self, node: Node<'_>) -> Result<Named, Refusal> {
        let restore = &node.config.restore;
        let cap = restore.image_cap;
        let (name, from) = match &self.source {
            Source::Directory(name) => (name.clone(), restore.from_dir.clone()),
            Source::Store(name) => {
                let store = node.config.images.store.as_ref().filter(|_| restore.from_store);
                (name.clone(), store.map(|store| store.join(names::STORE_NAMED)))
            }
            Source::Image(image) => return image::unpacked(image, &self.namespace, node).await,
        };
        let (namespace, by_signature) = (self.namespace.clone(), restore.trusted_keys.is_some());
        let wanted = name.clone();
        let found = node.look(move || in_directories(&wanted, &namespace, from, by_signature, cap));
        match found.await? {
            (named, Permit::Namespace) => Ok(named),
            (named, Permit::Signature) => node.signed(named, &self.namespace, &name).await,
        }
    }
}

/// Where a checkpoint is looked for.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    pub config: &'a Config,
    pub bundle: &'a Path,
    pub images: &'a dyn ImageStore,
    pub reaper: &'a Reaper,
    pub cancel: &'a CancellationToken,
}

impl Node<'_> {
    async fn look<T: Send + 'static>(
        self,
        look: impl FnOnce() -> Result<T, NameError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let limit = self.config.deadlines.look;
        let found = stoppable(limit, self.cancel, |_| look()).await;
        Ok(found.map_err(|left| left_image(left, limit))??)
    }

    /// The checkpoint, if it is signed for the namespace and this name by who may.
    async fn signed(self, named: Named, namespace: &str, name: &str) -> Result<Named, Refusal> {
        let Some(keys) = self.config.restore.trusted_keys.clone() else {
            let (dir, namespace) = (named.image, namespace.to_owned());
            return Err(NameError::NoKeys { dir, namespace }.into());
        };
        let limit = self.config.deadlines.verify;
        let wanted = Wanted {
            dir: named.image.clone(),
            layer: named.layer.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let check = move |stop: &AtomicBool| signature::check(&wanted, &keys, stop);
        let checked = stoppable(limit, self.cancel, check).await;
        checked.map_err(|left| left_image(left, limit))??;
        Ok(named)
    }
}

/// The checkpoint that the operator has put into the directory of the namespace, or into that of signed ones.
fn in_directories(
    name: &str,
    namespace: &str,
    from: Option<PathBuf>,
    by_signature: bool,
    cap: Option<u64>,
) -> Result<(Named, Permit), NameError> {
    let not_allowed = || NameError::NotAllowed {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
    };
    let from = from.ok_or_else(not_allowed)?;
    if !is_name(namespace) || namespace == names::SIGNED_DIR {
        return Err(not_allowed());
    }
    let places = [
        (from.join(namespace), Permit::Namespace),
        (from.join(names::SIGNED_DIR), Permit::Signature),
    ];
    let mut absent = None;
    for (dir, permit) in places {
        if (permit == Permit::Signature && !by_signature) || look(&dir)?.is_none() {
            continue;
        }
        // What is in the directory may come from an archive.
        match in_directory(dir.join(name), String::new(), cap) {
            Err(NameError::Absent { path }) => drop(absent.get_or_insert(path)),
            found => return Ok((found?, permit)),
        }
    }
    Err(absent.map_or_else(not_allowed, |path| NameError::Absent { path }))
}

fn in_directory(path: PathBuf, origin: String, cap: Option<u64>) -> Result<Named, NameError> {
    let unreadable = |path: &Path, reason: String| NameError::Unreadable {
        path: path.to_owned(),
        reason,
    };
    let found = CheckpointDir::find(&path).map_err(|error| unreadable(&path, error.to_string()))?;
    let Some(CheckpointDir { image, layer, .. }) = found else {
        // A name may be a link: the operator made it. One that is being written hides no other checkpoint.
        return Err(if path.exists() {
            unreadable(&path, "it has no image of a checkpoint".to_owned())
        } else {
            NameError::Absent { path }
        });
    };
    if let Some(layer) = &layer
        && !look(layer)?.is_some_and(|found| found.is_file())
    {
        return Err(unreadable(layer, "it is no regular file".to_owned()));
    }
    Ok(Named {
        origin,
        image,
        layer,
        cap,
        chosen: Chosen::ByOperator,
    })
}

/// What is there itself, also if it is a link.
fn look(path: &Path) -> Result<Option<Metadata>, NameError> {
    match path.symlink_metadata() {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(NameError::Unreadable {
            path: path.to_owned(),
            reason: error.to_string(),
        }),
    }
}

fn one_of<'a>(spec: &'a Spec, key: &'static str, allowed: &[&str]) -> Result<Option<&'a str>, NameError> {
    match spec.annotation(key) {
        Some(value) if !allowed.contains(&value) => Err(NameError::Value {
            key,
            value: value.to_owned(),
        }),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests;
