//! `RestorePod`: makes the pod by containerd's own calls, and has each container restored when it is started.
//!
//! The shim restores the container by an annotation, as for `firn.dev/restore-from` of a pod. There it names
//! a link below [`names::POD_CHECKPOINTS`]. The shim follows it for a container of this sandbox alone, and
//! removes it when that was started.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::UnlessAbsent;
use serde_json::{Value, json};

use super::Adapter;
use super::caller::Caller;
use super::error::CriError;
use super::messages::{RestorePodRequest, RestorePodResponse, RestoredContainer, annotated, name_of};
use super::record::{Pod, Process};
use crate::containerd::{CallError, Containerd};
use crate::output::note;

/// Creates a pod whose containers are restored when they are started. After a failure there is none.
pub async fn restore(
    adapter: &Adapter,
    request: RestorePodRequest,
    caller: Caller,
) -> Result<RestorePodResponse, CriError> {
    super::expect_none(request.options)?;
    let dir = adapter.place("checkpoint_path", &request.checkpoint_path)?;
    let pod = Pod::read(&dir)?;
    let containers = by_name(request.container_configs)?;
    expect_same(&pod, &containers)?;
    for name in pod.containers.keys() {
        expect_image(&dir, name)?;
    }
    let containerd = adapter.connect().await?;
    remove_stale(&containerd).await;
    let links = Links::make(&dir, pod.containers.keys())?;
    caller.expect_waiting()?;
    let handler = request.runtime_handler;
    let sandbox = containerd
        .run_sandbox(request.config.clone(), handler.clone())
        .await?;
    let making = Making {
        containerd: &containerd,
        sandbox: &sandbox,
        links: &links,
        handler,
    };
    match making
        .containers(&pod, &request.config, containers, &caller)
        .await
    {
        Ok(restored_containers) => {
            links.keep();
            Ok(RestorePodResponse {
                pod_sandbox_id: sandbox,
                restored_containers,
            })
        }
        Err(error) => {
            if let Err(left) = containerd.remove_sandbox(&sandbox).await {
                note!("firn: pod {sandbox} is left: {left}");
            }
            Err(error)
        }
    }
}

/// The configurations of the containers.
fn by_name(configs: Vec<Vec<u8>>) -> Result<BTreeMap<String, Vec<u8>>, CriError> {
    let wrong = |given: &str| CriError::Request {
        what: "the names of container_configs",
        given: given.to_owned(),
    };
    let mut found = BTreeMap::new();
    for config in configs {
        let name = name_of(&config).ok_or_else(|| wrong(""))?;
        if found.insert(name.clone(), config).is_some() {
            return Err(wrong(&name));
        }
    }
    if found.is_empty() {
        Err(wrong(""))
    } else {
        Ok(found)
    }
}

fn expect_same(pod: &Pod, wanted: &BTreeMap<String, Vec<u8>>) -> Result<(), CriError> {
    let list = |names: BTreeSet<&String>| names.into_iter().cloned().collect::<Vec<_>>().join(", ");
    let (there, wanted) = (pod.containers.keys().collect(), wanted.keys().collect());
    if there == wanted {
        Ok(())
    } else {
        Err(CriError::Names {
            there: list(there),
            wanted: list(wanted),
        })
    }
}

fn expect_image(dir: &Path, name: &str) -> Result<(), CriError> {
    let image = dir.join(name).join(names::ARCHIVE_IMAGE);
    if !name.contains('/') && image.is_dir() {
        Ok(())
    } else {
        Err(CriError::Checkpoint {
            path: dir.to_owned(),
            reason: format!("it has no image of container {name}"),
        })
    }
}

/// A pod that is being made.
struct Making<'a> {
    containerd: &'a Containerd,
    sandbox: &'a str,
    links: &'a Links,
    handler: String,
}

