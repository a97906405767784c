//! `CheckpointPod`: the pod's shim does it, as for `firn checkpoint --pod`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::UnlessAbsent;
use firn_transaction::restore::is_name;

use super::Adapter;
use super::caller::Caller;
use super::error::CriError;
use super::messages::CheckpointPodRequest;
use super::record::{Pod, Process};
use crate::checkpoint::{KIND, PodCall, annotations};
use crate::containerd::{CallError, Containerd, TaskState};
use crate::moves::is_firns;
use crate::output::note;

/// Checkpoints the containers that the request names, which are all that run in the sandbox.
pub async fn checkpoint(
    adapter: &Adapter,
    request: CheckpointPodRequest,
    mut caller: Caller,
) -> Result<(), CriError> {
    super::expect_none(request.options)?;
    let containerd = adapter.connect().await?;
    let containers = named(&containerd, &request.pod_sandbox_id, &request.container_ids).await?;
    let dir = adapter.place("output_path", &request.output_path)?;
    let mut made = Made::empty(&dir)?;
    let (mut images, mut processes) = (BTreeMap::new(), BTreeMap::new());
    for (name, id) in containers {
        processes.insert(name.clone(), Process::of(&containerd.recorded(&id).await?)?);
        images.insert(id, made.directory(&name)?.join(names::ARCHIVE_IMAGE));
    }
    caller.expect_waiting()?;
    let call = PodCall::new(&containerd, images);
    // Whatever is outside of the directory is not the caller's.
    let mut answer = call.begin(true);
    let is_done = tokio::select! {
        done = &mut answer => Some(done),
        () = caller.left() => None,
    };
    match is_done {
        Some(Err(error)) if error.is_lost() => {
            made.remove(&call.lost().await);
            return Err(error.into());
        }
        Some(done) => done.map_err(|error| unless_by_firn(error, &request.pod_sandbox_id))?,
        None => return withdrawn(&call, call.withdraw(answer).await, made).await,
    }
    let written = Pod::of(processes)
        .write(&dir)
        .and_then(|()| caller.expect_waiting());
    match written {
        Ok(()) => made.keep(),
        Err(_) => made.remove_all(),
    }
    written
}

/// The pod continues, whose checkpoint nobody wants any more.
async fn withdrawn(
    call: &PodCall<'_>,
    answer: Result<(), CallError>,
    mut made: Made,
) -> Result<(), CriError> {
    match answer {
        // It was complete before.
        Ok(()) => made.remove_all(),
        Err(error) if error.is_lost() => made.remove(&call.lost().await),
        // The shim leaves complete images of a container that does not continue: they may be the only copies.
        Err(CallError::Call { status, .. }) if !status.message().starts_with("FIRN-INTERRUPTED") => {
            note!("firn: {}", status.message());
        }
        Err(_) => {}
    }
    Err(CriError::Left)
}

