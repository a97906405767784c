//! Hooks of the job: what a container names to be called around its checkpoints and restores
//! (docs/design/decisions/0018-hooks-of-the-job.md).
//!
//! The shim decides when a hook is called, `firn-hook call` calls it. [`Call`] is what the one sends to the
//! other.

mod action;
mod facts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::Problem;
use firn_host::ordered::map_of;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use action::{Action, ActionError, MAX_VALUE};
pub use facts::{Facts, FactsOfGpu, GpuAddress};

use crate::{Spec, SpecError};

/// A moment at which a job may be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobHook {
    /// A checkpoint begins; nothing is inspected or locked yet.
    Prepare,
    /// The source continues after its checkpoint.
    Resumed,
    /// The restored container's processes run.
    Restored,
    /// The source continues after a checkpoint that failed.
    Failed,
}

impl JobHook {
    pub const ALL: [Self; 4] = [Self::Prepare, Self::Resumed, Self::Restored, Self::Failed];

    /// Its name in annotations, files and messages, and the code of its failure.
    const fn words(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Prepare => ("prepare", names::ANNOTATION_HOOK_PREPARE, "FIRN-HOOK-PREPARE"),
            Self::Resumed => ("resumed", names::ANNOTATION_HOOK_RESUMED, "FIRN-HOOK-RESUMED"),
            Self::Restored => ("restored", names::ANNOTATION_HOOK_RESTORED, "FIRN-HOOK-RESTORED"),
            Self::Failed => ("failed", names::ANNOTATION_HOOK_FAILED, "FIRN-HOOK-FAILED"),
        }
    }

    pub const fn name(self) -> &'static str {
        self.words().0
    }

    pub const fn annotation(self) -> &'static str {
        self.words().1
    }

    /// The code of an error in the hook.
    pub const fn code(self) -> &'static str {
        self.words().2
    }

    /// Whether the container names it.
    pub fn is_named(self, spec: &Spec) -> bool {
        spec.annotation(self.annotation()).is_some()
    }

    /// Whether the container or one of these labels of its image names it.
    pub fn is_named_by(self, spec: &Spec, labels: &BTreeMap<String, String>) -> bool {
        self.is_named(spec) || labels.contains_key(self.annotation())
    }

    /// What is to be called; none if the container does not name the hook.
    pub fn action(self, spec: &Spec) -> Result<Option<Action>, JobHookError> {
        let Some(value) = spec.annotation(self.annotation()) else {
            return Ok(None);
        };
        let wrong = |cause| JobHookError::Value {
            annotation: self.annotation(),
            cause,
        };
        match Action::parse(value).map_err(wrong)? {
            Action::Look if self != Self::Restored => Err(wrong(ActionError::NothingToCall)),
            action => Ok(Some(action)),
        }
    }
}

