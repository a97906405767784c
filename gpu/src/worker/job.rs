//! The file of a launch job, by which the driver knows the processes that it checkpoints together.
//!
//! What is in it is NVIDIA's secret. Its `cuda-checkpoint --launch-job PROGRAM` makes one in a memfd, names it in
//! `CUDA_CHECKPOINT_JOB_FILE` and starts the program; a copy of it at another path serves as well. So the tool is let
//! start this program, which keeps what it finds. A tool or driver that knows no launch jobs makes no file.
//!
//! All of this is documented only: no driver that knows launch jobs was there.

use std::env;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::chain;
use super::node::{Node, Refusal};
use crate::plan::branch;
use crate::protocol::Reply;

/// The variable that names it.
pub(super) const VARIABLE: &str = "CUDA_CHECKPOINT_JOB_FILE";

/// The command by which the tool starts this program.
pub(super) const KEEP: &str = "keep-job";

/// First driver branch that gives back memory that the processes of a job share by cudaIpc.
const FIRST_BRANCH: u32 = 610;

/// As with a memfd, whoever has it can write it: processes of the container that are another user's, too. The bundle that it
/// lies in is root's alone.
const MODE: u32 = 0o666;

/// How long the tool may take. It starts the driver once.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// More than any such file has.
const MOST_BYTES: u64 = 1 << 20;

/// Why there is no launch job.
#[derive(Debug, thiserror::Error)]
pub(super) enum JobRefusal<'a> {
    #[error("{}", chain(.0))]
    Node(Refusal<'a>),
    #[error(
        "driver {version} does not give back memory that processes share; those from {FIRST_BRANCH} on are documented to"
    )]
    Driver { version: String },
    #[error("cannot run {tool}")]
    Run {
        tool: String,
        #[source]
        source: io::Error,
    },
    #[error("{tool} --launch-job has failed: {said}")]
    Tool { tool: String, said: String },
    #[error("{tool} --launch-job has not ended within {} s", limit.as_secs_f32())]
    Hangs { tool: String, limit: Duration },
    #[error("{tool} --launch-job has made no file")]
    NoFile { tool: String },
}

impl JobRefusal<'_> {
    fn hint(&self) -> &'static str {
        match self {
            Self::Node(refusal) => refusal.hint(),
            Self::Driver { .. } => {
                "leave the annotation firn.dev/ipc=job out; ranks of NCCL can be checkpointed over sockets: firn.dev/nccl=sockets"
            }
            Self::Run { .. } | Self::Tool { .. } | Self::Hangs { .. } | Self::NoFile { .. } => {
                "launch-jobs under [create] has to name the cuda-checkpoint of the running driver"
            }
        }
    }

    /// As the shim reads it.
    pub(super) fn reply(&self) -> Reply {
        Reply::Failed {
            message: chain(self),
            hint: self.hint().to_owned(),
        }
    }
}

/// Makes the file of a new job at `file`.
pub(super) fn make<'a>(
    node: &'a Node,
    tool: &Path,
    file: &Path,
    limit: Duration,
) -> Result<(), JobRefusal<'a>> {
    node.checkpointer().map_err(JobRefusal::Node)?;
    let version = node.inventory().map_err(JobRefusal::Node)?.driver_version;
    if branch(&version).is_none_or(|branch| branch < FIRST_BRANCH) {
        return Err(JobRefusal::Driver { version });
    }
    let name = || tool.display().to_string();
    let run = |source| JobRefusal::Run { tool: name(), source };
    let mut command = Command::new(tool);
    command
        .arg("--launch-job")
        .arg(env::current_exe().map_err(run)?)
        .arg(KEEP)
        .arg(file)
        .env_clear();
    for name in ["PATH", "LD_LIBRARY_PATH"] {
        if let Some(value) = env::var_os(name) {
            command.env(name, value);
        }
    }
    let Some(output) = output_within(limit, &mut command).map_err(run)? else {
        return Err(JobRefusal::Hangs { tool: name(), limit });
    };
    if !output.status.success() {
        return Err(JobRefusal::Tool {
            tool: name(),
            said: last_line(&output.stderr, &output.stdout),
        });
    }
    match file.metadata() {
        Ok(metadata) if metadata.len() > 0 => Ok(()),
        _ => Err(JobRefusal::NoFile { tool: name() }),
    }
}

/// What a program that ends in time has said; one that does not is killed with all that it has started.
fn output_within(limit: Duration, command: &mut Command) -> io::Result<Option<Output>> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let child = command.spawn()?;
    let group = i32::try_from(child.id())
        .map(Pid::from_raw)
        .map_err(io::Error::other)?;
    let (ended, end) = mpsc::channel();
    // Gone when it ends, or with this process.
    thread::spawn(move || ended.send(child.wait_with_output()));
    let output = end.recv_timeout(limit);
    // What it has left is nobody's; most have left nothing.
    let _gone = killpg(group, Signal::SIGKILL);
    output.ok().transpose()
}

