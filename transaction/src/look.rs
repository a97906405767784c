//! Looks at files that a container or a file server controls, in a process that can be killed.
//!
//! A `stat` on a dead file server never returns, and no signal ends it. A read of /proc waits for the owner
//! of the process's memory map. So the shim runs itself as a child (`/proc/self/exe look`), with a
//! [`Request`] on standard input and the answer on standard output. The child is killed at a deadline and
//! when the container is to end. A child in state D stays until the reaper gets it; the shim continues. The
//! memory that a hostile /proc costs is the child's.
//!
//! Reads are bounded in [`firn_host::bounded`], answers in [`child`].

mod child;
mod written;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use firn_host::{Problem, ProblemReport};
use firn_oci::mounts::RequiredMount;
use firn_preflight::{Inherited, OtherGpus, UnixSocket, Workload};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use firn_process::cancel::{CancellationToken, Interrupted};
use firn_process::reaper::{OutputError, Reaper};

pub use child::{ChildError, run as run_child};
pub use written::Written;
pub(crate) use written::moment;

/// The action of the shim that runs the child.
pub const ACTION: &str = "look";

/// What the child looks at.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Whether a workload can be checkpointed. Answer: [`Checked`].
    Check(Box<Workload>),
    /// Which of these places processes have in use. Answer: `Option<Vec<bool>>`, `None` if that cannot be
    /// read.
    InUse { pids: Vec<i32>, places: Vec<PathBuf> },
    /// Whether these processes have written to open files of the container's root since that time of 1970.
    /// Answer: `Option<Written>`.
    Written {
        init: i32,
        pids: Vec<i32>,
        since: Duration,
    },
    /// What a restore changes in the mounts of a spec. Answer:
    /// [`ResolvedMounts`](firn_oci::mounts::ResolvedMounts).
    Mounts {
        /// The `mounts` of the spec.
        mounts: serde_json::Value,
        bundle: PathBuf,
        required: Vec<RequiredMount>,
        /// As [`firn_oci::mounts::Needs`] has it.
        device_free: bool,
        /// Version of this node's driver.
        version: String,
        /// Directories in which its libraries may be.
        dirs: Vec<String>,
        /// firn's empty file.
        empty: PathBuf,
    },
}

impl Request {
    /// For messages.
    fn subject(&self) -> &'static str {
        match self {
            Self::Check(workload) if workload.processes.is_some() => "the container's processes",
            Self::Check(workload) if workload.capacity.is_some() => {
                "the free space for the image, and the container's mounts and standard streams"
            }
            Self::Check(_) | Self::InUse { .. } | Self::Written { .. } => {
                "the files that the container's processes have open"
            }
            Self::Mounts { .. } => "the sources of the container's bind mounts",
        }
    }
}

/// The answer to [`Request::Check`] for a workload that can be checkpointed.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    pub left_out: LeftOut,
    pub other_gpus: OtherGpus,
    /// GPUs that processes without CUDA have inherited: CRIU needs firn's plugin.
    pub inherited: Vec<Inherited>,
    /// A process may be in cuInit.
    #[serde(default)]
    pub is_starting: bool,
    /// CRIU has to make links of files whose name was deleted.
    pub link_remap: bool,
    /// Where CRIU finds the files that processes watch, in the order in which it should look.
    pub watched: Vec<PathBuf>,
    /// Unix sockets that the copy finds closed: CRIU needs firn's plugin for them, too.
    pub unix_sockets: Vec<UnixSocket>,
}

/// Processes that CRIU leaves out: the first few with their names, and their number.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    pub some: Vec<(i32, String)>,
    pub count: usize,
}

/// A refusal, or a look that failed.
#[derive(Debug, thiserror::Error, Problem)]
#[problem("FIRN-PROC", "try again; report it with containerd's log")]
pub enum LookError {
    #[error("{}", .0.message)]
    #[problem(_0.remedy())]
    Refused(ProblemReport),
    #[error("cannot see {subject} within {} s{}", limit.as_secs_f32(), at(last))]
    #[problem(
        "FIRN-LOOK-TIMEOUT",
        "see whether a file system of the container, of its mounts or of the image does not answer (dmesg, \
         state D), or raise look under [deadlines] in the configuration"
    )]
    Late {
        subject: &'static str,
        limit: Duration,
        /// What the child looked at last.
        last: String,
    },
    #[error("cannot look at {subject}: {output}")]
    Failed { subject: &'static str, output: String },
    #[error("cannot look at {subject}")]
    Run {
        subject: &'static str,
        source: OutputError,
    },
    #[error("cannot look at {subject}: the answer is not understood")]
    Answer {
        subject: &'static str,
        source: serde_json::Error,
    },
}

