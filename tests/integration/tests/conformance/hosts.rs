//! Two hosts of a platform: one with containerd's own shim, one with firn in its place.

use std::fs;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use firn_lab::{BUNDLES, CommandOutput, Container, GpuHost, IMAGE, STOCK, SimGpu, Tier};
use firn_node::{Cgroup, Node, Platform, wait_for};

use crate::conformance::manual::STEP;

/// Every platform that this machine can have.
pub const PLATFORMS: [Platform; 6] = [
    Platform::FORKY_V1,
    Platform::TRIXIE_V1,
    Platform::FORKY_V2,
    Platform::TRIXIE_V2,
    Platform::FORKY_SYSTEMD,
    Platform::TRIXIE_SYSTEMD,
];

/// Whether the platform's cgroups have this controller on this machine.
pub fn has_controller(platform: Platform, name: &str) -> bool {
    let unified = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .iter()
        .filter_map(|dir| fs::read_to_string(format!("{dir}/cgroup.controllers")).ok())
        .any(|controllers| {
            controllers
                .split_whitespace()
                .any(|controller| controller == name)
        });
    match platform.cgroup {
        Cgroup::V2 => unified,
        Cgroup::V1 | Cgroup::Auto => !unified,
    }
}

/// The shim on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shim {
    /// containerd's own.
    Stock,
    /// Firn under the stock shim's name.
    Firn,
}

/// A host and the shim that its containers get.
pub struct Place<'h> {
    pub host: &'h GpuHost,
    pub shim: Shim,
}

impl Place<'_> {
    /// Its node.
    pub fn node(&self) -> &Node {
        self.host.node()
    }

    /// Whether its shim is firn, for what has to be waited for in one case only.
    pub fn is_firn(&self) -> bool {
        self.shim == Shim::Firn
    }

    /// The shim's program on the node.
    pub fn program(&self) -> &'static str {
        match self.shim {
            Shim::Stock => "/usr/bin/containerd-shim-runc-v2",
            Shim::Firn => "/usr/local/bin/containerd-shim-runc-v2",
        }
    }

    /// `ctr run --detach` of a shell script.
    pub fn start(&self, id: &str, options: &[&str], script: &str) -> Result<Container<'_>> {
        let options = [&["--runtime", STOCK], options].concat();
        Container::run(self.host, id, &options, &["sh", "-c", script])
    }

    /// Waits until a container has made this file in its root directory.
    pub fn has_file(&self, id: &str, name: &str) -> Result<()> {
        let file = self.node().path(format!("{BUNDLES}/{id}/rootfs/{name}"));
        wait_for(&format!("{name} of {id}"), STEP, || {
            Ok(file.exists().then_some(()))
        })
    }

    /// Waits until the daemon has done away with a container's task whose shim was killed.
    pub fn is_cleaned_up(&self, id: &str) -> Result<()> {
        let bundle = self.node().path(format!("{BUNDLES}/{id}"));
        wait_for("the daemon to clean up", STEP, || {
            let tasks = self.host.ctr(&["tasks", "list", "--quiet"], "")?.stdout;
            let known = tasks.lines().any(|task| task == id);
            Ok((!known && !bundle.exists()).then_some(()))
        })
    }

    /// Whether a process of the node is there. A zombie that the node's init has not reaped yet is not.
    pub fn has_process(&self, pid: u32) -> bool {
        let status = self.node().read(format!("/proc/{pid}/status"));
        status.is_ok_and(|status| !status.contains("State:\tZ"))
    }

    /// `ctr run --rm` in the foreground.
    pub fn run(&self, id: &str, options: &[&str], command: &[&str]) -> Result<CommandOutput> {
        let start = ["run", "--rm", "--runtime", STOCK];
        self.host.ctr(
            &[&start[..], self.host.limits(), options, &[IMAGE, id], command].concat(),
            "",
        )
    }
}

/// The hosts of a platform, made when they are wanted, used by one test at a time.
pub struct Pair {
    platform: Platform,
    tier: Tier,
    hosts: Mutex<Option<Hosts>>,
}

struct Hosts {
    /// None where firn is compared with what a point has in writing.
    stock: Option<GpuHost>,
    firn: GpuHost,
}

impl Pair {
    pub fn new(platform: Platform, tier: Tier) -> Self {
        Self {
            platform,
            tier,
            hosts: Mutex::new(None),
        }
    }

    pub fn platform(&self) -> Platform {
        self.platform
    }

    /// Runs a test on both, or on that of firn alone. It leaves nothing there. Hosts on which it has failed
    /// are not used again.
    pub fn with(&self, test: impl FnOnce(Option<&Place<'_>>, &Place<'_>) -> Result<()>) -> Result<()> {
        let mut kept = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        // Not back in its place if the test panics.
        let hosts = match kept.take() {
            Some(hosts) => hosts,
            None => self
                .make()
                .with_context(|| format!("make hosts, {}", self.platform))?,
        };
        let stock = hosts.stock.as_ref().map(|host| Place {
            host,
            shim: Shim::Stock,
        });
        let firn = Place {
            host: &hosts.firn,
            shim: Shim::Firn,
        };
        let tested = test(stock.as_ref(), &firn);
        match tested {
            Ok(()) => *kept = Some(hosts),
            Err(_) => eprintln!("{}", firn.host.log()),
        }
        tested
    }

    fn make(&self) -> Result<Hosts> {
        let make = |shim: &str| GpuHost::for_test(self.platform, &format!("cf-{shim}"), &[SimGpu::h200(1)]);
        let stock = (self.tier == Tier::All).then(|| make("s")).transpose()?;
        let firn = make("f")?;
        firn.drop_in()?;
        Ok(Hosts { stock, firn })
    }
}
