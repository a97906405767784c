//! A second place for a complete image with GPU state, below the operator's rescue directory. containerd
//! removes the image directory as soon as its call has failed or its shim has died; an error that names the
//! image would then name a missing directory.
//!
//! While the image may still be removed, hard links to its files are made in the rescue directory, which
//! costs nothing; they are removed when the checkpoint has succeeded. On different file systems the links are
//! made in a directory next to the image, and the files are copied when an error is about to name them. The
//! manifest comes last: a rescued image without it is incomplete.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use firn_config::names;
use firn_image::manifest::Manifest;
use firn_process::OrWarn;
use firn_process::blocking::{Left, stoppable_until};
use firn_process::cancel::CancellationToken;
use nix::sys::statvfs::statvfs;

use super::ImageDir;
use super::dir::close_to_others;
use crate::end_proof::Durable;
use crate::recording::new_id;
use firn_host::{Rfc3339, UnlessAbsent, of_root};

/// How long a copy may continue once the container is killed.
const KILLED: Duration = Duration::from_secs(5);

/// Bytes that are copied between two reads of the stop flag.
const CHUNK: u64 = 64 << 20;

/// The rescue directory of a container with this bundle; the bundle's parent directory is named after the
/// containerd namespace.
pub fn place(root: &Path, bundle: &Path, container: &str) -> PathBuf {
    let namespace = bundle.parent().and_then(Path::file_name).unwrap_or_default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = Rfc3339(now).to_string().replace(':', "-");
    let time = now.split('.').next().unwrap_or_default();
    root.join(format!("{}-{container}-{time}", namespace.to_string_lossy()))
}

/// Whether the image in `dir` is complete.
pub fn is_complete(dir: &Path) -> bool {
    dir.join(names::MANIFEST).is_file()
}

/// A directory of the same name next to the image, on the image's file system. Its end is random: next to
/// containerd's directories anybody may make a directory, and one of this name would stand in the way.
pub fn sibling(image: &Path, place: &Path) -> PathBuf {
    let mut name = OsString::from(names::RESCUE_PREFIX);
    name.push(place.file_name().unwrap_or_default());
    name.push(format!("-{}", new_id()));
    image.with_file_name(name)
}

/// Makes hard links to the files in `dir`, in the rescue directory.
pub fn link(image: &ImageDir, dir: &Path) -> io::Result<()> {
    make_root(dir.parent().unwrap_or(dir))?;
    link_in(image, dir)
}

/// Makes hard links in a directory that does not belong to firn and whose mode stays as it is. Fails if
/// another user could put a directory of theirs in the new one's place.
pub(crate) fn link_sibling(image: &ImageDir, dir: &Path) -> io::Result<()> {
    let parent = dir.parent().ok_or(ErrorKind::InvalidInput)?;
    if !of_root::holds_for_root(&fs::metadata(parent)?) {
        return Err(ErrorKind::PermissionDenied.into());
    }
    link_in(image, dir)
}

fn link_in(image: &ImageDir, dir: &Path) -> io::Result<()> {
    fill(image, dir, |from, to| fs::hard_link(from, to))
}

/// Copies the files to `dir`, unless space is short or `stop` is set.
pub fn copy(image: &ImageDir, dir: &Path, stop: &AtomicBool) -> io::Result<()> {
    let root = dir.parent().unwrap_or(dir);
    make_root(root)?;
    let numbers = statvfs(root)?;
    let room = numbers.blocks_available().saturating_mul(numbers.fragment_size());
    let sizes = fs::read_dir(image.inside())?.map(|entry| Ok(entry?.metadata()?.len()));
    if sizes.sum::<io::Result<u64>>()? >= room {
        return Err(ErrorKind::StorageFull.into());
    }
    fill(image, dir, |from, to| {
        let from = File::open(from)?;
        let mut to = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(to)?;
        while io::copy(&mut io::Read::take(&from, CHUNK), &mut to)? > 0 {
            if stop.load(Ordering::Relaxed) {
                return Err(ErrorKind::Interrupted.into());
            }
        }
        Ok(())
    })?;
    // Order matters: what it was copied from is removed after that.
    let synced = Durable::tree(dir, stop);
    synced.map(drop).map_err(|error| {
        remove(dir);
        error.source
    })
}

