//! The task service over a runtime that is a shell script, for tests. Processes of its container are real
//! ones.

use firn_gpu::Backend;
use std::process::{Command, Stdio};
use std::sync::Arc;

use firn_process::cancel::CancellationToken;
use firn_process::cgroup::Cgroup;
use firn_process::cgroup::testing::fake;
use firn_process::reaper::Reaper;
use firn_process::sys;
use firn_process::testing::write_program;
use tempfile::TempDir;

use super::{Service, Slot};
use crate::events::testing::Published;
use crate::history::History;
use crate::server::Context;
use firn_transaction::container::{Container, ContainerTraits, InitState, Owner, Process, StdioPaths};
use firn_transaction::history::HistoryDir;
use firn_transaction::options::RuncOptions;
use firn_transaction::runc::Runc;

/// The one container that there is.
pub(super) const ID: &str = "box";

/// The spec of a container without GPU.
pub(super) const PLAIN: ContainerTraits = ContainerTraits {
    backend: Backend::None,
    other_gpus: false,
    device_free: false,
    private_pids: true,
    interposed: false,
    criu: None,
};

/// The same with GPUs.
pub(super) const GPU: ContainerTraits = ContainerTraits {
    backend: Backend::Nvidia,
    ..PLAIN
};

pub(super) struct Stub {
    pub service: Arc<Service>,
    pub events: Published,
    dir: TempDir,
    cgroup: (TempDir, Cgroup),
}

impl Stub {
    /// A service whose runtime writes down how it is called, and sends the signals that it is asked for.
    pub(super) async fn start() -> Self {
        let (publisher, events) = Published::new();
        let reaper = Reaper::start().unwrap();
        let dir = TempDir::new().unwrap();
        let service = Service::start(Context {
            namespace: "default".to_owned(),
            address: String::new(),
            reaper: reaper.clone(),
            publisher,
            history: Arc::new(History::new(HistoryDir::new(dir.path().join("history")))),
            serving: CancellationToken::default(),
        });
        // Options of the runtime itself come first.
        let script = format!(
            "#!/bin/sh\ncd {} && shift 6 && echo \"$*\" >>calls && pid=$(cat pid)\n[ ! -e $1 ] || . ./$1\n",
            dir.path().display()
        );
        write_program(&dir.path().join("runtime"), &script);
        let files = [
            ("cgroup.freeze", "0"),
            ("cgroup.events", "populated 1\nfrozen 0\n"),
        ];
        let stub = Self {
            service,
            events,
            dir,
            cgroup: fake(firn_host::cgroup_mounts::Version::V2, &files),
        };
        stub.runtime_does("kill", "for signal; do :; done; kill -$signal $pid");
        stub
    }

    /// What the runtime does from now on when it is called for `verb`. Init is `$pid`.
    pub(super) fn runtime_does(&self, verb: &str, script: &str) {
        std::fs::write(self.dir.path().join(verb), script).unwrap();
    }

    /// The cgroup is frozen from now on, whatever the runtime does.
    pub(super) fn freezes(&self) {
        let dir = self.cgroup.0.path().join("box");
        std::fs::write(dir.join("cgroup.freeze"), "1").unwrap();
        std::fs::write(dir.join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
    }

    /// How the runtime was called.
    pub(super) fn calls(&self) -> Vec<String> {
        let calls = std::fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }

    /// A container that was made and has no process. The files of its cgroup are no kernel's.
    pub(super) fn container(&self, traits: ContainerTraits) -> Arc<Container> {
        let bundle = self.dir.path();
        let options = RuncOptions {
            binary_name: bundle.join("runtime").display().to_string(),
            root: bundle.display().to_string(),
            ..RuncOptions::default()
        };
        let runc = Runc::new(ID, "default", bundle, &options, self.service.reaper.clone());
        let init = Process::new("", StdioPaths::default(), Vec::new());
        let container = Container::new(ID, bundle.to_owned(), runc, options, init, traits, None);
        container.set_cgroup(self.cgroup.1.clone());
        let container = Arc::new(container);
        let slot = Slot::Ready(container.clone());
        self.service.containers().insert(ID.to_owned(), slot);
        std::fs::write(bundle.join("pid"), "0").unwrap();
        container
    }

    /// A container whose init sleeps.
    pub(super) fn running(&self, traits: ContainerTraits) -> Arc<Container> {
        let container = self.container(traits);
        self.run_init(&container, &mut shell("exec sleep 1000"));
        container
    }

    /// Has `command` be init, of a container that runs from now on. Gives its pid.
    pub(super) fn run_init(&self, container: &Arc<Container>, command: &mut Command) -> i32 {
        let pid = self.run(container, &container.init, command);
        std::fs::write(self.dir.path().join("pid"), pid.to_string()).unwrap();
        container.set_state(InitState::Running);
        pid
    }

    /// Has a shell be an exec.
    pub(super) fn run_exec(&self, container: &Arc<Container>, exec_id: &str, script: &str) -> i32 {
        let exec = Arc::new(Process::new(exec_id, StdioPaths::default(), Vec::new()));
        assert!(container.add_exec(exec.clone()));
        container.begin_exec().unwrap();
        self.run(container, &exec, &mut shell(script))
    }

    #[expect(clippy::zombie_processes, reason = "the reaper waits for it")]
    fn run(&self, container: &Arc<Container>, process: &Arc<Process>, command: &mut Command) -> i32 {
        assert!(process.begin());
        sys::die_with_parent(command);
        let expectation = self.service.exits.expect();
        // Not by the reaper, which does not learn of a container's processes from who starts them.
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        process.set_pid(pid);
        let owner = Owner {
            container: Arc::downgrade(container),
            process: process.clone(),
        };
        let early = expectation.claim(pid, owner);
        assert_eq!(early, None, "exits are handled by this thread");
        pid
    }
}

pub(super) fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}
