//! A restore from an image directory, such as one that the shim has rescued.
//!
//! containerd makes the task, as for `ctr tasks start`, and hands the directory to the shim, which restores
//! from it: ctr and nerdctl continue with the container afterwards. The container itself must still be known
//! to containerd.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use firn_containerd::Message;
use firn_containerd::runc::{OPTIONS, Options};
use firn_image::form::INVENTORY;
use firn_image::manifest::{ImageError as DirError, Manifest};
use firn_transaction::stdio::{log_file, log_uri};

use super::Restored;
use super::error::RestoreError;
use super::gpus::{self, Mode};
use super::made::Creations;
use super::named;
use super::plan::Plan;
use crate::args::restore::RestoreArgs;
use crate::checkpoint::Interrupts;
use crate::containerd::{Any, CallError, Container, ContainerSpec, Containerd, CreateTask, Mount, TaskState};
use crate::image;
use crate::logs;
use crate::oci_image::ImageError;
use crate::output::note;
use crate::steps::Steps;
use crate::text;
use crate::view::View;

/// nerdctl's label of where the output of a container goes.
const NERDCTL_LOG: &str = "nerdctl/log-uri";

/// Restores into a container that containerd knows, or shows whether that would be accepted.
pub async fn restore(
    args: &RestoreArgs,
    mode: &Mode,
    dir: &Path,
    word: &str,
    steps: &mut Steps,
) -> Result<Restored, RestoreError> {
    let dir = found(dir)?;
    let containerd = Containerd::connect(&args.containerd.socket.address, &args.containerd.namespace).await?;
    let (container, alone) = named::known(&containerd, &args.containerd.namespace, word).await?;
    let id = &*container.id;
    let (mut spec, manifest) = (container.spec(), Manifest::read(&dir)?);
    gpus::choose(args, mode.gpus(), &mut spec, manifest.as_ref())?;
    let mut restored = Restored {
        id: Some(id.to_owned()),
        dir: Some(dir.clone()),
        ..Restored::default()
    };
    if let Mode::DryRun(node) = mode {
        restored.plan = Some(Plan::of_view(node, spec, &View::of_dir(&dir)?, &dir)?);
        return Ok(restored);
    }
    if !args.json && !args.quiet {
        let size = text::bytes(size(&dir));
        note!("restoring {id} from {} ({size})", dir.display());
    }
    let chosen = container.with_spec(spec);
    steps.begin("restore");
    let (mut interrupts, mut made) = (Interrupts::new()?, Creations::default());
    made.alone = Some(alone);
    let start = start_once(&containerd, &mut made, &container, &chosen, &dir, args);
    let started = match interrupts.unless(start).await {
        Some(started) => started,
        None => Err(RestoreError::Interrupted { id: id.to_owned() }),
    };
    match started {
        Ok(pid) => {
            restored.pid = Some(pid);
            restored.log = made.log;
        }
        Err(error) => return Err(made.roll_back(&containerd, error).await),
    }
    Ok(restored)
}

/// The directory of CRIU's files.
fn found(dir: &Path) -> Result<PathBuf, RestoreError> {
    let found = dir.canonicalize();
    let dir = found.map_err(ImageError::file(format!("find {}", dir.display())))?;
    let dir = image::parts(&dir).map_err(ImageError::from)?.image;
    if !dir.join(INVENTORY).is_file() {
        let name = INVENTORY.to_owned();
        return Err(DirError::Missing { dir, name }.into());
    }
    Ok(dir)
}

/// Starts a container that containerd knows, with what was chosen for this restore: its spec for this time
/// alone, and its snapshot. A task that has ended is deleted before. What a failure leaves is in `made`.
pub(super) async fn start_once(
    containerd: &Containerd,
    made: &mut Creations,
    container: &Container,
    chosen: &Container,
    dir: &Path,
    args: &RestoreArgs,
) -> Result<u32, RestoreError> {
    let id = container.id.clone();
    // Somebody else may have made it again or started it by now.
    if !is_same(container, &containerd.container(&id).await?) {
        return Err(RestoreError::Changed { id });
    }
    match containerd.task_state(&id).await? {
        None => {}
        Some(TaskState::Stopped) => CallError::allow_absent(containerd.delete(&id).await)?,
        Some(_) => return Err(RestoreError::HasTask { id }),
    }
    if chosen != container {
        made.changed = Some(container.clone());
        containerd.update(chosen).await?;
    }
    let pid = start(containerd, made, chosen, dir, args).await?;
    // The bundle has the spec now.
    if made.changed.is_some() {
        let kept = Container {
            spec: container.spec.clone(),
            ..chosen.clone()
        };
        if let Err(error) = containerd.update(&kept).await {
            note!(
                "firn: {} keeps the annotations of this restore: {error}",
                container.id
            );
        }
        // Order matters: until here an interruption puts the container back.
        made.changed = None;
    }
    Ok(pid)
}

/// Whether these are one container, which may have got other labels.
fn is_same(before: &Container, now: &Container) -> bool {
    let now = Container {
        labels: before.labels.clone(),
        ..now.clone()
    };
    *before == now
}

