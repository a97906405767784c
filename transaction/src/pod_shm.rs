//! The files in a pod's /dev/shm: CRIU takes that for a mount from outside and leaves them out, so firn-hook
//! keeps them next to CRIU's files, and makes them again for a copy in another pod.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_config::{find_program, names};
use firn_host::{Chain, Problem, UnlessAbsent, atomic_file, procfs};
use firn_image::pod_shm::{FillShm, KeepShm};
use firn_oci::{Spec, SpecError, criu_script};
use firn_process::OrWarn;
use firn_process::blocking::tidy;
use firn_process::cgroup::{Cgroup, CgroupError, FreezerState};
use firn_process::reaper::Reaper;
use serde::Serialize;

use crate::configured::configured;
use crate::container::Container;
use crate::image_dir::ImageDir;
use crate::journal::ImageWas;

/// How long the removal of files may take.
const EMPTY: Duration = Duration::from_secs(10);

/// Files of a pod that are not kept, or not made again.
#[derive(Debug, thiserror::Error, Problem)]
pub enum PodShmError {
    #[error("cannot keep the files of the pod's /dev/shm: {why}")]
    #[problem(
        "FIRN-POD-SHM",
        "see that there is room for the image; the container continues"
    )]
    Keep { why: String },
    #[error("cannot make the files of the checkpoint in the pod's /dev/shm: {why}")]
    #[problem(
        "FIRN-POD-SHM",
        "see the reason; if there is no room, give the pod a /dev/shm as large as that of the source (an \
         emptyDir of medium Memory). The checkpoint can be used again"
    )]
    Fill { why: String },
    #[error("the container does not stand still")]
    #[problem(
        "FIRN-FREEZER",
        "see whether a process of the container hangs in the kernel (state D)"
    )]
    Running,
    #[error("cannot use the container's spec")]
    Spec(#[from] SpecError),
    #[error("cannot read the pod's cgroup")]
    #[problem("FIRN-FREEZER", "see that the cgroup hierarchies are mounted")]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Program(#[from] firn_config::ProgramError),
}

/// Keeps the files of a container that stands still, in its image directory. Nothing is done where the
/// container has no /dev/shm of a pod. With `is_early`, before the dump, [`end_early`] has to follow it if it
/// returns that something was done.
pub async fn keep(
    container: &Container,
    image: &ImageDir,
    is_early: bool,
    reaper: &Reaper,
) -> Result<bool, PodShmError> {
    let name = if is_early {
        names::EARLY_SHM_ARCHIVE
    } else {
        names::SHM_ARCHIVE
    };
    let Some(request) = request(container, image, name)? else {
        return Ok(false);
    };
    let config = configured();
    let hook = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?;
    let limit = config.deadlines.criu_dump;
    let kept = call(&hook, "keep-shm", &request, reaper, limit).await;
    kept.map(|_| true).map_err(|why| PodShmError::Keep { why })
}

/// After a dump that is complete, or is not: what was kept before it is part of the image, or goes.
pub async fn end_early(image: &ImageDir, is_complete: bool) {
    let dir = image.inside();
    tidy("keep an archive", move || {
        let early = dir.join(names::EARLY_SHM_ARCHIVE);
        let done = if is_complete {
            std::fs::rename(&early, dir.join(names::SHM_ARCHIVE)).unless_absent()
        } else {
            std::fs::remove_file(&early).unless_absent()
        };
        done.or_warn(format_args!(
            "the files of the pod's /dev/shm are left in {}",
            early.display()
        ));
    })
    .await;
}

/// Has firn-hook keep them when CRIU calls it at the end of its dump: with the links of files that have a
/// deleted name, which CRIU removes after that.
pub fn keep_in_dump(container: &Container, image: &ImageDir) -> Result<(), PodShmError> {
    let written = match request(container, image, names::SHM_ARCHIVE)? {
        Some(request) => serde_json::to_vec(&request)
            .map_err(Into::into)
            .and_then(|request| {
                atomic_file::write(&container.bundle, names::BUNDLE_KEEP_SHM, &request, 0o600)
            }),
        // That of an earlier dump is not this one's.
        None => std::fs::remove_file(container.bundle.join(names::BUNDLE_KEEP_SHM)).unless_absent(),
    };
    written.map_err(|error| PodShmError::Keep {
        why: format!("cannot write into the bundle: {error}"),
    })
}

