//! A checkpoint that is an image in containerd's store.
//!
//! The operator names the images that pods of a namespace may be restored from. firn-hook unpacks one into a
//! directory of the container's bundle that containerd keeps on disk, and removes with the bundle; firn
//! removes it once nothing needs it any more.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;

use firn_config::{Config, find_program, names};
use firn_process::blocking;

use super::{NameError, Named, Node, in_directory};
use crate::memory_owner::Chosen;
use crate::restore::compare;
use crate::restore::error::Refusal;

/// Stands for any text at the end of a name.
const ANY: char = '*';
const ANY_NAMESPACE: &str = "*";

/// Why pods of a namespace may be restored from a checkpoint. The first counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Permit {
    /// The operator has named both.
    Namespace,
    /// It has to be signed for the namespace.
    Signature,
}

/// An image that containerd has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundImage {
    /// The directory of the content store.
    pub store: PathBuf,
    /// Of its index or manifest.
    pub digest: String,
}

/// Finds images of containerd by their names.
pub trait ImageStore: Sync {
    /// The image, or why there is none.
    fn find(&self, name: &str) -> Pin<Box<dyn Future<Output = Result<FoundImage, String>> + Send + '_>>;
}

/// Of clients without containerd.
pub struct NoImages;

impl ImageStore for NoImages {
    fn find(&self, _: &str) -> Pin<Box<dyn Future<Output = Result<FoundImage, String>> + Send + '_>> {
        Box::pin(async { Err("there is no containerd".to_owned()) })
    }
}

/// Unpacks the image, if pods of the namespace may be restored from it. After an error nothing of it is left.
pub async fn unpacked(image: &str, namespace: &str, node: Node<'_>) -> Result<Named, Refusal> {
    let Some(permit) = permit(node.config, image, namespace) else {
        let (image, namespace) = (image.to_owned(), namespace.to_owned());
        return Err(NameError::ImageNotAllowed { image, namespace }.into());
    };
    let found = node.cancel.unless_cancelled(node.images.find(image)).await;
    let found = found.ok_or(Refusal::Killed)?;
    let found = found.map_err(|reason| NameError::NoImage {
        image: image.to_owned(),
        reason,
    })?;
    let unpacked = async {
        let named = unpack(image, &found, node).await?;
        match permit {
            // The operator knows the image's name, and not its content.
            Permit::Namespace => Ok(Named {
                chosen: Chosen::ByPod,
                ..named
            }),
            Permit::Signature => node.signed(named, namespace, image).await,
        }
    };
    let unpacked = unpacked.await;
    if unpacked.is_err() {
        remove_unpacked(node.bundle).await;
    }
    unpacked
}

async fn unpack(image: &str, found: &FoundImage, node: Node<'_>) -> Result<Named, Refusal> {
    let dir = node.bundle.join(names::BUNDLE_UNPACKED);
    let config = node.config;
    let mut command = Command::new(find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?);
    command.arg("unpack-image").arg(&found.store).arg(&found.digest);
    command
        .arg(&dir)
        .arg(config.restore.image_cap.unwrap_or(0).to_string());
    let printed = compare::printed(&mut command, config.deadlines.verify, node.reaper);
    let printed = node.cancel.unless_cancelled(printed).await;
    let left = printed
        .ok_or(Refusal::Killed)?
        .map_err(|output| NameError::Unpack {
            image: image.to_owned(),
            output,
        })?;
    let left = String::from_utf8_lossy(&left).trim().parse().ok();
    // Without a bound the half of what is free then.
    let cap = config.restore.image_cap.map(|_| left.unwrap_or(0));
    let origin = format!("image {image} ({})", found.digest);
    node.look(move || in_directory(dir, origin, cap)).await
}

/// Removes what was unpacked for the container of this bundle, if anything was.
pub async fn remove_unpacked(bundle: &Path) {
    let path = bundle.join(names::BUNDLE_UNPACKED);
    blocking::remove("remove an unpacked checkpoint", path, |path| {
        std::fs::remove_dir_all(path)
    })
    .await;
}

/// What permits a pod of the namespace to be restored from the image, unless nothing does. `NAMESPACE=IMAGE`
/// does, where a `*` at the end of the image stands for any text; for any namespace the image's signature has
/// to name that of the pod.
fn permit(config: &Config, image: &str, namespace: &str) -> Option<Permit> {
    let rules = config.restore.from_images.iter();
    let rules = rules.filter_map(|rule| rule.split_once('='));
    let matching = rules.filter(|(of, pattern)| !of.is_empty() && matches(pattern, image));
    let permits = matching.filter_map(|(of, _)| match of {
        of if of == namespace => Some(Permit::Namespace),
        ANY_NAMESPACE => Some(Permit::Signature),
        _ => None,
    });
    permits.min()
}

