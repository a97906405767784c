//! The containers under firn, by the bundles of containerd's shims and the notes of firn-runc.

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use firn_config::names;
use firn_host::{ProcessTag, UnlessAbsent, procfs};
use firn_oci::Spec;
use firn_process::cgroup::{Cgroup, FreezerState};
use firn_transaction::lease::Lease;
use serde::Serialize;

use super::args::Where;
use super::transaction::{self, State, Transaction};
use crate::containerd::{BUNDLES, bundles_called};
use crate::install::running;
use crate::text;

/// What firn-runc's containers have in the place of a namespace.
const RUNC: &str = "firn-runc";

/// Why a container is paused that no command ends any more.
const LEFT: &str = "a command of firn was about to end it, and has ended itself: its copy may run, or have \
                    done its work, on the node to which it was moved, or its checkpoint is complete. If none \
                    of that is so, resume it";

/// What runc's init is called until the container is started.
const CREATED: &str = "runc:[";

/// A container.
pub struct Container {
    pub namespace: String,
    pub id: String,
    /// Of firn-runc's: the root directory of its runc.
    root: Option<PathBuf>,
    init: Option<i32>,
    pub spec: Option<Spec>,
    pub pids: Vec<i32>,
    pub transaction: Option<Transaction>,
    state: &'static str,
    ending: Option<Ending>,
    pub gpus: Vec<Gpu>,
    /// As the driver reports it.
    pub gpu_memory: Option<u64>,
}

/// What becomes of a paused container that a command of firn is to end: its copy may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The command works on it.
    UnderWay,
    /// The command has ended, and the container stays.
    Left,
}

impl Ending {
    pub fn of(bundle: &Path) -> Option<Self> {
        let command = fs::read_to_string(bundle.join(names::BUNDLE_PAUSE_KEPT)).ok()?;
        let is_alive = command
            .parse()
            .is_ok_and(|command: ProcessTag| command.is_alive());
        Some(if is_alive { Self::UnderWay } else { Self::Left })
    }
}

/// A GPU of a container.
#[derive(Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Gpu {
    /// Its index, as nvidia-smi counts.
    pub index: usize,
    /// Its UUID, `GPU-...`.
    pub uuid: String,
}

/// A container.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ContainerRow<'a> {
    /// Id of the container.
    container: &'a str,
    /// containerd's namespace of the container; `firn-runc` for a container of firn-runc.
    namespace: &'a str,
    /// `created`, `running`, `paused`, `parked` (its GPUs are free), the operation that is in progress
    /// (`checkpoint`, `restore`, `pause`, `resume`, `move`), `suspended` (it waits for a resume) or `killed`
    /// (its shim was killed in a transaction).
    state: &'a str,
    /// Pid of its first process on the node; absent if that does not run.
    pid: Option<i32>,
    /// Its GPUs; empty if it has none, or if the driver does not report them.
    gpus: &'a [Gpu],
    /// Bytes of GPU memory that it uses, or had when its GPU state was copied; absent if it is not known.
    gpu_memory: Option<u64>,
    /// What is in progress, or was when its shim was killed; absent if there is nothing.
    transaction: Option<transaction::TransactionRow<'a>>,
    /// Why it is suspended, killed, or paused with a copy that may run; absent otherwise.
    reason: Option<String>,
    /// The command that lets it continue; absent if it runs, if something is in progress, or if a command of
    /// firn had paused it and was about to end it, so that its copy may run.
    resume: Option<String>,
}

/// All of them, or those that a user calls so.
pub fn find(at: &Where, only: Option<&str>) -> Result<Vec<Container>> {
    let state = &at.state;
    fs::metadata(state).with_context(|| format!("read {}, containerd's state directory", state.display()))?;
    let mut found = Vec::new();
    for namespace in entries(&state.join(BUNDLES), at.namespace.as_deref())? {
        let bundles = match only {
            Some(word) => bundles_called(&namespace, word),
            None => entries(&namespace, None)?,
        };
        for bundle in bundles {
            found.extend(Container::of_bundle(&bundle)?);
        }
    }
    if at.namespace.as_deref().is_none_or(|namespace| namespace == RUNC) {
        runc_transactions(Path::new(names::RUNC_TRANSACTIONS), only, &mut found)?;
    }
    found.sort_by(|a, b| (&a.namespace, &a.id).cmp(&(&b.namespace, &b.id)));
    Ok(found)
}

/// What is in a directory, or of that one name alone. A directory may go at any time.
fn entries(dir: &Path, only: Option<&str>) -> Result<Vec<PathBuf>> {
    let list = || fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect();
    let listed: std::io::Result<Option<Vec<PathBuf>>> = std::io::Result::if_present(list());
    let mut listed = listed
        .map_err(|error| {
            let hint = match error.kind() {
                std::io::ErrorKind::PermissionDenied => ". hint: run it as root",
                _ => "",
            };
            anyhow::anyhow!("cannot list {}: {error}{hint}", dir.display())
        })?
        .unwrap_or_default();
    listed.retain(|path| only.is_none_or(|only| path.file_name().is_some_and(|name| name == only)));
    Ok(listed)
}