/// Why firn-hook could not keep them in a dump that has failed; none if that is not why.
pub async fn refusal_in_dump(container: &Container) -> Option<PodShmError> {
    let bundle = container.bundle.clone();
    let refusal = tidy("read the refusal of firn-hook", move || {
        criu_script::take(&bundle)
    })
    .await;
    refusal.map(|problem| PodShmError::Keep { why: problem.message })
}

/// None where there is nothing to do: no /dev/shm of a pod, no file in it and no earlier archive, or a
/// container that has ended.
fn request(container: &Container, image: &ImageDir, name: &str) -> Result<Option<KeepShm>, PodShmError> {
    let Some(dir) = Spec::load(&container.bundle)?.pod_shm()? else {
        return Ok(None);
    };
    let is_empty = std::fs::read_dir(&dir).is_ok_and(|mut files| files.next().is_none());
    if is_empty && image.was() != ImageWas::Filled || !procfs::is_alive(container.init.pid()) {
        return Ok(None);
    }
    let cgroup = container.cgroup()?;
    if cgroup.freezer_state()? != FreezerState::Frozen {
        return Err(PodShmError::Running);
    }
    Ok(Some(KeepShm {
        dir,
        archive: image.inside().join(name),
        earlier: image.inside().join(names::SHM_ARCHIVE),
        own: cgroup.pids()?,
        pod: cgroup.dir_of_pod(),
    }))
}

/// Files of a checkpoint in the pod's /dev/shm of its copy.
#[derive(Debug)]
pub struct PodShm {
    hook: PathBuf,
    request: FillShm,
    limit: Duration,
}

impl PodShm {
    /// Those of the checkpoint in `image`, if it has any and the container has a /dev/shm of a pod.
    pub async fn of(container: &Container, image: &Path) -> Result<Option<Self>, PodShmError> {
        let archive = image.join(names::SHM_ARCHIVE);
        let path = archive.clone();
        if !tidy("look for an archive", move || path.symlink_metadata().is_ok()).await {
            return Ok(None);
        }
        let spec = Spec::load(&container.bundle)?;
        let Some(dir) = spec.pod_shm()? else {
            log::warn!(
                "{}: the files of a pod's /dev/shm are left out: the container has none of a pod",
                container.id
            );
            return Ok(None);
        };
        let config = configured();
        let cgroup = spec.cgroups_path().unwrap_or_default();
        let cgroup = Cgroup::by_spec(cgroup, &container.id, container.options.systemd_cgroup)?;
        Ok(Some(Self {
            hook: find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?,
            request: FillShm {
                dir,
                archive,
                record: container.bundle.join(names::BUNDLE_SHM_MADE),
                pod: cgroup.dir_of_pod(),
            },
            limit: config.deadlines.criu_restore,
        }))
    }

    /// Makes the files. It may be cut off.
    pub async fn fill(&self, reaper: &Reaper) -> Result<(), PodShmError> {
        let filled = call(&self.hook, "fill-shm", &self.request, reaper, self.limit).await;
        filled.map(drop).map_err(|why| PodShmError::Fill { why })
    }

    /// Removes what was made, after a failure of the restore.
    pub async fn empty(&self, reaper: &Reaper) {
        let emptied = call(&self.hook, "empty-shm", &self.request, reaper, EMPTY).await;
        if let Err(why) = emptied {
            log::warn!(
                "files of a copy are left in {}: {why}",
                self.request.dir.display()
            );
        }
    }
}

/// What firn-hook prints for a request, or why it has failed.
async fn call(
    hook: &Path,
    command: &str,
    request: &impl Serialize,
    reaper: &Reaper,
    limit: Duration,
) -> Result<Vec<u8>, String> {
    let request = serde_json::to_vec(request).map_err(|error| error.to_string())?;
    let mut called = Command::new(hook);
    called.arg(command);
    let output = reaper.output_with_input(&mut called, &request, limit).await;
    let output = output.map_err(|error| Chain(&error).to_string())?;
    output.printed()
}
