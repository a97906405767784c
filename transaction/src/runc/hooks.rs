//! Calls in which the runtime runs the container's hooks. Hooks have no deadline, as with the stock shim,
//! until a client asks for the end of the container.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::Command;

use firn_host::procfs;
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{GROUP_END_KILLED, Runc, RuncError, end_group, read_from_start};

impl Runc {
    /// Runs a command until it ends, or until `cancel` resolves: then the command and its hooks are killed.
    pub(super) async fn run_hooks(
        &self,
        verb: &'static str,
        command: &mut Command,
        cancel: impl Future<Output = ()>,
    ) -> Result<(), RuncError> {
        let from = self.logged();
        let prepare = |source| RuncError::Prepare { verb, source };
        // In a file, because processes that a hook leaves behind may keep a pipe open. In memory, because a
        // full disk must not prevent a delete.
        let output =
            memfd_create(c"firn-runtime", MFdFlags::MFD_CLOEXEC).map_err(|errno| prepare(errno.into()))?;
        let output = File::from(output);
        command
            .process_group(0)
            .stdout(output.try_clone().map_err(prepare)?)
            .stderr(output.try_clone().map_err(prepare)?);
        let child = self.spawn(verb, command)?;
        let started = procfs::started(child.pid());
        let exit = tokio::select! {
            biased;
            exit = child.wait() => exit,
            () = cancel => {
                end_group(&child, started, tokio::time::sleep(GROUP_END_KILLED)).await;
                return Err(RuncError::Cancelled { verb });
            }
        };
        match exit.code {
            0 => Ok(()),
            code => Err(self.failure(verb, code, &read_from_start(output), from)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use firn_process::reaper::Reaper;

    use super::*;
    use crate::options::RuncOptions;

    fn runtime(dir: &Path, script: &str) -> Runc {
        let runtime = dir.join("runtime");
        std::fs::write(&runtime, format!("#!/bin/sh\ncd {}\n{script}\n", dir.display())).unwrap();
        std::fs::set_permissions(&runtime, PermissionsExt::from_mode(0o755)).unwrap();
        let options = RuncOptions {
            binary_name: runtime.display().to_string(),
            ..RuncOptions::default()
        };
        Runc::new("job", "default", dir, &options, Reaper::start().unwrap())
    }

    /// Paused time advances as soon as only a timer is pending: any deadline would pass before the hook ends.
    #[tokio::test(start_paused = true)]
    async fn hooks_of_start_and_delete_get_the_time_that_they_need() {
        let dir = tempfile::tempdir().unwrap();
        let runc = runtime(dir.path(), "sleep 0.3; echo \"$0 failed here\"; exit $(cat code)");
        std::fs::write(dir.path().join("code"), "0").unwrap();
        runc.start(pending()).await.unwrap();
        runc.delete(pending()).await.unwrap();
        std::fs::write(dir.path().join("code"), "3").unwrap();
        let failed = runc.start(pending()).await.unwrap_err().to_string();
        assert!(failed.contains("runtime failed here"), "{failed}");
    }

    #[tokio::test]
    async fn hooks_of_a_cancelled_call_are_killed() {
        let dir = tempfile::tempdir().unwrap();
        let runc = runtime(dir.path(), "sleep 1000 & echo $! >new; mv new hook; wait");
        let hook = dir.path().join("hook");
        let begun = Instant::now();
        let cancel = async {
            while !hook.exists() {
                assert!(begun.elapsed() < Duration::from_secs(10), "no hook");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let cancel = runc.delete(cancel).await;
        assert!(
            matches!(cancel, Err(RuncError::Cancelled { verb: "delete" })),
            "{cancel:?}"
        );
        let pid: i32 = std::fs::read_to_string(&hook).unwrap().trim().parse().unwrap();
        assert!(!procfs::is_alive(pid), "the hook still runs");
    }
}
