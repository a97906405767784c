//! Compares what is restored with the container's spec, before CRIU runs and after it. firn-hook does it, in
//! a process of its own, because it reads untrusted files.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_config::{find_program, names};
use firn_host::{Chain, Problem};
use firn_image::criu::ImageFault;
use firn_oci::Spec;
use firn_process::cgroup::Cgroup;
use firn_process::reaper::Reaper;

use super::error::{Cause, Refusal};
use crate::configured::configured;
use crate::container::Container;

/// How long a comparison may take. For thousands of tasks it takes less than a second.
const LIMIT: Duration = Duration::from_secs(60);

/// What is restored exceeds the spec, or could not be compared with it.
#[derive(Debug, thiserror::Error, Problem)]
pub enum Differs {
    #[error(transparent)]
    Fault(ImageFault),
    #[error("firn-hook has not compared it with the container's spec: {output}")]
    #[problem("FIRN-IMAGE-CHECK", "see that firn-hook is of the shim's version")]
    Unknown { output: String },
}

/// Refuses an image that requests more than the bundle's spec allows.
pub(super) async fn image(bundle: &Path, image: &Path, reaper: &Reaper) -> Result<(), Refusal> {
    let hook = find_program(names::HOOK_PROGRAM, configured().hook.path.as_deref())?;
    let mut command = Command::new(hook);
    command.arg("check-image").arg(bundle).arg(image);
    run_hook(&mut command, reaper).await.map_err(Refusal::Image)
}

/// The cgroup and the stopped processes, init first, of a container that CRIU has restored. Nothing may touch
/// the processes before it is known that they are in the container's own cgroup and have no more rights than
/// its spec gives.
pub(super) async fn tasks(
    container: &Container,
    hook: &Path,
    init: i32,
    reaper: &Reaper,
) -> Result<(Cgroup, Vec<i32>), Cause> {
    let spec = Spec::load(&container.bundle)?;
    let path = spec.cgroups_path().unwrap_or_default();
    let cgroup = Cgroup::by_spec(path, &container.id, container.options.systemd_cgroup)?;
    let mut pids = cgroup.pids()?;
    let Some(at) = pids.iter().position(|pid| *pid == init) else {
        return Err(Cause::Outside {
            pid: init,
            path: path.to_owned(),
        });
    };
    pids.swap(0, at);
    let mut command = Command::new(hook);
    command.arg("check-tasks").arg(&container.bundle);
    command.args(pids.iter().map(ToString::to_string));
    run_hook(&mut command, reaper).await.map_err(Cause::Exceeds)?;
    Ok((cgroup, pids))
}

async fn run_hook(command: &mut Command, reaper: &Reaper) -> Result<(), Differs> {
    let unknown = |output| Differs::Unknown { output };
    let printed = printed(command, LIMIT, reaper).await.map_err(unknown)?;
    match serde_json::from_slice(&printed) {
        Ok(None) => Ok(()),
        Ok(Some(fault)) => Err(Differs::Fault(fault)),
        Err(error) => Err(unknown(error.to_string())),
    }
}

/// What firn-hook prints, or why it failed.
pub(super) async fn printed(hook: &mut Command, limit: Duration, reaper: &Reaper) -> Result<Vec<u8>, String> {
    let output = reaper.output(hook, limit).await;
    output.map_err(|error| Chain(&error).to_string())?.printed()
}

#[cfg(test)]
mod tests {
    use super::super::testing::Stub;
    use super::*;

    #[tokio::test]
    async fn an_image_that_cannot_be_compared_is_refused() {
        let reaper = Reaper::start().unwrap();
        let nowhere = Path::new("/nonexistent");
        assert!(image(nowhere, nowhere, &reaper).await.is_err());
    }

    #[tokio::test]
    async fn restored_processes_outside_the_containers_cgroup_are_refused() {
        let reaper = Reaper::start().unwrap();
        let Some(stub) = Stub::new("true", &reaper) else {
            return;
        };
        let init = stub.scratch.spawn(&reaper, "", "exec sleep 1000");
        stub.scratch.all_entered().await;
        let tasks = async |init| {
            tasks(&stub.container, Path::new("true"), init, &reaper)
                .await
                .err()
        };
        let stranger = i32::try_from(std::process::id()).unwrap();
        let outside = tasks(stranger).await;
        assert!(matches!(outside, Some(Cause::Outside { .. })), "{outside:?}");
        // A hook that prints nothing has not compared them.
        let unknown = tasks(init.pid()).await;
        assert!(
            matches!(unknown, Some(Cause::Exceeds(Differs::Unknown { .. }))),
            "{unknown:?}"
        );
    }

    #[tokio::test]
    async fn a_comparison_that_failed_refuses_the_restore() {
        let reaper = Reaper::start().unwrap();
        for script in [
            "exit 1",
            "echo null; exit 1",
            "echo nonsense",
            "kill -KILL $$",
            ":",
        ] {
            let mut command = Command::new("sh");
            let differs = run_hook(command.args(["-c", script]), &reaper).await.unwrap_err();
            assert_eq!(differs.code(), "FIRN-IMAGE-CHECK", "{script}");
            assert!(differs.hint().contains("firn-hook"), "{}", differs.hint());
        }
        let mut command = Command::new("echo");
        assert!(run_hook(command.arg("null"), &reaper).await.is_ok());
    }
}