fn at(last: &str) -> String {
    match last {
        "" => String::new(),
        last => format!(", it hangs at {last}"),
    }
}

/// Looks, until `limit` has passed or the container is to end.
pub async fn look<T: DeserializeOwned>(
    request: &Request,
    reaper: &Reaper,
    limit: Duration,
    cancel: &CancellationToken,
) -> Result<T, Interrupted<LookError>> {
    // The program that this process runs, also if another version has been installed.
    let mut command = Command::new("/proc/self/exe");
    command.arg(ACTION).env_clear();
    run(command, request, reaper, limit, cancel).await
}

async fn run<T: DeserializeOwned>(
    mut command: Command,
    request: &Request,
    reaper: &Reaper,
    limit: Duration,
    cancel: &CancellationToken,
) -> Result<T, Interrupted<LookError>> {
    let subject = request.subject();
    let not_understood = |source| LookError::Answer { subject, source };
    let input = serde_json::to_vec(request).map_err(not_understood)?;
    let output = cancel.unless_cancelled(reaper.output_with_input(&mut command, &input, limit));
    let output = match output.await.ok_or(Interrupted::Cancelled)? {
        Ok(output) => output.printed(),
        Err(OutputError::TimedOut { limit, last, .. }) => {
            return Err(LookError::Late { subject, limit, last }.into());
        }
        Err(source) => return Err(LookError::Run { subject, source }.into()),
    };
    let printed = output.map_err(|output| LookError::Failed { subject, output })?;
    let answer: Result<T, ProblemReport> = serde_json::from_slice(&printed).map_err(not_understood)?;
    Ok(answer.map_err(LookError::Refused)?)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn request() -> Request {
        Request::InUse {
            pids: vec![1, 2],
            places: vec![],
        }
    }

    async fn run_sh(
        script: &str,
        limit: Duration,
        cancel: &CancellationToken,
    ) -> Result<Vec<i32>, Interrupted<LookError>> {
        let reaper = Reaper::start().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, &request(), &reaper, limit, cancel).await
    }

    fn failure<T>(looked: Result<T, Interrupted<LookError>>) -> LookError {
        match looked {
            Err(Interrupted::Failed(error)) => error,
            Err(Interrupted::Cancelled) => panic!("it was cancelled"),
            Ok(_) => panic!("it has succeeded"),
        }
    }

    #[tokio::test]
    async fn the_answer_of_the_child_is_returned() {
        let cancel = CancellationToken::default();
        let echo = r#"grep -q '"pids":\[1,2\]' && echo '{"Ok":[3]}'"#;
        assert_eq!(run_sh(echo, LIMIT, &cancel).await.unwrap(), [3]);
        let refuse = r#"echo '{"Err":{"code":"FIRN-PROC","message":"m","hint":"h"}}'"#;
        let refused = failure(run_sh(refuse, LIMIT, &cancel).await);
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
            let failed = failure(run_sh(broken, LIMIT, &cancel).await);
            assert_eq!(failed.code(), "FIRN-PROC", "{broken}");
        }
        let failed = run_sh("echo why >&2; exit 1", LIMIT, &cancel).await.unwrap_err();
        assert!(failed.to_string().ends_with("have open: why"), "{failed}");
    }

    #[tokio::test]
    async fn a_child_that_hangs_is_killed_at_its_deadline_and_with_its_container() {
        let dir = tempfile::tempdir().unwrap();
        let pid_file = dir.path().join("pid");
        let hang = format!(
            "echo $$ >{}; echo first >&2; echo /srv/nfs >&2; exec sleep 1000",
            pid_file.display()
        );
        let is_gone = || {
            let pid = std::fs::read_to_string(&pid_file).unwrap();
            !firn_host::procfs::is_alive(pid.trim().parse().unwrap())
        };
        let late = run_sh(&hang, Duration::from_millis(300), &CancellationToken::default()).await;
        let late = failure(late);
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
        let (killed, ()) = tokio::join!(run_sh(&hang, LIMIT, &cancel), kill);
        assert!(matches!(killed, Err(Interrupted::Cancelled)), "{killed:?}");
        let begun = Instant::now();
        while !is_gone() {
            assert!(begun.elapsed() < LIMIT, "it was left running");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
