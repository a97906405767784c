//! A checkpoint that is an image in containerd's store.
//!
//! The operator names the images that pods of a namespace may be restored from. firn-hook unpacks one into a
//! directory of the container's bundle that containerd keeps on disk, and removes with the bundle; firn
//! removes it once nothing needs it any more.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;

use firn_config::{Config, find_program, names};

use super::{NameError, Named, Node, in_directory};
use crate::blocking;
use crate::restore::compare;
use crate::restore::error::Refusal;

/// Stands for any namespace or any text.
const ANY: char = '*';

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

/// Unpacks the image, if pods of the namespace may be restored from it. After an error nothing of it is left.
pub async fn unpacked(image: &str, namespace: &str, node: Node<'_>) -> Result<Named, Refusal> {
    if !is_allowed(node.config, image, namespace) {
        let (image, namespace) = (image.to_owned(), namespace.to_owned());
        return Err(NameError::ImageNotAllowed { image, namespace }.into());
    }
    let found = node.cancel.unless_cancelled(node.images.find(image)).await;
    let found = found.ok_or(Refusal::Killed)?;
    let found = found.map_err(|reason| NameError::NoImage {
        image: image.to_owned(),
        reason,
    })?;
    let unpacked = unpack(image, &found, node).await;
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
    printed
        .ok_or(Refusal::Killed)?
        .map_err(|output| NameError::Unpack {
            image: image.to_owned(),
            output,
        })?;
    let origin = format!("image {image} ({})", found.digest);
    node.look(move || in_directory(dir, origin)).await
}

/// Removes what was unpacked for the container of this bundle, if anything was.
pub async fn remove_unpacked(bundle: &Path) {
    let path = bundle.join(names::BUNDLE_UNPACKED);
    blocking::remove("remove an unpacked checkpoint", path, |path| {
        std::fs::remove_dir_all(path)
    })
    .await;
}

/// Whether a pod of the namespace may be restored from the image. `NAMESPACE=IMAGE` allows it, where a `*` at
/// the end of the image stands for any text.
fn is_allowed(config: &Config, image: &str, namespace: &str) -> bool {
    let allows = |rule: &String| {
        rule.split_once('=')
            .is_some_and(|(of, pattern)| of == namespace && !namespace.is_empty() && matches(pattern, image))
    };
    config.restore.from_images.iter().any(allows)
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

    use super::*;
    use crate::cancel::CancellationToken;
    use crate::reaper::Reaper;

    struct One;

    impl ImageStore for One {
        fn find(&self, name: &str) -> Pin<Box<dyn Future<Output = Result<FoundImage, String>> + Send + '_>> {
            let found = match name {
                "r.example/warm:1" => Ok(FoundImage {
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
        config.restore.from_images = vec!["ml=r.example/*".to_owned()];
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
        let (done, is_left) = by_hook("mkdir $4/checkpoint", image, false).await;
        let named = done.unwrap();
        assert!(named.image.ends_with("work/firn-checkpoint/checkpoint") && is_left);
        assert_eq!(named.origin, "image r.example/warm:1 (sha256:ab)");
        let (done, is_left) = by_hook("echo too large >&2; exit 1", image, false).await;
        let error = done.unwrap_err();
        assert_eq!((error.code(), is_left), ("FIRN-IMAGE-UNPACK", false), "{error}");
        let (done, is_left) = by_hook("exec sleep 1000", image, true).await;
        assert!(matches!(done, Err(Refusal::Killed)) && !is_left, "{done:?}");
        let (done, is_left) = by_hook("", "r.example/absent:1", false).await;
        let error = done.unwrap_err();
        assert_eq!((error.code(), is_left), ("FIRN-RESTORE-FROM", false), "{error}");
    }

    #[test]
    fn the_operator_allows_images_of_a_namespace_by_patterns() {
        let mut config = Config::default();
        assert!(!is_allowed(&config, "r.example/warm:1", "ml"));
        let rules = [
            "ml=r.example/warm:1",
            "ml=r.example/ml/*",
            "broken",
            "=r.example/none:1",
        ];
        config.restore.from_images = rules.map(str::to_owned).to_vec();
        for (image, namespace, expected) in [
            ("r.example/warm:1", "ml", true),
            ("r.example/warm:12", "ml", false),
            ("r.example/warm:1", "other", false),
            ("r.example/ml/a:1", "ml", true),
            ("r.example/mla:1", "ml", false),
            ("r.example/none:1", "", false),
        ] {
            assert_eq!(
                is_allowed(&config, image, namespace),
                expected,
                "{image} for {namespace}"
            );
        }
    }
}
