//! Looks at files that a container or a mount server controls, in a process that can be killed.
//!
//! A `stat` on a dead file server does not come back, and no signal ends it; a read of /proc waits for whoever holds the
//! process's memory map. So the shim runs itself once more (`/proc/self/exe look`) with a [`Request`] on standard input and takes the
//! answer from standard output, within a deadline and unless the container is to end. What does not end is killed; in state D it
//! is left to the reaper, and the shim goes on. Memory that a hostile /proc costs is that process's, not the shim's.
//!
//! What is looked at is bounded where it is read ([`firn_host::bounded`]), what is answered here ([`child`]).

mod child;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use firn_host::{Problem, ProblemReport, Remedy, remedy};
use firn_oci::mounts::RequiredMount;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cancel::CancellationToken;
use crate::checkpoint::Policy;
use crate::reaper::{OutputError, Reaper};

pub use child::{ChildError, run as run_child};

/// The action by which the shim is run for a look.
pub const ACTION: &str = "look";

/// What is looked at.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Which processes a dump leaves out, and refusals by what the others are and show. Answer: [`LeftOut`].
    Processes {
        init: i32,
        pids: Vec<i32>,
        cuda: Vec<i32>,
        policy: Policy,
    },
    /// Refusals by what lies around the processes: room for what a checkpoint makes, mounts, standard streams. Answer: `()`.
    Surroundings {
        init: i32,
        pids: Vec<i32>,
        cuda: Vec<i32>,
        gpu_memory: u64,
        image: PathBuf,
        work: PathBuf,
        /// Whose spec tells which mounts are the container's.
        bundle: PathBuf,
    },
    /// What processes have open of GPUs that are not NVIDIA's. Answer: [`Others`](firn_preflight::environment::Others).
    Vendors { pids: Vec<i32>, nvidia: bool },
    /// Which of these places processes have in use. Answer: `Option<Vec<bool>>`, none where it cannot be seen.
    InUse { pids: Vec<i32>, places: Vec<PathBuf> },
    /// What a restore changes in the mounts of a spec. Answer: [`ResolvedMounts`](firn_oci::mounts::ResolvedMounts).
    Mounts {
        /// `mounts` of the spec.
        mounts: serde_json::Value,
        bundle: PathBuf,
        required: Vec<RequiredMount>,
        /// Of this node's driver.
        version: String,
        /// Where its libraries may be.
        dirs: Vec<String>,
        /// firn's empty file.
        empty: PathBuf,
    },
}

impl Request {
    /// For messages.
    fn subject(&self) -> &'static str {
        match self {
            Self::Processes { .. } => "the container's processes",
            Self::Surroundings { .. } => {
                "the room for the image, and the container's mounts and standard streams"
            }
            Self::Vendors { .. } | Self::InUse { .. } => "the files that the container's processes have open",
            Self::Mounts { .. } => "the sources of the container's bind mounts",
        }
    }
}

/// Processes that a dump leaves out: some of them with their names, and how many they are.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    pub some: Vec<(i32, String)>,
    pub count: usize,
}

/// A look that refuses, or that there was none.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    #[error("{}", .0.message)]
    Refused(ProblemReport),
    #[error("cannot see {subject} within {} s{}", limit.as_secs_f32(), at(last))]
    Late {
        subject: &'static str,
        limit: Duration,
        /// What it had come to.
        last: String,
    },
    #[error("it was killed")]
    Killed,
    #[error("cannot look at {subject}: {said}")]
    Failed { subject: &'static str, said: String },
    #[error("cannot look at {subject}")]
    Run {
        subject: &'static str,
        #[source]
        source: OutputError,
    },
    #[error("cannot look at {subject}: the answer is not understood")]
    Answer {
        subject: &'static str,
        #[source]
        source: serde_json::Error,
    },
}

fn at(last: &str) -> String {
    match last {
        "" => String::new(),
        last => format!(", it hangs at {last}"),
    }
}

impl Problem for LookError {
    fn remedy(&self) -> Remedy<'_> {
        match self {
            Self::Refused(problem) => problem.remedy(),
            Self::Late { .. } => remedy(
                "FIRN-LOOK-TIMEOUT",
                "see whether a file system of the container, of its mounts or of the image does not answer (dmesg, state D), or raise \
                 look under [deadlines] in the configuration",
            ),
            Self::Killed => remedy("FIRN-ENDED", "start it anew, or restore an earlier checkpoint"),
            Self::Failed { .. } | Self::Run { .. } | Self::Answer { .. } => {
                remedy("FIRN-PROC", "try again; report it with containerd's log")
            }
        }
    }
}

