//! `checkpoint` and `restore` of the OCI runtime.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use firn_image::manifest::DumpFlags;
use firn_process::cancel::CancellationToken;
use firn_process::cgroup::Cgroup;
use firn_process::sys;

use super::{Runc, RuncError, RuntimeKind};
use crate::journal::Journal;

/// Limits and observers of a call that starts CRIU.
#[derive(Clone, Copy)]
pub struct Bounds<'a> {
    /// Deadline of the call; none where the stock shim has none.
    pub deadline: Option<Duration>,
    /// Records the runtime's pid.
    pub journal: &'a Journal,
    /// Ends the call early, and is notified when CRIU has ended.
    pub cancel: &'a CancellationToken,
    /// Frozen before CRIU is killed: the kernel then resumes the tasks that CRIU had stopped, and these must
    /// not run.
    pub freezer: Option<&'a Cgroup>,
}

/// Arguments of `checkpoint`.
pub struct Checkpoint<'a> {
    /// CRIU image directory, which exists.
    pub image: &'a Path,
    /// Where CRIU writes its logs.
    pub work: &'a Path,
    /// Image of an earlier pre-dump, relative to `image`.
    pub parent: Option<&'a Path>,
    pub flags: &'a DumpFlags,
    /// Namespaces that are dumped without their content.
    pub empty_namespaces: &'a [String],
    /// The container continues to run; otherwise the runtime destroys it.
    pub leave_running: bool,
    /// Directory with CRIU's plugins, unless it is CRIU's default.
    pub plugins: Option<&'a Path>,
    pub bounds: Bounds<'a>,
}

/// Arguments of `restore`.
#[derive(Clone, Copy)]
pub struct Restore<'a> {
    /// CRIU image directory.
    pub image: &'a Path,
    /// Where CRIU writes its logs.
    pub work: &'a Path,
    /// Bundle directory.
    pub bundle: &'a Path,
    /// File that receives the pid of init.
    pub pid_file: &'a Path,
    /// Socket that receives the terminal.
    pub console_socket: Option<&'a Path>,
    /// Use MS_MOVE instead of pivot_root.
    pub no_pivot: bool,
    /// Flags of the dump to repeat; none for a stock image, which records none.
    pub flags: &'a DumpFlags,
    /// Directory with CRIU's plugins, unless it is CRIU's default.
    pub plugins: Option<&'a Path>,
    pub bounds: Bounds<'a>,
}

/// Environment variable from which CRIU takes its plugin directory.
const CRIU_LIBS_DIR: &str = "CRIU_LIBS_DIR";

impl Runc {
    /// The options that dump and restore have in common.
    fn criu_command(&self, verb: &str, image: &Path, work: &Path, flags: &DumpFlags) -> Command {
        let mut command = self.command(verb);
        command.arg("--image-path").arg(image);
        command.arg("--work-path").arg(work);
        let flags = [
            (flags.open_tcp, "--tcp-established"),
            (flags.external_unix_sockets, "--ext-unix-sk"),
            (flags.terminal, "--shell-job"),
            (flags.file_locks, "--file-locks"),
        ];
        command.args(flags.into_iter().filter_map(|(set, flag)| set.then_some(flag)));
        command
    }

    /// `checkpoint`: CRIU dumps the container.
    pub async fn checkpoint(&self, checkpoint: Checkpoint<'_>) -> Result<(), RuncError> {
        let Checkpoint {
            image, work, flags, ..
        } = checkpoint;
        let mut command = self.criu_command("checkpoint", image, work, flags);
        command.envs(checkpoint.plugins.map(|plugins| (CRIU_LIBS_DIR, plugins)));
        if let Some(parent) = checkpoint.parent {
            command.arg("--parent-path").arg(parent);
        }
        for namespace in checkpoint.empty_namespaces {
            command.arg("--empty-ns").arg(namespace);
        }
        if checkpoint.leave_running {
            command.arg("--leave-running");
        }
        let prepare = |source| RuncError::Prepare {
            verb: "checkpoint",
            source,
        };
        let output = tempfile::tempfile().map_err(prepare)?;
        let stderr = output.try_clone().map_err(prepare)?;
        command.arg(&self.id).stdout(Stdio::null()).stderr(stderr);
        // CRIU makes its files readable for everybody.
        sys::make_private_files(&mut command);
        self.run_criu("checkpoint", &mut command, Some(output), checkpoint.bounds)
            .await
    }

    /// `restore`: CRIU restores the container. Returns when its tasks run, or are stopped if configured so.
    pub async fn restore(
        &self,
        restore: Restore<'_>,
        stdio: impl FnOnce(&mut Command),
    ) -> Result<(), RuncError> {
        // Images of others do not show whether they have locks, without which they would be lost.
        let flags = DumpFlags {
            file_locks: true,
            ..restore.flags.clone()
        };
        let mut command = self.criu_command("restore", restore.image, restore.work, &flags);
        command.envs(restore.plugins.map(|plugins| (CRIU_LIBS_DIR, plugins)));
        command.arg("--detach");
        // Children of a detached restore are the shim's anyway; crun does not know the option.
        if self.kind().await != RuntimeKind::Crun {
            command.arg("--no-subreaper");
        }
        command.arg("--pid-file").arg(restore.pid_file);
        if let Some(socket) = restore.console_socket {
            command.arg("--console-socket").arg(socket);
        }
        if restore.no_pivot {
            command.arg("--no-pivot");
        }
        command.arg("--bundle").arg(restore.bundle).arg(&self.id);
        stdio(&mut command);
        self.run_criu("restore", &mut command, None, restore.bounds).await
    }
}
