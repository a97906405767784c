//! What firn sees on this node that may name an index: images of containerd, and directories with
//! checkpoints.
//!
//! What cannot be read may name any index, so that it is an error.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use firn_config::names;
use firn_host::Problem;
use firn_image::manifest::{MAX_BYTES, Manifest, ManifestError};
use firn_image::referrer::ReferrerError;
use firn_store::Digest;
use serde::Deserialize;

use crate::archive;
use crate::containerd::{CallError, Containerd, Descriptor};
use crate::oci_image;

/// containerd's media type of the archive of an image directory.
const CHECKPOINT: &str = "application/vnd.containerd.container.criu.checkpoint.criu.tar";

/// Largest list of an image's parts that is read, as containerd limits it.
const MAX_LIST: u64 = 8 << 20;

/// How deep lists lead to lists, and how many parts of an image are looked at.
const DEPTH: usize = 4;
const MOST: usize = 10_000;

/// It cannot be found out which indexes the images of containerd name.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ContainerdError {
    #[error("cannot find out which checkpoints containerd has; nothing was removed")]
    #[problem(
        "FIRN-CONTAINERD",
        "see containerd's log; --address names its socket, and --no-containerd is for machines without it"
    )]
    NotAsked(#[from] CallError),
    #[error("cannot find out which memory image {name} needs; nothing was removed")]
    #[problem(
        "FIRN-STORE-UNUSABLE",
        "remove that image if it is damaged; one of a newer firn needs `firn store gc` of that version"
    )]
    Unknown {
        name: String,
        source: Option<Box<ManifestError>>,
    },
}

/// Refuses a directory that the configuration names and that is not there: its file system may not be
/// mounted.
pub fn expect_there(root: &Path) -> Result<(), ReferrerError> {
    let failed = |source| ReferrerError::List {
        path: root.to_owned(),
        source,
    };
    fs::metadata(root).map(drop).map_err(failed)
}

/// The parts of an image, in an index or a manifest of OCI.
#[derive(Default, Deserialize)]
struct Parts {
    #[serde(default)]
    manifests: Vec<Part>,
    #[serde(default)]
    layers: Vec<Part>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Part {
    media_type: String,
    digest: String,
    size: u64,
}

/// The indexes that images of containerd name, each with one such image.
pub async fn of_containerd(socket: &Path) -> Result<BTreeMap<Digest, String>, ContainerdError> {
    let mut found = BTreeMap::new();
    let any = Containerd::connect(socket, "default").await?;
    for namespace in any.namespaces().await? {
        let containerd = any.for_namespace(&namespace)?;
        for image in containerd.images().await? {
            let name = format!("{} in namespace {namespace}", image.name);
            let target = image.target.unwrap_or_default();
            for digest in of_image(&containerd, &name, target).await? {
                found.insert(digest, name.clone());
            }
        }
    }
    Ok(found)
}

/// The indexes that one image names.
async fn of_image(
    containerd: &Containerd,
    name: &str,
    target: Descriptor,
) -> Result<Vec<Digest>, ContainerdError> {
    let Descriptor {
        media_type,
        digest,
        size,
        ..
    } = target;
    let size = u64::try_from(size).unwrap_or(0);
    let (mut found, mut parts) = (
        Vec::new(),
        vec![(
            Part {
                media_type,
                digest,
                size,
            },
            0,
        )],
    );
    for _ in 0..MOST {
        let Some((part, depth)) = parts.pop() else {
            return Ok(found);
        };
        if part.media_type == CHECKPOINT {
            let part = oci_image::Part {
                digest: part.digest,
                size: part.size,
                ..oci_image::Part::default()
            };
            found.extend(of_archive(containerd, name, &part).await?);
        } else if depth < DEPTH && part.media_type.ends_with("+json") && part.size <= MAX_LIST {
            let list = present(containerd.content(&part.digest, 0, part.size).await)?;
            // Others than OCI's have no such parts.
            let list: Parts = serde_json::from_slice(&list.unwrap_or_default()).unwrap_or_default();
            let below = list.manifests.into_iter().chain(list.layers);
            parts.extend(below.map(|part| (part, depth + 1)));
        }
    }
    // More than any checkpoint has.
    Err(ContainerdError::Unknown {
        name: name.to_owned(),
        source: None,
    })
}

/// The index that the firn.json in an archive names.
async fn of_archive(
    containerd: &Containerd,
    name: &str,
    part: &oci_image::Part,
) -> Result<Option<Digest>, ContainerdError> {
    let unknown = |source| ContainerdError::Unknown {
        name: name.to_owned(),
        source,
    };
    let read = async |from, size| containerd.content(&part.digest, from, size).await;
    let place = present(archive::find(names::MANIFEST, part.size, read).await)?.flatten();
    let Some(place) = place else {
        // Behind what cannot be read there may be one.
        let entries = present(archive::list(part.size, read).await)?;
        return match entries {
            Some(None) => Err(unknown(None)),
            Some(Some(_)) | None => Ok(None),
        };
    };
    if place.length > MAX_BYTES {
        return Err(unknown(None));
    }
    let bytes = read(place.from, place.length).await?;
    let manifest = Manifest::decode(&bytes, Path::new(name));
    let manifest = manifest.map_err(|error| unknown(Some(Box::new(error))))?;
    Ok(manifest.bulk.map(|bulk| bulk.index))
}

/// Parts of an image for other platforms are not there.
fn present<T>(read: Result<T, CallError>) -> Result<Option<T>, CallError> {
    match read {
        Err(error) if error.is_absent() => Ok(None),
        read => read.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use firn_image::referrer::Referrers;

    use super::*;
    use crate::leftovers::{below, tests::image};

    #[test]
    fn a_directory_of_the_configuration_has_to_be_there() {
        let dir = tempfile::tempdir().unwrap();
        expect_there(dir.path()).unwrap();
        assert!(expect_there(&dir.path().join("none")).is_err());
    }

    #[test]
    fn what_a_user_has_put_next_to_containerds_directories_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let is_read = |owner: u32| {
            let path = image(dir.path(), "ctrd-checkpoint1", owner, 0o700);
            fs::write(path.join(names::MANIFEST), "{").unwrap();
            let rescue = dir.path().join("rescue");
            let left = below([dir.path().to_owned()].into(), &rescue);
            let mut named = Referrers::default();
            left.map(|left| named.add_image_by(&left.dir.path(), &left.path))
                .any(|read| read.is_err())
        };
        assert!(!is_read(1000));
        assert!(is_read(0), "what root has left may name anything");
    }
}