/// A container whose annotations for hooks cannot be followed.
#[derive(Debug, thiserror::Error, Problem)]
#[problem(
    "FIRN-HOOK-SETTING",
    "correct the annotation, or leave it out; an annotation replaces the image's label"
)]
pub enum JobHookError {
    #[error("annotation or image label {annotation} cannot be followed")]
    Value {
        annotation: &'static str,
        #[source]
        cause: ActionError,
    },
    #[error("annotation {annotation}={RELEASED} needs the annotation firn.dev/hook-prepare")]
    NoPrepare { annotation: &'static str },
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// Whether the container names any hook.
pub fn any_is_named(spec: &Spec) -> bool {
    JobHook::ALL.iter().any(|hook| hook.is_named(spec))
}

/// Whether the prepare hook releases all GPU memory that the container's processes share.
pub fn releases_shared_memory(spec: &Spec) -> bool {
    spec.annotation(names::ANNOTATION_IPC) == Some(RELEASED) && JobHook::Prepare.is_named(spec)
}

/// Whether the prepare hook lets go of every accelerator, so that a checkpoint holds nothing of any device.
pub fn releases_devices(spec: &Spec) -> bool {
    asserts_release(spec) && JobHook::Prepare.is_named(spec)
}

/// Whether the container asserts that, with a prepare hook or without one.
pub fn asserts_release(spec: &Spec) -> bool {
    spec.annotation(names::ANNOTATION_GPU) == Some(RELEASED)
}

/// Value of the annotations `firn.dev/ipc` and `firn.dev/gpu` for such containers.
const RELEASED: &str = "released-by-hook";

/// Gives a copy what the source of its device-free checkpoint asserts, so that its own checkpoints are of the
/// same kind. Returns whether the spec was changed.
pub fn release_devices(spec: &mut Spec) -> Result<bool, SpecError> {
    if spec.annotation(names::ANNOTATION_GPU).is_some() {
        return Ok(false);
    }
    let annotations = spec.object_mut("annotations")?;
    annotations.insert(names::ANNOTATION_GPU.to_owned(), json!(RELEASED));
    Ok(true)
}

/// The container's annotations that name hooks.
pub fn named(spec: &Spec) -> BTreeMap<String, String> {
    let names = JobHook::ALL.iter().map(|hook| hook.annotation());
    map_of(names.filter_map(|name| Some((name.to_owned(), spec.annotation(name)?.to_owned()))))
}

/// Gives the container the hooks that it does not name itself: from the labels of its image, or those of the
/// source of a checkpoint. Checks the annotations, and gives a container that names hooks a tmpfs for the
/// facts. Returns whether the spec was changed. Safe to repeat.
pub fn prepare(spec: &mut Spec, others: &BTreeMap<String, String>) -> Result<bool, JobHookError> {
    let is_new = |hook: &JobHook| !hook.is_named(spec) && others.contains_key(hook.annotation());
    let adopted: Vec<JobHook> = JobHook::ALL.into_iter().filter(is_new).collect();
    for hook in &adopted {
        let value = json!(others[hook.annotation()]);
        let annotations = spec.object_mut("annotations")?;
        annotations.insert(hook.annotation().to_owned(), value);
    }
    Ok(prepare_named(spec)? || !adopted.is_empty())
}

fn prepare_named(spec: &mut Spec) -> Result<bool, JobHookError> {
    for annotation in [names::ANNOTATION_IPC, names::ANNOTATION_GPU] {
        if spec.annotation(annotation) == Some(RELEASED) && !JobHook::Prepare.is_named(spec) {
            return Err(JobHookError::NoPrepare { annotation });
        }
    }
    for hook in JobHook::ALL {
        hook.action(spec)?;
    }
    let is_there = |mount: &Value| mount["destination"] == names::JOB_DIR;
    if !any_is_named(spec) || spec.array("/mounts").iter().any(is_there) {
        return Ok(false);
    }
    let id = |key: &str| {
        let user = spec.value().pointer("/process/user");
        user.and_then(|user| user[key].as_u64()).unwrap_or(0)
    };
    let owner = ["uid", "gid"].map(|key| format!("{key}={}", id(key)));
    let mut options = ["nosuid", "nodev", "noexec", "mode=0755", "size=1m"]
        .map(str::to_owned)
        .to_vec();
    options.extend(owner);
    let mount = json!({
        "destination": names::JOB_DIR, "type": "tmpfs", "source": "firn", "options": options,
    });
    spec.list_mut("mounts")?.push(mount);
    Ok(true)
}

/// A call of a hook, for `firn-hook call`, which answers with an [`Answer`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Call {
    pub bundle: PathBuf,
    /// Pid of the container's init.
    pub init: i32,
    /// When that was started, in clock ticks since the boot: its pid may be another process's by now. A
    /// shim that was started before an upgrade names none.
    #[serde(default)]
    pub started: Option<u64>,
    /// Whether the hook is called, or only the file for the job written.
    pub calls: bool,
    /// The command line of the OCI runtime up to `exec`.
    pub exec: Vec<String>,
    /// The container's id.
    pub id: String,
    /// Milliseconds that the hook has.
    pub limit: u64,
    pub facts: Facts,
}

impl Call {
    /// The file in the container that the call writes.
    pub fn file(&self) -> &'static Path {
        Path::new(if self.calls {
            names::JOB_HOOK_FILE
        } else {
            names::JOB_RESTORE_FILE
        })
    }
}

/// What `firn-hook call` prints: why the hook failed, if it did, and what it has written.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    pub failure: Option<String>,
    /// The end of its output, or of the HTTP response.
    pub output: String,
}

#[cfg(test)]
mod tests;
