//! The container that a call is about, as the transactions take it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use firn_host::procfs;
use firn_oci::Spec;
use firn_process::cgroup::Cgroup;
use firn_process::reaper::{Exit, Reaper};
use firn_transaction::container::{Container, ContainerTraits, InitState, Process, StdioPaths};
use firn_transaction::create;
use firn_transaction::options::RuncOptions;
use firn_transaction::prepared_restore::PreparedRestore;
use firn_transaction::runc::Runc;
use serde::Deserialize;

use crate::command_line::CommandLine;
use crate::error::{Failure, Trouble};
use crate::program;

/// How long `runc state` may take.
const STATE: Duration = Duration::from_secs(30);

/// How often is looked whether init is alive: its parent is another process.
const LOOK: Duration = Duration::from_millis(20);

/// runc has no namespaces: its directory of state is that of the command line.
pub const NAMESPACE: &str = "";

/// What `runc state` reports.
#[derive(Debug, Deserialize)]
pub struct State {
    pub bundle: PathBuf,
    #[serde(default)]
    pub pid: i32,
    status: String,
}

impl State {
    /// Whether it has processes.
    pub fn is_alive(&self) -> bool {
        self.status != "stopped" && self.pid > 0
    }

    /// Whether its processes are not frozen.
    pub fn is_running(&self) -> bool {
        self.status == "running"
    }
}

/// What runc knows of the container; none if it knows none of this id.
pub async fn state(line: &CommandLine, id: &str, reaper: &Reaper) -> Result<Option<State>, Failure> {
    let mut command = Command::new(program::runc()?);
    command.arg("--root").arg(line.root()).args(["state", id]);
    let failed = |output: String| Trouble::State {
        id: id.to_owned(),
        output,
    };
    let ran = reaper.output(&mut command, STATE).await;
    let ran = ran.map_err(|error| failed(error.to_string()))?;
    if !ran.success() {
        let output = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
        return if output.contains("does not exist") {
            Ok(None)
        } else {
            Err(failed(output).into())
        };
    }
    let state = serde_json::from_slice(&ran.stdout).map_err(|error| failed(error.to_string()))?;
    Ok(Some(state))
}

/// The options of a call, in the words of containerd's.
pub fn options(line: &CommandLine, bundle: &Path) -> Result<RuncOptions, Failure> {
    // podman has the option only in calls that it makes through conmon.
    let by_path =
        Spec::load(bundle).is_ok_and(|spec| spec.cgroups_path().is_some_and(Cgroup::is_for_systemd));
    let text = |path: &Path| path.to_string_lossy().into_owned();
    Ok(RuncOptions {
        binary_name: text(&program::runc()?),
        root: text(line.root()),
        systemd_cgroup: line.has_global("systemd-cgroup") || by_path,
        no_pivot_root: line.has("no-pivot"),
        criu_work_path: line
            .path("work-path")
            .map_or_else(String::new, |path| text(&path)),
        ..RuncOptions::default()
    })
}

/// A container that has processes.
pub fn running(
    line: &CommandLine,
    id: &str,
    state: &State,
    reaper: &Reaper,
) -> Result<Arc<Container>, Failure> {
    let traits = create::reopen(&state.bundle)?;
    let options = options(line, &state.bundle)?;
    let runc = Runc::new(id, NAMESPACE, &state.bundle, &options, reaper.clone());
    let container = made(id, &state.bundle, runc, options, traits, None);
    container.init.begin();
    container.init.set_pid(state.pid);
    container.set_state(InitState::Running);
    watch(&container);
    Ok(container)
}

/// A container as Create has prepared it.
pub fn made(
    id: &str,
    bundle: &Path,
    runc: Runc,
    options: RuncOptions,
    traits: ContainerTraits,
    restore: Option<PreparedRestore>,
) -> Arc<Container> {
    let init = Process::new("", StdioPaths::default(), Vec::new());
    Arc::new(Container::new(
        id,
        bundle.to_owned(),
        runc,
        options,
        init,
        traits,
        restore,
    ))
}

/// Ends what is under way when init ends.
fn watch(container: &Arc<Container>) {
    let container = container.clone();
    tokio::spawn(async move {
        let pid = container.init.pid();
        while procfs::is_alive(pid) {
            tokio::time::sleep(LOOK).await;
        }
        drop(container.transaction.cancel());
        // Its exit status is for its parent.
        let at = SystemTime::now();
        container.init.set_exit(Exit { pid, code: 0, at });
    });
}