/// Looks, within `limit` and unless the container is to end.
pub async fn look<T: DeserializeOwned>(
    request: &Request,
    reaper: &Reaper,
    limit: Duration,
    cancel: &CancellationToken,
) -> Result<T, LookError> {
    // The file that this process runs, also when another version has been installed over it.
    let mut command = Command::new("/proc/self/exe");
    command.arg(ACTION).env_clear();
    ask(command, request, reaper, limit, cancel).await
}

async fn ask<T: DeserializeOwned>(
    mut command: Command,
    request: &Request,
    reaper: &Reaper,
    limit: Duration,
    cancel: &CancellationToken,
) -> Result<T, LookError> {
    let subject = request.subject();
    let not_understood = |source| LookError::Answer { subject, source };
    let input = serde_json::to_vec(request).map_err(not_understood)?;
    let output = tokio::select! {
        biased;
        () = cancel.cancelled() => return Err(LookError::Killed),
        output = reaper.output_with_input(&mut command, &input, limit) => output,
    };
    let output = match output {
        Ok(output) if output.success() => output,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(LookError::Failed { subject, said });
        }
        Err(OutputError::TimedOut { limit, last, .. }) => {
            return Err(LookError::Late { subject, limit, last });
        }
        Err(source) => return Err(LookError::Run { subject, source }),
    };
    let answer: Result<T, ProblemReport> = serde_json::from_slice(&output.stdout).map_err(not_understood)?;
    answer.map_err(LookError::Refused)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn request() -> Request {
        Request::Vendors {
            pids: vec![1, 2],
            nvidia: false,
        }
    }

    async fn ask_sh(
        script: &str,
        limit: Duration,
        cancel: &CancellationToken,
    ) -> Result<Vec<i32>, LookError> {
        let reaper = Reaper::start().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        ask(command, &request(), &reaper, limit, cancel).await
    }

    #[tokio::test]
    async fn the_answer_is_what_the_child_says_to_the_request() {
        let cancel = CancellationToken::default();
        let echo = r#"grep -q '"pids":\[1,2\]' && echo '{"Ok":[3]}'"#;
        assert_eq!(ask_sh(echo, LIMIT, &cancel).await.unwrap(), [3]);
        let refuse = r#"echo '{"Err":{"code":"FIRN-PROC","message":"m","hint":"h"}}'"#;
        let refused = ask_sh(refuse, LIMIT, &cancel).await.unwrap_err();
        assert_eq!(
            (refused.code(), refused.hint(), &*refused.to_string()),
            ("FIRN-PROC", "h", "m")
        );
        for broken in [
            "echo nonsense",
            "echo why >&2; exit 1",
            "kill -KILL $$",
            "head -c 9000000 /dev/zero",
        ] {
            let failed = ask_sh(broken, LIMIT, &cancel).await.unwrap_err();
            assert_eq!(failed.code(), "FIRN-PROC", "{broken}");
        }
        let said = ask_sh("echo why >&2; exit 1", LIMIT, &cancel).await.unwrap_err();
        assert!(said.to_string().ends_with("have open: why"), "{said}");
    }

    #[tokio::test]
    async fn a_look_that_hangs_is_killed_at_its_deadline_and_when_the_container_is_to_end() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let hang = format!(
            "echo $$ >{}; echo first >&2; echo /srv/nfs >&2; exec sleep 1000",
            pid_file.display()
        );
        let is_gone = || {
            let pid = std::fs::read_to_string(&pid_file).unwrap();
            !crate::procfs::is_alive(pid.trim().parse().unwrap())
        };
        let late = ask_sh(&hang, Duration::from_millis(300), &CancellationToken::default())
            .await
            .unwrap_err();
        assert_eq!(late.code(), "FIRN-LOOK-TIMEOUT");
        assert!(
            late.to_string().ends_with("within 0.3 s, it hangs at /srv/nfs"),
            "{late}"
        );
        assert!(is_gone());

        std::fs::remove_file(&pid_file).unwrap();
        let cancel = CancellationToken::default();
        let kill = async {
            while !std::fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n')) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            cancel.cancel();
        };
        let (killed, ()) = tokio::join!(ask_sh(&hang, LIMIT, &cancel), kill);
        assert!(matches!(killed, Err(LookError::Killed)), "{killed:?}");
        let begun = Instant::now();
        while !is_gone() {
            assert!(begun.elapsed() < LIMIT, "it was left running");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