/// Makes the task of a container from an image directory, and starts it. What a failure leaves is in `made`.
pub(super) async fn start(
    containerd: &Containerd,
    made: &mut Creations,
    container: &Container,
    dir: &Path,
    args: &RestoreArgs,
) -> Result<u32, RestoreError> {
    let mounts = containerd.mounts(container).await?;
    let log = choose_log(args, container, made).map_err(ImageError::file("find the log's directory"))?;
    let id = container.id.clone();
    made.log = log_file(&log);
    made.task_of = Some(id.clone());
    match start_with(containerd, container, mounts, dir, log).await {
        Err(RestoreError::Call(error)) if error.is_there() => {
            made.leave();
            let message = error.to_string();
            Err(RestoreError::Left { id, message })
        }
        started => started,
    }
}

/// Where what the container writes goes, as containerd names it: to the file of the command line, where
/// nerdctl has chosen, or to a file of firn. Where that cannot be made, nobody has asked for it.
fn choose_log(args: &RestoreArgs, container: &Container, made: &mut Creations) -> io::Result<String> {
    if let Some(log) = &args.log {
        return url(log);
    }
    if let Some(log) = container.labels.get(NERDCTL_LOG) {
        return Ok(log.clone());
    }
    let Some(log) = logs::own(&args.containerd.namespace, &container.id) else {
        return Ok(String::new());
    };
    if let Err(error) = logs::make(&log) {
        note!(
            "firn: the output is discarded: cannot write to {}: {error}",
            log.display()
        );
        return Ok(String::new());
    }
    let uri = log_uri(&log);
    made.own_log = Some(log);
    Ok(uri)
}

/// The same with a root file system that containerd need not know.
pub async fn start_with(
    containerd: &Containerd,
    container: &Container,
    rootfs: Vec<Mount>,
    dir: &Path,
    log: String,
) -> Result<u32, RestoreError> {
    let task = CreateTask {
        container_id: container.id.clone(),
        rootfs,
        stdout: log.clone(),
        stderr: log,
        terminal: has_terminal(container),
        options: Some(options(container, dir)?),
    };
    // Order matters: who restores makes the processes in Start. What has some by now is not the container of
    // the image.
    match containerd.create(task).await? {
        0 => Ok(containerd.start(&container.id).await?),
        _ => Err(RestoreError::Afresh {
            id: container.id.clone(),
            runtime: container.runtime.clone().unwrap_or_default().name,
        }),
    }
}

/// The container's own options and the image: fields that follow in the encoding are merged.
fn options(container: &Container, dir: &Path) -> Result<Any, RestoreError> {
    let runtime = container.runtime.clone().unwrap_or_default();
    let mut options = runtime
        .options
        .filter(|options| !options.type_url.is_empty())
        .unwrap_or(Any {
            type_url: OPTIONS.to_owned(),
            value: Vec::new(),
        });
    if options.type_url.rsplit('/').next() != Some(OPTIONS) {
        return Err(RestoreError::Options {
            id: container.id.clone(),
            type_url: options.type_url,
        });
    }
    let dir = dir.to_string_lossy();
    let image = Options {
        criu_image_path: dir.clone().into_owned(),
        restore_dir: dir.into_owned(),
        ..Options::default()
    };
    // Fields that come last win.
    options.value.extend(image.encode_to_vec());
    Ok(options)
}

fn has_terminal(container: &Container) -> bool {
    container.spec().into_value()["process"]["terminal"] == true
}

/// A log file as containerd names one; the shim makes it.
pub fn url(log: &Path) -> io::Result<String> {
    Ok(log_uri(&std::path::absolute(log)?))
}

fn size(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;

    use super::*;
    use crate::containerd::Runtime;

    fn container(options: Option<Any>) -> Container {
        let name = "io.containerd.firn.v2".to_owned();
        Container {
            id: "job".to_owned(),
            runtime: Some(Runtime { name, options }),
            ..Container::default()
        }
    }

    #[test]
    fn the_image_is_added_to_the_containers_own_options() {
        let own = Options {
            binary_name: "/usr/bin/runc".to_owned(),
            systemd_cgroup: true,
            ..Options::default()
        };
        let any = Any {
            type_url: format!("types.containerd.io/{OPTIONS}"),
            value: own.encode_to_vec(),
        };
        let sent = options(&container(Some(any)), Path::new("/srv/image")).unwrap();
        let read = Options::decode(&*sent.value).unwrap();
        assert_eq!(read.criu_image_path, "/srv/image");
        assert_eq!(read.restore_dir, "/srv/image");
        assert!(read.systemd_cgroup && read.binary_name == "/usr/bin/runc");
        let alone = options(&container(None), Path::new("/srv/image")).unwrap();
        assert_eq!(alone.type_url, OPTIONS);
        assert_eq!(
            Options::decode(&*alone.value).unwrap().criu_image_path,
            "/srv/image"
        );
        let other = Any {
            type_url: "runtimeoptions.v1.Options".to_owned(),
            value: Vec::new(),
        };
        let refused = options(&container(Some(other)), Path::new("/srv/image")).unwrap_err();
        assert_eq!(refused.code(), "FIRN-RESTORE-CLIENT");
    }
}
