//! The verbs of the OCI runtime other than checkpoint and restore.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tokio::time::sleep;

use super::{Runc, RuncError, SHORT};
use firn_host::UnlessAbsent;

/// runc's error, how often a freeze is tried again after it, and after which time.
const NOT_FROZEN: &str = "unable to freeze";
const FREEZES: usize = 5;
const BUSY: Duration = Duration::from_millis(200);

/// Arguments of `create`.
pub struct Create<'a> {
    /// Bundle directory.
    pub bundle: &'a Path,
    /// File that receives the pid of init.
    pub pid_file: &'a Path,
    /// Socket that receives the terminal.
    pub console_socket: Option<&'a Path>,
    /// Use MS_MOVE instead of pivot_root.
    pub no_pivot: bool,
    /// Keep the session keyring of the caller.
    pub no_new_keyring: bool,
}

/// Arguments of `exec`.
pub struct Exec<'a> {
    /// OCI process, JSON.
    pub process: &'a [u8],
    /// File that receives the pid.
    pub pid_file: &'a Path,
    /// Socket that receives the terminal.
    pub console_socket: Option<&'a Path>,
}

impl Runc {
    /// `create`: creates the container; `stdio` attaches the container's stdio to the command.
    pub async fn create(
        &self,
        create: Create<'_>,
        stdio: impl FnOnce(&mut Command),
    ) -> Result<(), RuncError> {
        let mut command = self.command("create");
        command
            .arg("--bundle")
            .arg(create.bundle)
            .arg("--pid-file")
            .arg(create.pid_file);
        if let Some(socket) = create.console_socket {
            command.arg("--console-socket").arg(socket);
        }
        if create.no_pivot {
            command.arg("--no-pivot");
        }
        if create.no_new_keyring {
            command.arg("--no-new-keyring");
        }
        command.arg(&self.id);
        stdio(&mut command);
        self.run("create", &mut command).await
    }

    /// `start`: init of a created container executes the user's program. Hooks have no deadline; they are
    /// killed when `cancel` resolves.
    pub async fn start(&self, cancel: impl Future<Output = ()>) -> Result<(), RuncError> {
        self.run_hooks("start", self.command("start").arg(&self.id), cancel)
            .await
    }

    /// `exec`: runs another process in the container.
    pub async fn exec(&self, exec: Exec<'_>, stdio: impl FnOnce(&mut Command)) -> Result<(), RuncError> {
        self.with_own_log(async |runc| runc.exec_alone(exec, stdio).await)
            .await
    }

    /// The command line of `exec` up to its options.
    pub(crate) fn exec_arguments(&self) -> Vec<String> {
        let command = self.command("exec");
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy().into_owned()).collect()
    }

    async fn exec_alone(&self, exec: Exec<'_>, stdio: impl FnOnce(&mut Command)) -> Result<(), RuncError> {
        let prepare = |source| RuncError::Prepare { verb: "exec", source };
        let mut process = tempfile::NamedTempFile::with_prefix("firn-exec").map_err(prepare)?;
        process.write_all(exec.process).map_err(prepare)?;
        let mut command = self.command("exec");
        command
            .arg("--process")
            .arg(process.path())
            .arg("--detach")
            .arg("--pid-file")
            .arg(exec.pid_file);
        if let Some(socket) = exec.console_socket {
            command.arg("--console-socket").arg(socket);
        }
        command.arg(&self.id);
        stdio(&mut command);
        self.run("exec", &mut command).await
    }

    /// `kill`: sends `signal` to init, or to every process of the container.
    pub async fn kill(&self, signal: u32, all: bool) -> Result<(), RuncError> {
        self.with_own_log(async |runc| {
            let mut command = runc.command("kill");
            if all {
                command.arg("--all");
            }
            command.arg(&runc.id).arg(signal.to_string());
            runc.output("kill", &mut command, SHORT).await.map(drop)
        })
        .await
    }

    /// `delete` of a stopped container. Hooks have no deadline; they are killed when `cancel` resolves.
    pub async fn delete(&self, cancel: impl Future<Output = ()>) -> Result<(), RuncError> {
        self.run_hooks("delete", self.command("delete").arg(&self.id), cancel)
            .await
    }

    /// `delete --force` of a container whose image is complete. Hooks have until `cancel` resolves; `delete`
    /// removes what is left after that.
    pub async fn finish(&self, cancel: impl Future<Output = ()>) -> Result<(), RuncError> {
        let mut command = self.command("delete");
        command.arg("--force").arg(&self.id);
        match self.run_hooks("delete", &mut command, cancel).await {
            Err(RuncError::Cancelled { .. }) => Ok(()),
            result => result.unless_absent(),
        }
    }

    /// `delete --force` after a failure, or of a container without a shim, which may not exist any more. Its
    /// hooks have a deadline.
    pub async fn ensure_deleted(&self) -> Result<(), RuncError> {
        let mut command = self.command("delete");
        command.arg("--force").arg(&self.id);
        let deleted = self.output("delete", &mut command, SHORT).await;
        deleted.map(drop).unless_absent()
    }

    /// `pause`: freezes the container's cgroup. On cgroup v1 runc gives up and thaws if a thread is long in
    /// the kernel: then it is tried again.
    pub async fn pause(&self) -> Result<(), RuncError> {
        let mut again = FREEZES;
        loop {
            let paused = self
                .output("pause", self.command("pause").arg(&self.id), SHORT)
                .await;
            match paused {
                Err(error) if again > 0 && error.to_string().contains(NOT_FROZEN) => {
                    log::info!("{} did not freeze: once more", self.id);
                    again -= 1;
                    sleep(BUSY).await;
                }
                paused => return paused.map(drop),
            }
        }
    }

    /// `resume`: thaws the container's cgroup.
    pub async fn resume(&self) -> Result<(), RuncError> {
        self.output("resume", self.command("resume").arg(&self.id), SHORT)
            .await
            .map(drop)
    }

    /// `ps`: the container's processes, by their pids on the host.
    pub async fn ps(&self) -> Result<Vec<i32>, RuncError> {
        let stdout = self
            .with_own_log(async |runc| {
                let mut command = runc.command("ps");
                command.args(["--format", "json"]).arg(&runc.id);
                runc.output("ps", &mut command, SHORT).await
            })
            .await?;
        // A container without processes is printed as `null`.
        serde_json::from_slice::<Option<Vec<i32>>>(&stdout)
            .map(Option::unwrap_or_default)
            .map_err(|error| RuncError::Output {
                verb: "ps",
                detail: error.to_string(),
            })
    }

    /// `update`: sets new limits, an OCI LinuxResources as JSON.
    pub async fn update(&self, resources: &[u8]) -> Result<(), RuncError> {
        self.with_own_log(async |runc| {
            let mut command = runc.command("update");
            command.arg("--resources=-").arg(&runc.id);
            let updated = runc.output_with_input("update", &mut command, resources, SHORT);
            updated.await.map(drop)
        })
        .await
    }
}
