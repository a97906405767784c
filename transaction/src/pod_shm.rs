//! The files in a pod's /dev/shm: CRIU takes that for a mount from outside and leaves them out, so firn-hook
//! keeps them next to CRIU's files, and makes them again for a copy in another pod.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use firn_config::{Config, Keys, find_program, names};
use firn_host::{Chain, Problem, atomic_file};
use firn_image::pod_shm::{FillShm, KeepShm};
use firn_oci::{Spec, SpecError, criu_script};
use firn_process::blocking::tidy;
use firn_process::cgroup::{Cgroup, CgroupError, FreezerState};
use firn_process::reaper::Reaper;
use serde::Serialize;

use crate::container::Container;
use crate::image_dir::ImageDir;

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
    Config(#[from] firn_config::ConfigError),
    #[error(transparent)]
    Program(#[from] firn_config::ProgramError),
}

/// Keeps the files of a container that stands still, in its image directory. Nothing is done where the
/// container has no /dev/shm of a pod.
pub async fn keep(container: &Container, image: &ImageDir, reaper: &Reaper) -> Result<(), PodShmError> {
    let Some(request) = request(container, image)? else {
        return Ok(());
    };
    let config = Config::load(Keys::CHECKPOINT)?;
    let hook = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?;
    let limit = config.deadlines.criu_dump;
    let kept = call(&hook, "keep-shm", &request, reaper, limit).await;
    kept.map(drop).map_err(|why| PodShmError::Keep { why })
}

/// Has firn-hook keep them when CRIU calls it at the end of its dump: with the links of files that have a
/// deleted name, which CRIU removes after that.
pub fn keep_in_dump(container: &Container, image: &ImageDir) -> Result<(), PodShmError> {
    let written = request(container, image)?.map(|request| {
        let request = serde_json::to_vec(&request)?;
        atomic_file::write(&container.bundle, names::BUNDLE_KEEP_SHM, &request, 0o600)
    });
    written.unwrap_or(Ok(())).map_err(|error| PodShmError::Keep {
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

fn request(container: &Container, image: &ImageDir) -> Result<Option<KeepShm>, PodShmError> {
    let Some(dir) = Spec::load(&container.bundle)?.pod_shm()? else {
        return Ok(None);
    };
    let cgroup = container.cgroup()?;
    if cgroup.freezer_state()? != FreezerState::Frozen {
        return Err(PodShmError::Running);
    }
    let own = cgroup.pids()?;
    let mut others = cgroup.pids_of_pod()?;
    others.retain(|pid| !own.contains(pid));
    Ok(Some(KeepShm {
        dir,
        image: image.inside(),
        own,
        others,
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
    pub fn of(container: &Container, image: &Path) -> Result<Option<Self>, PodShmError> {
        let archive = image.join(names::SHM_ARCHIVE);
        if archive.symlink_metadata().is_err() {
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
        let config = Config::load(Keys::RESTORE)?;
        let pids = match spec.cgroups_path() {
            Some(path) => {
                Cgroup::by_spec(path, &container.id, container.options.systemd_cgroup)?.pids_of_pod()?
            }
            None => Vec::new(),
        };
        Ok(Some(Self {
            hook: find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?,
            request: FillShm {
                dir,
                archive,
                record: container.bundle.join(names::BUNDLE_SHM_MADE),
                pids,
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