/// The containers that the request names, by their names in the pod.
async fn named(
    containerd: &Containerd,
    sandbox: &str,
    ids: &[String],
) -> Result<BTreeMap<String, String>, CriError> {
    let wrong = |given: String| CriError::Request {
        what: "container_ids",
        given,
    };
    let found = match containerd.container(sandbox).await {
        Err(error) if error.is_absent() => None,
        found => Some(found?),
    };
    let is_sandbox = |label: Option<&String>| label.is_some_and(|kind| kind == "sandbox");
    if !found.is_some_and(|found| is_sandbox(found.labels.get(KIND.0))) {
        let id = sandbox.to_owned();
        return Err(CriError::NoSandbox { id });
    }
    if containerd.task_state(sandbox).await? != Some(TaskState::Running) {
        let id = sandbox.to_owned();
        return Err(CriError::NoReady { id });
    }
    let wanted: BTreeSet<&String> = ids.iter().collect();
    if wanted.is_empty() || wanted.len() != ids.len() {
        return Err(wrong(ids.join(",")));
    }
    let (all, alive) = (containerd.with_label(KIND).await?, containerd.running().await?);
    let (mut found, mut seen) = (BTreeMap::new(), BTreeSet::new());
    for container in all.into_iter().filter(|one| alive.contains(&one.id)) {
        let annotations = annotations(&container);
        if annotations.get(names::ANNOTATION_CRI_SANDBOX).map(String::as_str) != Some(sandbox) {
            continue;
        }
        let id = container.id;
        if !wanted.contains(&id) {
            let sandbox = sandbox.to_owned();
            return Err(CriError::NotNamed { id, sandbox });
        }
        let name = annotations.get(names::ANNOTATION_CRI_NAME).cloned();
        let name = name
            .filter(|name| is_file_name(name))
            .ok_or_else(|| wrong(id.clone()))?;
        if containerd.task_state(&id).await? == Some(TaskState::Running) {
            seen.insert(id.clone());
        }
        if let Some(other) = found.insert(name, id) {
            return Err(wrong(other));
        }
    }
    match wanted.into_iter().find(|id| !seen.contains(*id)) {
        None => Ok(found),
        Some(id) => Err(CriError::NotRunning {
            id: id.clone(),
            sandbox: sandbox.to_owned(),
        }),
    }
}

/// Whether a container of this name can have a directory of its own in a checkpoint.
fn is_file_name(name: &str) -> bool {
    is_name(name) && name != names::POD_FILE
}

/// The error of firn's shim, or that the shim is another one.
fn unless_by_firn(error: CallError, sandbox: &str) -> CriError {
    match &error {
        CallError::Call { status, .. } if !is_firns(status.message()) => CriError::Handler {
            handler: format!("of {sandbox}"),
            reason: status.message().to_owned(),
        },
        _ => error.into(),
    }
}

/// What was made in the caller's directory. What is left of it is removed, unless there are images: those of
/// a checkpoint that has failed are kept by the shim where they may be the only copies.
struct Made {
    dir: PathBuf,
    inside: Vec<PathBuf>,
}

impl Made {
    /// In an empty directory.
    fn empty(dir: &Path) -> Result<Self, CriError> {
        let found = fs::read_dir(dir).map(|mut entries| entries.next().is_none());
        match found {
            Ok(true) => Ok(Self {
                dir: dir.to_owned(),
                inside: Vec::new(),
            }),
            Ok(false) => Err(CriError::Directory {
                path: dir.to_owned(),
                source: ErrorKind::DirectoryNotEmpty.into(),
            }),
            Err(source) => Err(CriError::Directory {
                path: dir.to_owned(),
                source,
            }),
        }
    }

    /// Makes a directory for root alone.
    fn directory(&mut self, name: &str) -> Result<PathBuf, CriError> {
        let path = self.dir.join(name);
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => self.inside.push(path.clone()),
            Err(source) => return Err(CriError::Directory { path, source }),
        }
        Ok(path)
    }

    fn keep(&mut self) {
        self.inside.clear();
    }

    fn remove_all(&mut self) {
        let all: Vec<PathBuf> = self
            .inside
            .iter()
            .map(|path| path.join(names::ARCHIVE_IMAGE))
            .collect();
        self.remove(&all.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    }

    /// Removes these images, with what is next to them, and the file that shows that all are there.
    fn remove(&mut self, images: &[&Path]) {
        let file = self.dir.join(names::POD_FILE);
        let is_one = |path: &mut PathBuf| images.contains(&&*path.join(names::ARCHIVE_IMAGE));
        let removals = self
            .inside
            .extract_if(.., is_one)
            .map(|path| (fs::remove_dir_all(&path), path));
        for (removed, path) in removals.chain([(fs::remove_file(&file), file)]) {
            if let Err(error) = removed.unless_absent() {
                note!("firn: {} is left: {error}", path.display());
            }
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.inside {
            let _removed: io::Result<()> = fs::remove_dir(path);
        }
    }
}
