//! A directory of a node on a file system that can be made to hang: the program `stall-fs`
//! (tests/workloads/src/stall.rs).

use std::io::Read;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result};
use firn_node::wait_for;

use crate::GpuHost;

const STARTED: Duration = Duration::from_secs(10);

/// The mounted directory. When it is dropped, everything that hangs fails and the mount goes.
pub struct StallFs<'h> {
    host: &'h GpuHost,
    point: String,
    server: Child,
}

impl<'h> StallFs<'h> {
    /// Mounts one at `point`, a path of the node. What it shows lies in `POINT.lower`.
    pub fn mount(host: &'h GpuHost, point: &str) -> Result<Self> {
        let (lower, control) = (format!("{point}.lower"), format!("{point}.stall"));
        host.node().run(&["mkdir", "-p", point, &lower])?;
        host.node().write(&control, "")?;
        let server = host.node().spawn(&["stall-fs", &lower, point, &control])?;
        let fs = Self {
            host,
            point: point.to_owned(),
            server,
        };
        wait_for("the file system that can hang", STARTED, || {
            Ok(host.node().run(&["mountpoint", "--quiet", point]).ok())
        })?;
        Ok(fs)
    }

    /// Lets these operations hang from now on: `&["unlink", "stat"]`. Those that are not named continue.
    pub fn stall(&self, operations: &[&str]) -> Result<()> {
        // Replaced: the server must not read half of it.
        let new = self.host.node().path(format!("{}.new", self.point));
        std::fs::write(&new, operations.join(" ")).context("write what hangs")?;
        let control = self.host.node().path(format!("{}.stall", self.point));
        std::fs::rename(new, control).context("write what hangs")
    }

    /// Lets everything continue.
    pub fn go_on(&self) -> Result<()> {
        self.stall(&[])
    }
}

impl Drop for StallFs<'_> {
    fn drop(&mut self) {
        // Whoever uses it then sees a broken connection and not why.
        if let Ok(Some(status)) = self.server.try_wait() {
            let mut text = String::new();
            let _read = self
                .server
                .stderr
                .take()
                .map(|mut errors| errors.read_to_string(&mut text));
            eprintln!("stall-fs of {} ended by itself: {status}: {text}", self.point);
        }
        let _ = self.server.kill();
        let _ = self.server.wait();
        let _ = self.host.node().run(&["umount", "--lazy", &self.point]);
    }
}
