//! What is restored compared with the container's spec, before CRIU runs and after it. firn-hook does it: what it reads, others
//! have chosen.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_config::{Config, find_program, names};
use firn_oci::Spec;
use firn_oci::criu_image::ImageFault;

use super::error::{Cause, Refusal};
use crate::cgroup::Cgroup;
use crate::container::Container;
use crate::logger::Chain;
use crate::reaper::Reaper;

/// How long it may take. For thousands of tasks it is less than a second.
const LIMIT: Duration = Duration::from_secs(60);

/// What was compared exceeds the spec, or it could not be compared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Differs {
    #[error(transparent)]
    Fault(ImageFault),
    #[error("firn-hook has not compared it with the container's spec: {said}")]
    Unknown { said: String },
}

impl Differs {
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::Fault(fault) => fault.code(),
            Self::Unknown { .. } => "FIRN-IMAGE-CHECK",
        }
    }

    pub(super) fn hint(&self) -> &'static str {
        match self {
            Self::Fault(fault) => fault.hint(),
            Self::Unknown { .. } => "see that firn-hook is of the shim's version",
        }
    }
}

/// The configuration. One that cannot be read keeps no container without GPU from being restored: the defaults count, which
/// allow least.
pub(super) fn configured() -> Config {
    Config::load().unwrap_or_else(|error| {
        log::warn!("{}", Chain(&error));
        Config::default()
    })
}

/// Refuses an image that asks for more than the bundle's spec allows.
pub(super) async fn image(bundle: &Path, image: &Path, reaper: &Reaper) -> Result<(), Refusal> {
    let hook = find_program(names::HOOK_PROGRAM, configured().hook.path.as_deref())?;
    let mut command = Command::new(hook);
    command.arg("check-image").arg(bundle).arg(image);
    ask(&mut command, reaper).await.map_err(Refusal::Image)
}

/// The cgroup and the stopped processes, init first, of a container that CRIU has made. None has been touched: not before it is
/// known that they are in the container's own cgroup, and have no more than its spec allows.
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
    ask(&mut command, reaper).await.map_err(Cause::Exceeds)?;
    Ok((cgroup, pids))
}

async fn ask(command: &mut Command, reaper: &Reaper) -> Result<(), Differs> {
    let said = match reaper.output(command, LIMIT).await {
        Ok(output) if output.success() => match serde_json::from_slice(&output.stdout) {
            Ok(None) => return Ok(()),
            Ok(Some(fault)) => return Err(Differs::Fault(fault)),
            Err(error) => error.to_string(),
        },
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => Chain(&error).to_string(),
    };
    Err(Differs::Unknown { said })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_comparison_that_was_not_made_is_no_consent() {
        let reaper = Reaper::start().unwrap();
        for script in ["exit 1", "echo nonsense", "kill -KILL $$", ":"] {
            let mut command = Command::new("sh");
            let differs = ask(command.args(["-c", script]), &reaper).await.unwrap_err();
            assert_eq!(differs.code(), "FIRN-IMAGE-CHECK", "{script}");
        }
        let mut command = Command::new("echo");
        assert!(ask(command.arg("null"), &reaper).await.is_ok());
    }
}