/// Keeps the file of the job that this program was started in.
pub(super) fn keep(job: Option<&OsStr>, file: &Path) -> io::Result<()> {
    let path = job.ok_or_else(|| io::Error::other("no launch job was made"))?;
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(io::Error::other("the file of the launch job is too large"));
    }
    std::fs::write(file, bytes)?;
    std::fs::set_permissions(file, Permissions::from_mode(MODE))
}

/// What a program that failed has said last.
fn last_line(stderr: &[u8], stdout: &[u8]) -> String {
    let line = |text: &[u8]| {
        let text = String::from_utf8_lossy(text);
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty())?;
        Some(last.chars().take(200).collect())
    };
    line(stderr)
        .or_else(|| line(stdout))
        .unwrap_or_else(|| "it says nothing".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use tempfile::TempDir;

    use super::super::tests::fake::Fake;
    use super::*;

    /// A stand-in for NVIDIA's tool. What it is called with is documented, what the driver makes of a job is not tried here.
    fn tool(script: &str) -> (TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cuda-checkpoint");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        (dir, path)
    }

    fn refused(version: &'static str, script: &str) -> String {
        let (dir, tool) = tool(script);
        let fake = Arc::new(Fake::of_version(version));
        let node = fake.node();
        let refusal = make(&node, &tool, &dir.path().join("job"), Duration::from_secs(20)).unwrap_err();
        assert!(!tool.with_extension("ran").exists(), "the tool was run");
        let Reply::Failed { message, hint } = refusal.reply() else {
            panic!("no refusal")
        };
        format!("{message}. hint: {hint}")
    }

    #[test]
    fn drivers_that_are_not_documented_to_know_launch_jobs_are_refused_and_the_tool_is_not_run() {
        for version in ["580.159.04", "609.1", "unknown"] {
            let said = refused(version, "touch $0.ran");
            assert!(
                said.starts_with(&format!("driver {version} does not give back")),
                "{said}"
            );
            assert!(said.contains("firn.dev/nccl=sockets"), "{said}");
        }
    }

    #[test]
    fn a_tool_that_makes_no_job_is_named_with_what_it_said() {
        let said = refused("610.57.04", "echo 'unknown option: --launch-job' >&2; exit 1");
        assert!(
            said.contains("cuda-checkpoint --launch-job has failed: unknown option: --launch-job"),
            "{said}"
        );
        assert!(said.contains("launch-jobs under [create]"), "{said}");
        let said = refused("610.57.04", "exit 0");
        assert!(said.contains("has made no file"), "{said}");
        let node = Arc::new(Fake::of_version("610.57.04"));
        let node = node.node();
        let nowhere = make(&node, Path::new("/nonexistent"), Path::new("/nonexistent"), LIMIT);
        assert!(matches!(nowhere, Err(JobRefusal::Run { .. })));
    }

    #[test]
    fn the_tool_starts_this_program_to_keep_the_file() {
        let (dir, tool) = tool(r#"[ "$1 $3" = "--launch-job keep-job" ] && printf x > "$4""#);
        let (fake, file) = (Arc::new(Fake::of_version("610.57.04")), dir.path().join("job"));
        make(&fake.node(), &tool, &file, LIMIT).unwrap();
        assert_eq!(std::fs::read(file).unwrap(), b"x");
    }

    #[test]
    fn a_tool_that_hangs_is_killed_with_what_it_has_started() {
        let (dir, tool) = tool("sleep 1000 & echo $! > $4.pid; mv $4.pid $4.child; wait");
        let (fake, file) = (Arc::new(Fake::of_version("610.57.04")), dir.path().join("job"));
        let begun = Instant::now();
        let refused = make(&fake.node(), &tool, &file, Duration::from_secs(10))
            .unwrap_err()
            .to_string();
        assert!(
            refused.ends_with("--launch-job has not ended within 10 s"),
            "{refused}"
        );
        let child = std::fs::read_to_string(dir.path().join("job.child")).unwrap();
        let status = format!("/proc/{}/stat", child.trim());
        // A zombie until whoever adopts it looks.
        while std::fs::read_to_string(&status).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(begun.elapsed() < Duration::from_secs(40), "its child lives on");
            thread::yield_now();
        }
    }

    #[test]
    fn what_the_job_holds_is_kept_for_every_user_of_the_container() {
        let dir = tempfile::tempdir().unwrap();
        let (job, file) = (dir.path().join("of-the-tool"), dir.path().join("kept"));
        std::fs::write(&job, "opaque").unwrap();
        keep(Some(job.as_os_str()), &file).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"opaque");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o666);
        std::fs::write(&job, vec![0; (1 << 20) + 1]).unwrap();
        assert!(
            keep(Some(job.as_os_str()), &file).is_err(),
            "a file that is too large"
        );
        assert!(keep(None, &file).is_err(), "no job");
    }

    #[test]
    fn the_last_line_is_what_a_program_has_said() {
        assert_eq!(last_line(b"a\nb\n\n", b"c"), "b");
        assert_eq!(last_line(b"\n", b"c\n"), "c");
        assert_eq!(last_line(b"", b""), "it says nothing");
    }
}