/// The open transactions of firn-runc: files below the root directories of runc, with the bundles.
fn runc_transactions(dir: &Path, only: Option<&str>, found: &mut Vec<Container>) -> Result<()> {
    for path in entries(dir, None)? {
        if path.is_dir() {
            runc_transactions(&path, only, found)?;
            continue;
        }
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if only.is_some_and(|only| only != name) {
            continue;
        }
        let bundle = PathBuf::from(std::ffi::OsString::from_vec(fs::read(&path).unwrap_or_default()));
        if let Some(mut container) = Container::of_bundle(&bundle)? {
            let root = dir
                .strip_prefix(names::RUNC_TRANSACTIONS)
                .unwrap_or(Path::new(""));
            container.root = Some(Path::new("/").join(root));
            (container.namespace, container.id) = (RUNC.to_owned(), name);
            found.push(container);
        }
    }
    Ok(())
}

impl Container {
    /// None if the container is not under firn, or has ended.
    fn of_bundle(bundle: &Path) -> Result<Option<Self>> {
        let name = |path: Option<&Path>| {
            let name = path.and_then(Path::file_name).unwrap_or_default();
            name.to_string_lossy().into_owned()
        };
        let init = fs::read_to_string(bundle.join("init.pid")).ok();
        let init: Option<i32> = init.and_then(|text| text.trim().parse().ok());
        let init = init.filter(|init| procfs::is_alive(*init));
        let cgroup = init.and_then(|init| Cgroup::of_pid(init).ok());
        let pids = cgroup
            .as_ref()
            .and_then(|cgroup| cgroup.pids().ok())
            .unwrap_or_default();
        let memory = || pids.iter().map(|pid| procfs::anonymous(*pid)).sum();
        let transaction = Transaction::of(bundle, memory);
        let transaction = transaction.with_context(|| format!("read the journal in {}", bundle.display()))?;
        let parked = init.and_then(Lease::of_init_is_parked);
        if transaction.is_none() && parked.is_none() && !init.is_some_and(is_under_firn) {
            return Ok(None);
        }
        let state = match (&transaction, init) {
            (Some(transaction), _) => match transaction.state() {
                State::Running => transaction.operation(),
                State::Suspended => "suspended",
                State::Killed => "killed",
            },
            _ if parked == Some(true) => "parked",
            (None, Some(init)) if procfs::comm(init).starts_with(CREATED) => "created",
            _ => match cgroup.map(|cgroup| cgroup.freezer_state()) {
                Some(Ok(FreezerState::Frozen)) => "paused",
                _ => "running",
            },
        };
        Ok(Some(Self {
            namespace: name(bundle.parent()),
            id: name(Some(bundle)),
            root: None,
            init,
            spec: Spec::load(bundle).ok(),
            pids,
            transaction,
            state,
            ending: Ending::of(bundle).filter(|_| state == "paused"),
            gpus: Vec::new(),
            gpu_memory: None,
        }))
    }

    pub fn state(&self) -> &'static str {
        self.state
    }

    /// Its transaction, unless it is suspended: nothing continues then.
    pub fn in_progress(&self) -> Option<&Transaction> {
        let transaction = self.transaction.as_ref();
        transaction.filter(|transaction| !matches!(transaction.state(), State::Suspended))
    }

    pub fn pid(&self) -> Option<i32> {
        self.init
    }

    pub fn has_gpus(&self) -> bool {
        self.spec.as_ref().is_some_and(Spec::requests_gpu)
    }

    /// Of a container whose GPU state is in host memory: what was there.
    pub fn gpu_memory(&self) -> Option<u64> {
        self.transaction
            .as_ref()
            .and_then(Transaction::gpu_memory)
            .or(self.gpu_memory)
    }

    /// The command that lets it continue, if it stands still, nothing works on it, and no copy may run.
    pub fn resume(&self) -> Option<String> {
        let id = &self.id;
        if self.ending.is_some() || !matches!(self.state, "suspended" | "parked" | "paused") {
            return None;
        }
        if let Some(root) = &self.root {
            return Some(format!("firn-runc --root {} state {id}", root.display()));
        }
        Some(match self.state {
            "parked" if self.namespace == "default" => format!("firn resume {id}"),
            "parked" => format!("firn resume {id} --namespace {}", self.namespace),
            _ => {
                let ctr = text::ctr(Path::new(text::CONTAINERD), &self.namespace);
                format!("{ctr} tasks resume {id}")
            }
        })
    }

    /// Why it is suspended, killed, or paused with a copy.
    pub fn reason(&self) -> Option<String> {
        if self.ending == Some(Ending::Left) {
            return Some(LEFT.to_owned());
        }
        let transaction = self.transaction.as_ref()?;
        let unknown = || "see containerd's log; its journal is of an older firn".to_owned();
        match transaction.state() {
            State::Running => None,
            State::Suspended => Some(transaction.record.reason.clone().unwrap_or_else(unknown)),
            State::Killed => Some(format!(
                "its shim was killed during the {}, phase {}; containerd cleans up",
                transaction.operation(),
                transaction.phase()
            )),
        }
    }

    pub fn shown(&self) -> ContainerRow<'_> {
        ContainerRow {
            container: &self.id,
            namespace: &self.namespace,
            state: self.state,
            pid: self.init,
            gpus: &self.gpus,
            gpu_memory: self.gpu_memory(),
            transaction: self.transaction.as_ref().map(Transaction::shown),
            reason: self.reason(),
            resume: self.resume(),
        }
    }
}

/// Whether the parent of a container's init is firn's shim.
fn is_under_firn(init: i32) -> bool {
    let parent = procfs::stat_field(init, 1).unwrap_or_default();
    let program = fs::read_link(Path::new("/proc").join(parent).join("exe"));
    program.is_ok_and(|program| running::name_of(&program) == Some(names::SHIM_PROGRAM))
}
