//! The checkpoint that a pod's annotations name for one of its containers.
//!
//! Whoever may create a pod in a namespace may restore what the operator has put into that namespace's
//! directory, and nothing else: a checkpoint holds all that its processes knew. The directory of a name is
//! an image directory, or an archive of the kubelet that was unpacked there: the image in `checkpoint`, and
//! next to it what the container had written.

use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use firn_config::{Config, find_program, names};
use firn_host::{Absent, Problem};
use firn_oci::Spec;

use super::compare;
use super::error::Refusal;
use super::prepare::left_image;
use crate::blocking::stoppable;
use crate::cancel::CancellationToken;
use crate::reaper::Reaper;
use crate::warn::OrWarn;

/// Every image of CRIU has this file.
const INVENTORY: &str = "inventory.img";

/// A checkpoint that a container is restored from because its pod names it.
#[derive(Debug, PartialEq, Eq)]
pub struct Named {
    /// The image directory.
    pub image: PathBuf,
    /// The layer with the files that the container had written.
    pub layer: Option<PathBuf>,
}

impl Named {
    /// Notes in the bundle, and in the log, that the container is restored from it.
    pub fn note(&self, id: &str, bundle: &Path) {
        let noted = fs::write(
            bundle.join(names::BUNDLE_RESTORED_FROM),
            self.image.as_os_str().as_bytes(),
        );
        let _noted = noted.or_warn(format_args!("container {id}: cannot note its checkpoint"));
        log::info!("container {id} is restored from {}", self.image.display());
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
        let config = compare::configured();
        let mut command = Command::new(find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?);
        command.arg("apply-layer").arg(bundle.join("rootfs")).arg(layer);
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
        "restore-from is NAME or CONTAINER=NAME,..., restore-fallback cold, restore-restarts again or cold"
    )]
    Value { key: &'static str, value: String },
    #[error(
        "the pod names checkpoint {name:?}, and no pod of namespace {namespace:?} may be restored by name"
    )]
    #[problem(
        "FIRN-RESTORE-FROM",
        "the operator allows it by from-dir under [restore] in the configuration, and a directory with the \
         namespace's name in it"
    )]
    NotAllowed { name: String, namespace: String },
    #[error("this node has no checkpoint {path}")]
    #[problem(
        "FIRN-RESTORE-FROM",
        "put it there: an image directory, or an archive of the kubelet, unpacked"
    )]
    Absent { path: PathBuf },
    #[error("cannot look for checkpoint {path}: {reason}")]
    #[problem("FIRN-RESTORE-FROM", "see that the directory can be read")]
    Unreadable { path: PathBuf, reason: String },
}

/// The wishes of a pod for a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    name: String,
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
        let Some(name) = name_for(value, container)? else {
            return Ok(None);
        };
        if is_restart && restarts_cold {
            log::warn!(
                "container {container} of a pod was started before, and starts without its checkpoint"
            );
            return Ok(None);
        }
        let namespace = spec.annotation(names::ANNOTATION_CRI_NAMESPACE);
        Ok(Some(Self {
            name: name.to_owned(),
            namespace: namespace.unwrap_or_default().to_owned(),
            falls_back,
        }))
    }

    /// The checkpoint, on this node. Does not wait for a file system that hangs, nor once the client no
    /// longer waits for the container.
    pub async fn find(&self, config: &Config, cancel: &CancellationToken) -> Result<Named, Refusal> {
        let (wish, config, limit) = (self.clone(), config.clone(), config.deadlines.look);
        let found = stoppable(limit, cancel, move |_| wish.find_now(&config)).await;
        Ok(found.map_err(|left| left_image(left, limit))??)
    }

    fn find_now(&self, config: &Config) -> Result<Named, NameError> {
        let not_allowed = || NameError::NotAllowed {
            name: self.name.clone(),
            namespace: self.namespace.clone(),
        };
        let from = config.restore.from_dir.as_deref().ok_or_else(not_allowed)?;
        if !is_name(&self.namespace) {
            return Err(not_allowed());
        }
        let dir = from.join(&self.namespace);
        if look(&dir)?.is_none() {
            return Err(not_allowed());
        }
        // A name may be a link: the operator made it. What is in the directory may come from an archive.
        let path = dir.join(&self.name);
        if look(&path.join(INVENTORY))?.is_some_and(|found| found.is_file()) {
            return Ok(Named {
                image: path,
                layer: None,
            });
        }
        let (image, layer) = (path.join(names::ARCHIVE_IMAGE), path.join(names::ARCHIVE_LAYER));
        if !look(&image)?.is_some_and(|found| found.is_dir()) {
            return Err(NameError::Absent { path });
        }
        let layer = match look(&layer)? {
            None => None,
            Some(found) if found.is_file() => Some(layer),
            Some(_) => {
                let reason = "it is no regular file".to_owned();
                return Err(NameError::Unreadable { path: layer, reason });
            }
        };
        Ok(Named { image, layer })
    }
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

/// The name that the annotation `NAME` or `CONTAINER=NAME,...` has for a container. It can be the name of a
/// file in a directory.
pub fn name_for<'a>(value: &'a str, container: &str) -> Result<Option<&'a str>, NameError> {
    let wrong = || NameError::Value {
        key: names::ANNOTATION_RESTORE_FROM,
        value: value.to_owned(),
    };
    let mut found = None;
    for part in value.split(',').map(str::trim) {
        let (of, name) = match part.split_once('=') {
            Some((of, name)) => (of, name),
            None if value == part => (container, part),
            None => return Err(wrong()),
        };
        if !is_name(name) || !is_name(of) {
            return Err(wrong());
        }
        if of == container && found.replace(name).is_some() {
            return Err(wrong());
        }
    }
    Ok(found)
}