fn matches(pattern: &str, image: &str) -> bool {
    match pattern.strip_suffix(ANY) {
        Some(begin) => image.starts_with(begin),
        None => image == pattern,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use firn_host::Problem;
    use firn_process::cancel::CancellationToken;
    use firn_process::reaper::Reaper;

    use super::*;

    struct One;

    impl ImageStore for One {
        fn find(&self, name: &str) -> Pin<Box<dyn Future<Output = Result<FoundImage, String>> + Send + '_>> {
            let found = match name {
                "r.example/warm:1" | "s.example/warm:1" => Ok(FoundImage {
                    store: "/store".into(),
                    digest: "sha256:ab".to_owned(),
                }),
                _ => Err("there is none".to_owned()),
            };
            Box::pin(std::future::ready(found))
        }
    }

    /// Restores from the image with a firn-hook that is this script, and returns what is left in the bundle.
    async fn by_hook(script: &str, image: &str, killed: bool) -> (Result<Named, Refusal>, bool) {
        let bundle = tempfile::tempdir().unwrap();
        fs::create_dir(bundle.path().join("work")).unwrap();
        let hook = bundle.path().join("hook");
        fs::write(&hook, format!("#!/bin/sh\nmkdir $4\n{script}")).unwrap();
        fs::set_permissions(&hook, fs::Permissions::from_mode(0o700)).unwrap();
        let mut config = Config::default();
        config.hook.path = Some(hook);
        config.restore.from_images = ["ml=r.example/*", "*=s.example/*"].map(str::to_owned).to_vec();
        config.restore.trusted_keys = Some(bundle.path().to_owned());
        let (reaper, cancel) = (Reaper::start().unwrap(), CancellationToken::default());
        let node = Node {
            config: &config,
            bundle: bundle.path(),
            images: &One,
            reaper: &reaper,
            cancel: &cancel,
        };
        let kill = async {
            let dir = bundle.path().join(names::BUNDLE_UNPACKED);
            while killed && !dir.exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            if killed {
                cancel.cancel();
            }
        };
        let (done, ()) = tokio::join!(unpacked(image, "ml", node), kill);
        (done, bundle.path().join(names::BUNDLE_UNPACKED).exists())
    }

    #[tokio::test]
    async fn an_image_that_is_not_unpacked_leaves_nothing() {
        let image = "r.example/warm:1";
        let (done, is_left) = by_hook(
            "mkdir $4/checkpoint; echo >$4/checkpoint/inventory.img",
            image,
            false,
        )
        .await;
        let named = done.unwrap();
        assert!(named.image.ends_with("work/firn-checkpoint/checkpoint") && is_left);
        assert_eq!(named.chosen, Chosen::ByPod, "its content is not the operator's");
        assert_eq!(named.origin, "image r.example/warm:1 (sha256:ab)");
        let (done, is_left) = by_hook("echo too large >&2; exit 1", image, false).await;
        let error = done.unwrap_err();
        assert_eq!((error.code(), is_left), ("FIRN-IMAGE-UNPACK", false), "{error}");
        let signed = "s.example/warm:1";
        let (done, is_left) = by_hook(
            "mkdir $4/checkpoint; echo >$4/checkpoint/inventory.img",
            signed,
            false,
        )
        .await;
        let error = done.unwrap_err();
        assert_eq!(
            (error.code(), is_left),
            ("FIRN-SIGNATURE-MISSING", false),
            "{error}"
        );
        let (done, is_left) = by_hook("exec sleep 1000", image, true).await;
        assert!(matches!(done, Err(Refusal::Killed)) && !is_left, "{done:?}");
        let (done, is_left) = by_hook("", "r.example/absent:1", false).await;
        let error = done.unwrap_err();
        assert_eq!((error.code(), is_left), ("FIRN-RESTORE-FROM", false), "{error}");
    }

    #[test]
    fn the_operator_allows_images_of_a_namespace_by_patterns() {
        let mut config = Config::default();
        assert_eq!(permit(&config, "r.example/warm:1", "ml"), None);
        let rules = [
            "*=r.example/signed/*",
            "ml=r.example/warm:1",
            "ml=r.example/signed/a:1",
            "broken",
            "=r.example/none:1",
        ];
        config.restore.from_images = rules.map(str::to_owned).to_vec();
        for (image, namespace, expected) in [
            ("r.example/warm:1", "ml", Some(Permit::Namespace)),
            ("r.example/warm:12", "ml", None),
            ("r.example/warm:1", "other", None),
            ("r.example/signed/a:1", "ml", Some(Permit::Namespace)),
            ("r.example/signed/b:1", "ml", Some(Permit::Signature)),
            ("r.example/signed/b:1", "other", Some(Permit::Signature)),
            ("r.example/signedx/b:1", "other", None),
            ("r.example/none:1", "", None),
        ] {
            assert_eq!(
                permit(&config, image, namespace),
                expected,
                "{image} for {namespace}"
            );
        }
    }
}
