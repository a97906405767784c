//! Which indexes are needed still: those that a firn.json names, in an image directory or in an image of
//! containerd.

use std::collections::BTreeMap;
use std::fs::DirEntry;
use std::io;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::bounded::read_at_most;
use firn_host::mountinfo::{MountEntry, is_mount_point};
use firn_host::{Absent, Problem};
use firn_image::manifest::{MAX_BYTES, UntrustedDir, is_of_image};
use firn_image::store::{Digest, Index};
use serde::Deserialize;

use crate::containerd::{CallError, Containerd, Descriptor};
use crate::leftovers::Leftover;
use crate::oci_image;

/// containerd's media type of the archive of an image directory.
const CHECKPOINT: &str = "application/vnd.containerd.container.criu.checkpoint.criu.tar";

/// Largest list of an image's parts that is read, as containerd limits it.
const MAX_LIST: u64 = 8 << 20;

/// How deep lists lead to lists, and how many parts of an image are looked at.
const DEPTH: usize = 4;
const MOST: usize = 10_000;

/// containerd could not be asked.
#[derive(Debug, thiserror::Error, Problem)]
#[error("cannot find out which checkpoints containerd has; nothing was removed")]
#[problem(
    "FIRN-CONTAINERD",
    "see containerd's log; --address names its socket, and --no-containerd is for machines without it"
)]
pub struct NotAsked(#[from] CallError);

/// The part of firn.json that names an index.
#[derive(Deserialize)]
struct Envelope {
    body: Body,
}

#[derive(Deserialize)]
struct Body {
    bulk: Option<Bulk>,
}

#[derive(Deserialize)]
struct Bulk {
    index: Digest,
}

/// The index that a firn.json names.
fn named_by(manifest: &[u8]) -> Result<Option<Digest>, serde_json::Error> {
    let envelope: Envelope = serde_json::from_slice(manifest)?;
    Ok(envelope.body.bulk.map(|bulk| bulk.index))
}

/// Why an image directory needs the index: it names it, or may, if it cannot be read or understood, or if its
/// checkpoint is not complete.
pub fn by_directory(index: &Index, id: &Digest, mounts: &[MountEntry]) -> Option<String> {
    if let Some(mount) = &index.mount
        && !is_mount_point(mounts, mount)
    {
        return Some(format!("{} is not mounted, where its image is", mount.display()));
    }
    needs(&index.image, id)
}

/// The indexes that the images in these directories name, each with such an image.
pub fn of_directories(directories: Vec<PathBuf>) -> BTreeMap<Digest, String> {
    let named = |dir: PathBuf| named_in(&UntrustedDir::open(&dir).ok()?, &dir);
    directories.into_iter().filter_map(named).collect()
}

/// The same of directories that containerd or firn has left.
pub fn of_leftovers(left: impl Iterator<Item = Leftover>) -> BTreeMap<Digest, String> {
    left.filter_map(|left| named_in(&left.dir, &left.path)).collect()
}

fn named_in(dir: &UntrustedDir, shown: &Path) -> Option<(Digest, String)> {
    let bytes = manifest(dir).ok()??;
    Some((named_by(&bytes).ok()??, format!("{} is there", shown.display())))
}

/// The directories that pods may name to restore from: `NAMESPACE/NAME`, and the image in an archive of the
/// kubelet there.
pub fn named_directories(from: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for namespace in directories(from)? {
        for named in directories(&namespace)? {
            found.push(named.join(names::ARCHIVE_IMAGE));
            found.push(named);
        }
    }
    Ok(found)
}

fn directories(of: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(of) {
        Err(error) if error.is_absent() => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    // A link may be a name, too.
    paths
        .filter(|path| path.as_ref().map_or(true, |path| path.is_dir()))
        .collect()
}

/// The firn.json of an image directory; none if it is too large.
fn manifest(dir: &UntrustedDir) -> io::Result<Option<Vec<u8>>> {
    read_at_most(dir.file(names::MANIFEST)?, MAX_BYTES)
}

fn needs(dir: &Path, index: &Digest) -> Option<String> {
    let is_named = match UntrustedDir::open(dir).and_then(|dir| manifest(&dir)) {
        Err(error) if error.is_absent() => {
            let unfinished = has_files_of_an_image(dir);
            return unfinished.then(|| format!("{} has no firn.json yet", dir.display()));
        }
        Err(_) | Ok(None) => true,
        Ok(Some(bytes)) => named_by(&bytes).map_or(true, |named| named == Some(*index)),
    };
    is_named.then(|| format!("{} is there", dir.display()))
}

/// Whether a dump has put files there. A directory that cannot be listed may have some.
fn has_files_of_an_image(dir: &Path) -> bool {
    let is_one = |entry: io::Result<DirEntry>| {
        entry.map_or(true, |entry| is_of_image(&entry.file_name().to_string_lossy()))
    };
    match std::fs::read_dir(dir) {
        Ok(mut entries) => entries.any(is_one),
        Err(error) => !error.is_absent(),
    }
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
pub async fn of_containerd(socket: &Path) -> Result<BTreeMap<Digest, String>, NotAsked> {
    let mut found = BTreeMap::new();
    let any = Containerd::connect(socket, "default").await?;
    for namespace in any.namespaces().await? {
        let containerd = any.for_namespace(&namespace)?;
        for image in containerd.images().await? {
            let target = image.target.unwrap_or_default();
            for digest in of_image(&containerd, target).await? {
                found.insert(digest, format!("{} in namespace {namespace}", image.name));
            }
        }
    }
    Ok(found)
}

/// The indexes that one image names.
async fn of_image(containerd: &Containerd, target: Descriptor) -> Result<Vec<Digest>, CallError> {
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
            break;
        };
        if part.media_type == CHECKPOINT {
            let part = oci_image::Part {
                digest: part.digest,
                size: part.size,
                ..oci_image::Part::default()
            };
            found.extend(of_archive(containerd, &part).await?);
        } else if depth < DEPTH && part.media_type.ends_with("+json") && part.size <= MAX_LIST {
            let list = present(containerd.content(&part.digest, 0, part.size).await)?;
            // Others than OCI's have no such parts.
            let list: Parts = serde_json::from_slice(&list.unwrap_or_default()).unwrap_or_default();
            let below = list.manifests.into_iter().chain(list.layers);
            parts.extend(below.map(|part| (part, depth + 1)));
        }
    }
    Ok(found)
}

/// The index that the firn.json in an archive names.
async fn of_archive(containerd: &Containerd, part: &oci_image::Part) -> Result<Option<Digest>, CallError> {
    let manifest = present(oci_image::manifest(containerd, part).await)?.flatten();
    // A damaged one restores nothing.
    Ok(named_by(&manifest.unwrap_or_default()).ok().flatten())
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
    use std::fs;

    use super::*;

    #[test]
    fn checkpoints_that_pods_may_name_are_found_with_and_without_an_archive() {
        let dir = tempfile::tempdir().unwrap();
        let (warm, filled) = (dir.path().join("ml/warm"), dir.path().join("ml/filled"));
        fs::create_dir_all(warm.join("checkpoint")).unwrap();
        fs::create_dir(&filled).unwrap();
        fs::write(dir.path().join("ml/notes"), "").unwrap();
        let mut found = named_directories(dir.path()).unwrap();
        found.sort_unstable();
        let (of_filled, of_warm) = (filled.join("checkpoint"), warm.join("checkpoint"));
        assert_eq!(found, [filled, of_filled, warm, of_warm]);
        assert!(named_directories(&dir.path().join("none")).unwrap().is_empty());
        let file = dir.path().join("ml/notes");
        assert!(named_directories(&file).is_err());
    }

    #[test]
    fn what_a_user_has_put_next_to_containerds_directories_keeps_nothing() {
        use crate::leftovers::{below, tests::image};
        let dir = tempfile::tempdir().unwrap();
        let index = Digest::of(b"index");
        let manifest = format!("{{\"body\":{{\"bulk\":{{\"store\":\"x\",\"index\":\"{index}\"}}}}}}");
        let kept = |owner: u32| {
            let path = image(dir.path(), "ctrd-checkpoint1", owner, 0o700);
            fs::write(path.join(names::MANIFEST), &manifest).unwrap();
            let rescue = dir.path().join("rescue");
            let left = below([dir.path().to_owned()].into(), &rescue);
            of_leftovers(left).into_keys().collect::<Vec<_>>()
        };
        assert_eq!(kept(1000), []);
        assert_eq!(kept(0), [index]);
    }

    #[test]
    fn a_directory_keeps_an_index_that_it_names_or_may_name() {
        let dir = tempfile::tempdir().unwrap();
        let may_name = |dir: &Path, index| needs(dir, index).is_some();
        let (index, other) = (Digest::of(b"index"), Digest::of(b"other"));
        let path = dir.path().join(names::MANIFEST);
        assert!(!may_name(&dir.path().join("none"), &index));
        assert!(!may_name(dir.path(), &index));
        for (text, names_it) in [
            (
                format!("{{\"body\":{{\"bulk\":{{\"store\":\"x\",\"index\":\"{index}\"}}}}}}"),
                true,
            ),
            (
                format!("{{\"body\":{{\"bulk\":{{\"store\":\"x\",\"index\":\"{other}\"}}}}}}"),
                false,
            ),
            ("{\"body\":{\"backend\":\"none\"}}".to_owned(), false),
            ("{\"of a format\":\"to come\"}".to_owned(), true),
        ] {
            fs::write(&path, &text).unwrap();
            assert_eq!(may_name(dir.path(), &index), names_it, "{text}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(may_name(dir.path(), &index), "what cannot be read may name it");
    }

    #[test]
    fn a_directory_whose_file_system_is_not_mounted_keeps_its_index() {
        let dir = tempfile::tempdir().unwrap();
        let id = Digest::of(b"index");
        let index = |mount: Option<&str>| Index {
            checkpoint: "5b0f".to_owned(),
            made: 0,
            container: "job".to_owned(),
            host: "node".to_owned(),
            image: dir.path().join("none"),
            mount: mount.map(PathBuf::from),
            parent: None,
            pieces: Vec::new(),
        };
        let root = MountEntry {
            mount_point: "/".into(),
            ..MountEntry::default()
        };
        for (mount, mounts, is_kept) in [
            (Some("/mnt/images"), std::slice::from_ref(&root), true),
            (Some("/"), std::slice::from_ref(&root), false),
            (Some("/"), &[], true),
            (None, &[], false),
        ] {
            let reason = by_directory(&index(mount), &id, mounts);
            assert_eq!(reason.is_some(), is_kept, "{mount:?}: {reason:?}");
        }
    }

    /// As a dump leaves it until its firn.json is written.
    #[test]
    fn a_checkpoint_that_is_not_complete_keeps_its_index() {
        let dir = tempfile::tempdir().unwrap();
        let index = Digest::of(b"index");
        fs::write(dir.path().join("criu.log"), "").unwrap();
        assert_eq!(needs(dir.path(), &index), None);
        std::os::unix::fs::symlink("/dev/null", dir.path().join("pages-1.img")).unwrap();
        let reason = needs(dir.path(), &index).unwrap();
        assert!(reason.ends_with("has no firn.json yet"), "{reason}");
    }
}