/// Whether it can be the name of a file, and of nothing else.
fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !text.is_empty() && text.len() < 256 && !text.starts_with('.') && text.bytes().all(is_allowed)
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
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use serde_json::{Value, json};

    use super::*;

    fn spec(more: &[(&str, &str)]) -> Spec {
        let mut annotations = json!({
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": "server",
            "io.kubernetes.cri.sandbox-namespace": "ml",
        });
        for (key, value) in more {
            annotations[*key] = Value::from(*value);
        }
        Spec::from(json!({ "annotations": annotations }))
    }

    fn name(value: &str) -> Result<Option<String>, NameError> {
        Wish::of(&spec(&[("firn.dev/restore-from", value)])).map(|wish| wish.map(|wish| wish.name))
    }

    #[test]
    fn a_name_is_for_all_containers_or_for_one() {
        assert_eq!(Wish::of(&spec(&[])), Ok(None));
        assert_eq!(name("warm-1"), Ok(Some("warm-1".into())));
        assert_eq!(name("proxy=a, server=b"), Ok(Some("b".into())));
        assert_eq!(name("proxy=a"), Ok(None));
        for wrong in [
            "",
            "..",
            "a/b",
            "../a",
            "a,b",
            "server=",
            "=a",
            "server=a,server=b",
            ".hidden",
            "a b",
        ] {
            let error = name(wrong).unwrap_err();
            assert!(matches!(error, NameError::Value { .. }), "{wrong}: {error}");
        }
        let sandbox = [
            ("firn.dev/restore-from", "a"),
            ("io.kubernetes.cri.container-type", "sandbox"),
        ];
        assert_eq!(Wish::of(&spec(&sandbox)), Ok(None));
        assert_eq!(
            Wish::of(&Spec::from(
                json!({"annotations": {"firn.dev/restore-from": "a"}})
            )),
            Ok(None),
            "no pod's"
        );
    }

    #[test]
    fn restarts_are_restored_again_unless_they_are_to_start_cold() {
        let restored = |more: &[(&str, &str)]| {
            let all = [
                &[
                    ("firn.dev/restore-from", "a"),
                    ("io.kubernetes.container.restartCount", "2"),
                ],
                more,
            ];
            Wish::of(&spec(&all.concat())).map(|wish| wish.is_some())
        };
        assert_eq!(restored(&[]), Ok(true));
        assert_eq!(restored(&[("firn.dev/restore-restarts", "cold")]), Ok(false));
        assert_eq!(restored(&[("firn.dev/restore-fallback", "cold")]), Ok(false));
        let again = [
            ("firn.dev/restore-fallback", "cold"),
            ("firn.dev/restore-restarts", "again"),
        ];
        assert_eq!(restored(&again), Ok(true));
        assert_eq!(
            restored(&[
                ("firn.dev/restore-restarts", "cold"),
                ("io.kubernetes.container.restartCount", "0")
            ]),
            Ok(true)
        );
        assert!(restored(&[("firn.dev/restore-fallback", "warm")]).is_err());
    }

    #[test]
    fn the_operator_allows_namespaces_by_directories() {
        let root = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        let wish = Wish::of(&spec(&[("firn.dev/restore-from", "warm")]))
            .unwrap()
            .unwrap();
        let refused = |config: &Config| wish.find_now(config).unwrap_err();
        assert!(matches!(refused(&config), NameError::NotAllowed { .. }));
        config.restore.from_dir = Some(root.path().to_owned());
        assert!(matches!(refused(&config), NameError::NotAllowed { .. }));
        let dir = root.path().join("ml/warm");
        fs::create_dir(root.path().join("ml")).unwrap();
        assert_eq!(refused(&config), NameError::Absent { path: dir.clone() });
        fs::create_dir(&dir).unwrap();
        let image = dir.join("checkpoint");
        symlink("/", &image).unwrap();
        assert_eq!(
            refused(&config),
            NameError::Absent { path: dir.clone() },
            "a link"
        );
        fs::remove_file(&image).unwrap();
        fs::create_dir(&image).unwrap();
        let named = |layer: Option<&str>| {
            Ok(Named {
                image: image.clone(),
                layer: layer.map(|name| dir.join(name)),
            })
        };
        assert_eq!(wish.find_now(&config), named(None));
        symlink("/etc/passwd", dir.join(names::ARCHIVE_LAYER)).unwrap();
        assert!(matches!(refused(&config), NameError::Unreadable { .. }), "a link");
        fs::remove_file(dir.join(names::ARCHIVE_LAYER)).unwrap();
        fs::write(dir.join(names::ARCHIVE_LAYER), "").unwrap();
        assert_eq!(wish.find_now(&config), named(Some(names::ARCHIVE_LAYER)));
        fs::write(dir.join(INVENTORY), "").unwrap();
        let whole = Named {
            image: dir.clone(),
            layer: None,
        };
        assert_eq!(wish.find_now(&config), Ok(whole));
        // Another namespace's pod names nothing of this one.
        let other = [
            ("firn.dev/restore-from", "warm"),
            ("io.kubernetes.cri.sandbox-namespace", "other"),
        ];
        let other = Wish::of(&spec(&other)).unwrap().unwrap().find_now(&config);
        assert!(matches!(other, Err(NameError::NotAllowed { .. })), "{other:?}");
    }
}
