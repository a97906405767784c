//! containerd in a node: started, killed, started again.

use std::fs;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::node::Node;
use crate::wait::wait_for;

const CONFIG: &str = "/etc/containerd/config.toml";
/// Variables of containerd's environment, where Debian's services look for them.
const ENVIRONMENT: &str = "/etc/default/containerd";
const SOCKET: &str = "/run/containerd/containerd.sock";
const PID_FILE: &str = "/run/containerd.pid";
const DEADLINE: Duration = Duration::from_secs(30);

impl Node {
    /// containerd's log in the node; one log over all its starts.
    pub const CONTAINERD_LOG: &str = "/var/log/containerd.log";

    /// Starts containerd and waits until it serves. Does nothing if it runs.
    pub fn start_containerd(&self) -> Result<()> {
        if self.containerd_pid().is_some() {
            return Ok(());
        }
        // Those of a killed daemon would be taken for the new one's.
        for stale in [SOCKET, PID_FILE] {
            let _ = fs::remove_file(self.path(stale));
        }
        let start = format!(
            "set -a; [ ! -e {ENVIRONMENT} ] || . {ENVIRONMENT}; set +a
            echo $$ >{PID_FILE}.new; mv {PID_FILE}.new {PID_FILE}; exec containerd >>{} 2>&1 </dev/null",
            Self::CONTAINERD_LOG
        );
        let started = self
            .command("setsid")
            .args(["--fork", "sh", "-c", &start])
            .status();
        ensure!(
            started.context("start containerd")?.success(),
            "start containerd in node {}",
            self.name()
        );
        wait_for("containerd's socket", DEADLINE, || {
            if UnixStream::connect(self.path(SOCKET)).is_ok() {
                return Ok(Some(()));
            }
            if self.path(PID_FILE).exists() && self.containerd_pid().is_none() {
                bail!("containerd has ended");
            }
            Ok(None)
        })
        .and_then(|()| self.run_within(DEADLINE, &["ctr", "version"]).map(drop))
        .with_context(|| {
            format!(
                "start containerd in node {}; its log ends:\n{}",
                self.name(),
                self.log_tail()
            )
        })
    }

    /// Kills containerd with SIGKILL, as a crash would, and waits until it is gone. Shims and containers
    /// stay.
    pub fn kill_containerd(&self) -> Result<()> {
        let Some(pid) = self.containerd_pid() else {
            bail!("no containerd runs in node {}", self.name())
        };
        self.run(&["kill", "-KILL", &pid.to_string()])?;
        wait_for("containerd to end", DEADLINE, || {
            Ok(self.containerd_pid().is_none().then_some(()))
        })
    }

    /// Kills containerd and starts it again.
    pub fn restart_containerd(&self) -> Result<()> {
        self.kill_containerd()?;
        self.start_containerd()
    }

    /// Pid, in the node, of the containerd that runs.
    pub fn containerd_pid(&self) -> Option<i32> {
        let pid = self.read(PID_FILE).ok()?.trim().parse().ok()?;
        let process = self.processes().into_iter().find(|process| process.pid == pid)?;
        // Before its exec it is the shell that wrote the file.
        matches!(process.command.as_str(), "containerd" | "sh").then_some(pid)
    }

    pub(crate) fn write_containerd_config(&self, cri: bool) -> Result<()> {
        fs::create_dir_all(self.path("/etc/containerd/conf.d")).context("make containerd's conf.d")?;
        self.write(CONFIG, self.record().suite.containerd_config(cri))
    }

    fn log_tail(&self) -> String {
        let log = self.read(Self::CONTAINERD_LOG).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}