impl Making<'_> {
    /// Creates its containers, which are those that were checkpointed.
    async fn containers(
        &self,
        pod: &Pod,
        sandbox_config: &[u8],
        containers: BTreeMap<String, Vec<u8>>,
        caller: &Caller,
    ) -> Result<Vec<RestoredContainer>, CriError> {
        self.links.note_sandbox(self.sandbox)?;
        self.expect_firn().await?;
        let from = format!("pod:{}", self.links.name());
        let sandbox_config = annotated(sandbox_config, names::ANNOTATION_RESTORE_FROM, &from);
        let mut restored = Vec::new();
        for (name, config) in containers {
            caller.expect_waiting()?;
            let created = self
                .containerd
                .create_in_sandbox(self.sandbox, config, sandbox_config.clone());
            let container_id = created.await?;
            let recorded = self.containerd.recorded(&container_id).await?;
            let spec: Value = serde_json::from_slice(recorded.spec()).unwrap_or_default();
            if spec["annotations"][names::ANNOTATION_RESTORE_FROM] != *from {
                return Err(self.unfit("it does not pass the annotations firn.dev/* on".to_owned()));
            }
            pod.containers[&name].expect(&name, &Process::of(&recorded)?)?;
            restored.push(RestoredContainer { name, container_id });
        }
        caller.expect_waiting()?;
        Ok(restored)
    }

    /// Fails if the pod's shim would start the containers without their checkpoints.
    async fn expect_firn(&self) -> Result<(), CriError> {
        // There is no such checkpoint: firn's shim does nothing, and others do not know what is meant.
        let none = json!({self.sandbox: "/none/checkpoint"}).to_string();
        let annotations = HashMap::from([(names::ANNOTATION_WITHDRAW_POD.to_owned(), none)]);
        match self.containerd.annotate(self.sandbox, annotations).await {
            Err(CallError::Call { status, .. }) => Err(self.unfit(status.message().to_owned())),
            done => Ok(done?),
        }
    }

    fn unfit(&self, reason: String) -> CriError {
        let handler = self.handler.clone();
        CriError::Handler { handler, reason }
    }
}

/// The links by which the shim finds the parts of a checkpoint. Removed, unless they are kept.
struct Links(Option<PathBuf>);

impl Links {
    fn make<'a>(dir: &Path, containers: impl Iterator<Item = &'a String>) -> Result<Self, CriError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| CriError::Directory { path, source }
        };
        let all = Path::new(names::POD_CHECKPOINTS);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(all);
        made.map_err(failed(all))?;
        let uuid = Path::new("/proc/sys/kernel/random/uuid");
        let name = fs::read_to_string(uuid).map_err(failed(uuid))?;
        let own = all.join(name.trim_end().replace('-', ""));
        fs::create_dir(&own).map_err(failed(&own))?;
        let links = Self(Some(own.clone()));
        for name in containers {
            symlink(dir.join(name), own.join(name)).map_err(failed(&own))?;
        }
        Ok(links)
    }

    fn path(&self) -> &Path {
        self.0.as_deref().unwrap_or(Path::new(""))
    }

    fn name(&self) -> String {
        self.path()
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    fn note_sandbox(&self, id: &str) -> Result<(), CriError> {
        let path = self.path().join(names::POD_SANDBOX);
        fs::write(&path, id).map_err(|source| CriError::Directory { path, source })
    }

    /// They are needed until the containers are started.
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            remove(&path);
        }
    }
}

/// Removes the links of pods that are not there any more.
pub async fn remove_stale(containerd: &Containerd) {
    let all = fs::read_dir(names::POD_CHECKPOINTS)
        .into_iter()
        .flatten()
        .flatten();
    for path in all.map(|entry| entry.path()) {
        // Without the id the pod is being made.
        let Ok(id) = fs::read_to_string(path.join(names::POD_SANDBOX)) else {
            continue;
        };
        if containerd
            .container(&id)
            .await
            .is_err_and(|error| error.is_absent())
        {
            remove(&path);
        }
    }
}

fn remove(path: &Path) {
    let removed: io::Result<()> = fs::remove_dir_all(path).unless_absent();
    if let Err(error) = removed {
        note!("firn: {} is left: {error}", path.display());
    }
}
