//! An object store on this machine: a gateway that serves a directory by S3 and checks signatures. An object
//! is a file there.

use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use firn_lab::Skip;
use firn_node::{go_install, go_lacks, wait_for};
use tempfile::TempDir;

const PACKAGE: &str = "github.com/versity/versitygw/cmd/versitygw";
const VERSION: &str = "v1.8.0";
const STARTED: Duration = Duration::from_secs(20);

/// Who may use it.
pub const KEY: &str = "firn-key";
pub const SECRET: &str = "firn-secret";

/// Ends when it is dropped.
pub struct Gateway {
    pub address: SocketAddr,
    dir: TempDir,
    server: Child,
}

impl Gateway {
    /// With one bucket. Skips the trial where the gateway cannot be built.
    pub fn start(bucket: &str) -> Result<Self> {
        Self::start_with(bucket, &[])
    }

    /// The same with more options.
    pub fn start_with(bucket: &str, options: &[&str]) -> Result<Self> {
        if let Some(reason) = go_lacks() {
            return Err(Skip::new(format!("no object store is built: {reason}")).into());
        }
        let program = go_install(PACKAGE, VERSION)?;
        let dir = tempfile::tempdir()?;
        for name in ["attributes", "objects"] {
            std::fs::create_dir(dir.path().join(name))?;
        }
        std::fs::create_dir(dir.path().join("objects").join(bucket))?;
        let address = SocketAddr::from(([127, 0, 0, 1], next_port()));
        let server = Command::new(program)
            .args(["--port", &address.to_string(), "--quiet"])
            .args(options)
            .args(["posix", "--sidecar"])
            .args([dir.path().join("attributes"), dir.path().join("objects")])
            .envs([("ROOT_ACCESS_KEY", KEY), ("ROOT_SECRET_KEY", SECRET)])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start the gateway")?;
        let mut gateway = Self { address, dir, server };
        wait_for("the gateway", STARTED, || {
            if let Some(status) = gateway.server.try_wait()? {
                bail!("the gateway has ended at {address}: {status}");
            }
            Ok(TcpStream::connect(address).ok())
        })?;
        Ok(gateway)
    }

    /// The file of an object, or what has the objects with this prefix.
    pub fn file(&self, path: &str) -> PathBuf {
        self.dir.path().join("objects").join(path)
    }
}

/// A port that no other gateway of this program has, and that the kernel gives nobody who asks for any: one
/// that was free a moment ago may be a proxy's by the time the gateway has started.
fn next_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = u16::try_from(std::process::id() % 300).unwrap_or_default();
    20_000 + own * 40 + NEXT.fetch_add(1, Ordering::Relaxed) % 40
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ended = self.server.kill().and_then(|()| self.server.wait());
    }
}