/// As [`copy`], bounded by `limit`, and by a few seconds once the container is killed.
pub(crate) async fn copy_within(
    image: &ImageDir,
    dir: &Path,
    limit: Duration,
    cancel: &CancellationToken,
) -> io::Result<()> {
    let (from, to, killed) = (image.clone(), dir.to_owned(), cancel.cancelled_for(KILLED));
    let copied = stoppable_until(limit, killed, move |stop| copy(&from, &to, stop)).await;
    copied.unwrap_or_else(|left| match left {
        Left::Cancelled => Err(ErrorKind::Interrupted.into()),
        Left::Late => Err(ErrorKind::TimedOut.into()),
    })
}

fn fill(image: &ImageDir, dir: &Path, put: impl Fn(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(dir)?;
    let filled = || -> io::Result<()> {
        let inside = image.inside();
        let manifest = Manifest::read(&inside).map_err(io::Error::other)?;
        let images = manifest.ok_or(ErrorKind::NotFound)?.images;
        for file in &images {
            put(&inside.join(&file.name), &dir.join(&file.name))?;
        }
        // Order matters: the manifest shows that all files are there.
        put(&inside.join(names::MANIFEST), &dir.join(names::MANIFEST))
    };
    let filled = filled();
    if filled.is_err() {
        remove(dir);
    }
    filled
}

fn make_root(root: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(root)?;
    close_to_others(&File::open(root)?)
}

/// Removes a rescued image that is not needed any more, or is incomplete.
pub fn remove(dir: &Path) {
    let removed = fs::remove_dir_all(dir).unless_absent();
    removed.or_warn(format_args!("cannot remove {}", dir.display()));
}

#[cfg(test)]
pub mod tests {
    use std::os::unix::fs::MetadataExt;

    use firn_image::manifest::{DumpFlags, Versions, describe_images};

    use super::*;

    /// Creates a complete image.
    pub(crate) fn make_image(client: &Path) -> Manifest {
        fs::create_dir(client).unwrap();
        for name in ["inventory.img", "pstree.img", "pages-1.img", "other"] {
            fs::write(client.join(name), name).unwrap();
        }
        let manifest = Manifest {
            checkpoint: String::new(),
            backend: firn_gpu::Backend::None,
            dump: DumpFlags::default(),
            driver: None,
            gpus: Vec::new(),
            topology: firn_gpu::Topology::default(),
            processes: Vec::new(),
            inherited_gpus: Vec::new(),
            released_gpus: None,
            origin: None,
            bulk: None,
            hooks: Default::default(),
            mounts: Vec::new(),
            cpu: Default::default(),
            versions: Versions::default(),
            images: describe_images(client, &AtomicBool::new(false)).unwrap(),
        };
        manifest.write(client).unwrap();
        manifest
    }

    struct World {
        _dir: tempfile::TempDir,
        image: ImageDir,
        client: PathBuf,
        kept: PathBuf,
    }

    async fn world() -> World {
        let dir = tempfile::tempdir().unwrap();
        let client = dir.path().join("ctrd-checkpoint1");
        make_image(&client);
        let image = ImageDir::find(&client, false).await.unwrap();
        let kept = place(
            &dir.path().join("lib/rescue"),
            Path::new("/run/task/k8s.io/job"),
            "job",
        );
        World {
            _dir: dir,
            image,
            client,
            kept,
        }
    }

    #[tokio::test]
    async fn a_rescued_image_survives_its_removal_by_the_client() {
        for copied in [false, true] {
            let World {
                image, client, kept, ..
            } = &world().await;
            let rescued = if copied {
                copy(image, kept, &AtomicBool::new(false))
            } else {
                link(image, kept)
            };
            rescued.unwrap();
            fs::remove_dir_all(client).unwrap();
            assert!(is_complete(kept) && !kept.join("other").exists());
            let manifest = Manifest::read(kept).unwrap().unwrap();
            manifest.verify_images(kept).unwrap();
            let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
            assert_eq!((mode(kept), mode(kept.parent().unwrap())), (0o700, 0o700));
            let name = kept.file_name().unwrap().to_str().unwrap();
            assert!(name.starts_with("k8s.io-job-20") && !name.contains(':'), "{name}");
            remove(kept);
            assert!(!kept.exists());
        }
    }

    #[tokio::test]
    async fn large_files_are_copied_whole_until_the_container_is_killed() {
        let World {
            image, client, kept, ..
        } = &world().await;
        let size = 2 * CHUNK + 1;
        let pages = File::options()
            .write(true)
            .open(client.join("pages-1.img"))
            .unwrap();
        pages.set_len(size).unwrap();
        let limit = Duration::from_secs(60);
        let cancel = CancellationToken::default();
        copy_within(image, kept, limit, &cancel).await.unwrap();
        assert_eq!(fs::metadata(kept.join("pages-1.img")).unwrap().len(), size);
        remove(kept);
        let late = copy_within(image, kept, Duration::ZERO, &cancel)
            .await
            .unwrap_err();
        assert_eq!(late.kind(), ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn an_image_on_another_file_system_is_rescued_next_to_itself() {
        let World {
            image, client, kept, ..
        } = &world().await;
        let parent = client.parent().unwrap();
        fs::set_permissions(parent, std::os::unix::fs::PermissionsExt::from_mode(0o1777)).unwrap();
        let place = sibling(client, kept);
        let name = place.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("firn-rescue-k8s.io-job-"), "{name}");
        link_sibling(image, &place).unwrap();
        fs::remove_dir_all(client).unwrap();
        let again = ImageDir::known(&place, crate::journal::ImageWas::Filled, None);
        copy(&again, kept, &AtomicBool::new(false)).unwrap();
        assert!(is_complete(kept));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(
            (mode(&place), mode(parent)),
            (0o700, 0o1777),
            "/tmp is not firn's"
        );
    }

    #[tokio::test]
    async fn a_place_that_others_control_gets_no_image() {
        let World {
            image, client, kept, ..
        } = &world().await;
        let parent = client.parent().unwrap();
        let (mode, owner) = (
            |mode| fs::set_permissions(parent, std::os::unix::fs::PermissionsExt::from_mode(mode)),
            |owner| std::os::unix::fs::chown(parent, Some(owner), None),
        );
        mode(0o1777).unwrap();
        let [one, other] = [(); 2].map(|()| sibling(client, kept));
        assert_ne!(one, other, "the name can be predicted");
        mode(0o777).unwrap();
        link_sibling(image, &one).unwrap_err();
        mode(0o755).unwrap();
        owner(1000).unwrap();
        link_sibling(image, &one).unwrap_err();
        assert!(!one.exists());
        owner(0).unwrap();
        link_sibling(image, &one).unwrap();
        assert!(is_complete(&one));
    }

    #[tokio::test]
    async fn an_incomplete_image_is_not_rescued() {
        let World {
            image, client, kept, ..
        } = &world().await;
        assert!(copy(image, kept, &AtomicBool::new(true)).is_err());
        assert!(!kept.exists());
        fs::remove_file(client.join("pages-1.img")).unwrap();
        assert!(link(image, kept).is_err());
        assert!(!kept.exists());
    }

    #[tokio::test]
    async fn only_root_may_enter_the_rescue_directory() {
        let World { image, kept, .. } = &world().await;
        let root = kept.parent().unwrap();
        fs::create_dir_all(root).unwrap();
        fs::set_permissions(root, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        link(image, kept).unwrap();
        assert_eq!(fs::metadata(root).unwrap().mode() & 0o777, 0o700);
    }
}
