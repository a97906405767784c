//! A running node: how it is started, reached and stopped.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::cgroup::{Cgroup, CgroupMode, Hierarchies};
use crate::host;
use crate::record::{ProcessId, Record, boot_id};
use crate::store::Store;
use crate::suite::Suite;
use crate::sweep;
use crate::wait::wait_for;

const GUARD: &str = include_str!("guard.sh");
const INIT: &str = include_str!("init.sh");
const BOOT_DEADLINE: Duration = Duration::from_secs(30);
/// Major number of loop devices, and how many a node can open.
const LOOP_MAJOR: u64 = 7;
const LOOPS: u64 = 1024;

/// How a node is to be made.
#[derive(Clone, Debug)]
pub struct Builder {
    suite: Suite,
    name: Option<String>,
    cgroup: Cgroup,
    containerd: bool,
    cri: bool,
    disk: bool,
    systemd: bool,
    packages: &'static [&'static str],
}

impl Builder {
    /// Name and hostname; by default one that is free.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The cgroup version.
    pub fn cgroup(mut self, cgroup: Cgroup) -> Self {
        self.cgroup = cgroup;
        self
    }

    /// Whether containerd is started (it is by default).
    pub fn containerd(mut self, containerd: bool) -> Self {
        self.containerd = containerd;
        self
    }

    /// Whether containerd has its CRI plugins (it does not by default: it starts faster without).
    pub fn cri(mut self, cri: bool) -> Self {
        self.cri = cri;
        self
    }

    /// Whether the node's files and containerd's data lie on the disk of the target directory instead of in
    /// memory.
    pub fn disk(mut self, disk: bool) -> Self {
        self.disk = disk;
        self
    }

    /// Whether systemd is the node's init, which can then make cgroups for containers. Of cgroup v2 only.
    pub fn systemd(mut self, systemd: bool) -> Self {
        self.systemd = systemd;
        self
    }

    /// Packages of Debian in addition to those of every node. The root with them is cached, too.
    pub fn packages(mut self, packages: &'static [&'static str]) -> Self {
        self.packages = packages;
        self
    }

    /// Starts the node. Crashed ones are removed first; the suite's root is made if it is not cached.
    pub fn start(self) -> Result<Node> {
        let store = Store::open()?;
        store.clean(false)?;
        let root = store.root(self.suite, self.packages)?;
        let hierarchies = Hierarchies::read()?;
        let cgroup = hierarchies.select(self.cgroup)?;
        ensure!(
            !self.systemd || cgroup == CgroupMode::V2,
            "systemd knows no cgroup v1 any more\nhint: ask for v2"
        );
        let name = self.name.clone().unwrap_or_else(|| free_name(self.suite));
        let (maker, boot) = (ProcessId::current()?, boot_id()?);
        let record = |dir| Record {
            name: name.clone(),
            suite: self.suite,
            cgroup,
            maker,
            left: false,
            // Another checkout may have a node of the same name.
            cgroups: hierarchies.plan(&format!("{name}-{}", store.tag()), cgroup),
            boot,
            dir,
            init: None,
        };
        // From here on dropping the node removes what was made.
        let mut node = Node {
            record: store.reserve(record, &name)?,
            owner: Some(Owner::default()),
        };
        node.boot(&root, self.disk, self.systemd)
            .with_context(|| format!("start node {name}"))?;
        node.write_containerd_config(self.cri)?;
        if self.containerd {
            node.start_containerd()?;
        }
        Ok(node)
    }
}

fn free_name(suite: Suite) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!(
        "{suite}-{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    )
}

/// A running node. Dropping the one that started it stops it; dropping one that was found does nothing.
#[derive(Debug)]
pub struct Node {
    record: Record,
    owner: Option<Owner>,
}

/// Held by the `Node` that started it: the guard, whose pipe ends the node when this process dies.
#[derive(Debug, Default)]
struct Owner {
    guard: Option<(Child, ChildStdin)>,
}

impl Node {
    /// A node to be made from this suite.
    pub fn builder(suite: Suite) -> Builder {
        Builder {
            suite,
            name: None,
            cgroup: Cgroup::Auto,
            containerd: true,
            cri: false,
            disk: false,
            systemd: false,
            packages: &[],
        }
    }

    /// The running node of this name, whoever started it.
    pub fn find(name: &str) -> Result<Self> {
        match Store::open()?.node(name)? {
            Some(record) if record.pid().is_some() => Ok(Self { record, owner: None }),
            _ => bail!(
                "no node called {name} runs\nhint: cargo xtask node list; \
                 a crashed one goes with `cargo xtask node clean`"
            ),
        }
    }

    /// Its name, which is also its hostname.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// What the host has recorded of it.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Pid of its init on the host.
    pub fn pid(&self) -> i32 {
        // Present since `boot` or `find`; 0 names no process, so commands on a dead node fail.
        self.record.init.map_or(0, |init| init.process.pid)
    }

    /// Its root as the host can reach it.
    pub fn root(&self) -> PathBuf {
        format!("/proc/{}/root", self.pid()).into()
    }

    /// A path of the node as the host can reach it.
    ///
    /// Absolute symbolic links on the way lead to the *host's* files: `/run/x`, not `/var/run/x`.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.root().join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// Writes a file of the node, with its directories.
    pub fn write(&self, inside: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
        let path = self.path(inside);
        make_parent(&path)?;
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))
    }

    /// Reads a file of the node.
    pub fn read(&self, inside: impl AsRef<Path>) -> Result<String> {
        let path = self.path(inside);
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    }

    /// Copies a file of the host into the node. One that is there, even running, is replaced.
    pub fn install(&self, host_file: impl AsRef<Path>, inside: impl AsRef<Path>, mode: u32) -> Result<()> {
        let (from, to) = (host_file.as_ref(), self.path(inside));
        let new = to.with_added_extension("new");
        make_parent(&to)?;
        let failed = || format!("install {} as {}", from.display(), to.display());
        // By a program: children that other threads start would inherit a descriptor that is open for writing
        // here, and until they execute something nobody could execute the file ("Text file busy").
        let status = Command::new("install")
            .args(["--no-target-directory", "--mode", &format!("{mode:o}")])
            .args([from, &new])
            .status()
            .with_context(failed)?;
        ensure!(status.success(), "{}: {status}", failed());
        fs::rename(&new, &to).with_context(failed)
    }

    /// Lets the node run on after this process, also when this value is dropped. `Node::find` gets it back.
    pub fn leave(&mut self) -> Result<()> {
        // Order matters: if this process dies in between, the guard ends the node and its record shows
        // "crashed".
        self.record.left = true;
        self.record.write()?;
        if let Some(Owner {
            guard: Some((mut guard, mut pipe)),
        }) = self.owner.take()
        {
            pipe.write_all(b"leave\n")
                .context("order the guard to leave the node")?;
            guard.wait().context("wait for the guard")?;
        }
        Ok(())
    }

    /// Ends everything in the node and removes all of it.
    pub fn stop(mut self) -> Result<()> {
        self.remove()
    }

    fn remove(&mut self) -> Result<()> {
        let owner = self.owner.take();
        sweep::remove(&self.record)?;
        if let Some(Owner {
            guard: Some((mut guard, pipe)),
        }) = owner
        {
            drop(pipe);
            guard.wait().context("wait for the guard")?;
        }
        Ok(())
    }

    fn boot(&mut self, root: &Path, disk: bool, systemd: bool) -> Result<()> {
        let dir = &self.record.dir;
        self.record.cgroups.create()?;
        fs::create_dir_all(dir.join(if disk { "fs/disk" } else { "fs" }))?;
        fs::write(dir.join("guard.sh"), GUARD)?;
        fs::write(dir.join("init.sh"), INIT)?;
        if systemd {
            fs::write(dir.join("systemd"), "")?;
        }
        let log = dir.join("boot.log");

        let mut command = Command::new("sh");
        command
            .arg(dir.join("guard.sh"))
            .arg(dir)
            .arg(root)
            .arg(self.record.cgroup.as_str());
        command
            .arg(self.record.cgroups.leaf().unwrap_or(Path::new("-")))
            .args(self.record.cgroups.dirs());
        // Its own process group: a Ctrl-C meant for the maker must not take the guard first.
        command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?);
        let mut guard = command.spawn().context("start the guard")?;
        let (Some(pipe), Some(output)) = (guard.stdin.take(), guard.stdout.take()) else {
            bail!("the guard has no pipes");
        };
        self.owner = Some(Owner {
            guard: Some((guard, pipe)),
        });
        let output = first_line(output, BOOT_DEADLINE);
        self.record.read_init();
        match output.as_deref() {
            Some("ready\n") if self.record.init.is_some() => {}
            output => {
                let log = fs::read_to_string(log).unwrap_or_default();
                bail!(
                    "its first process did not get through: {}{log}",
                    output.unwrap_or("no answer in time\n")
                )
            }
        }
        make_loops(&self.path("/dev"))?;
        if systemd {
            let target = ["systemctl", "is-active", "--quiet", "firn-node.target"];
            wait_for("systemd", BOOT_DEADLINE, || Ok(self.run(&target).ok().map(drop)))?;
        }
        Ok(())
    }
}

impl Drop for Node {
    /// The last resort for tests that panic; [`Node::stop`] returns what went wrong.
    fn drop(&mut self) {
        if self.owner.is_some()
            && let Err(error) = self.remove()
        {
            host::progress(&format!("{error:#}"));
        }
    }
}

/// Makes nodes of loop devices in `dev`: those that the kernel adds later appear in the host's /dev only. All
/// nodes share the host's devices, so a number may be as high as there are simulated GPUs in all suites.
fn make_loops(dev: &Path) -> Result<()> {
    if !dev.join("loop-control").exists() {
        return Ok(());
    }
    for number in 0..LOOPS {
        let path = dev.join(format!("loop{number}"));
        mknod(
            &path,
            SFlag::S_IFBLK,
            Mode::from_bits_truncate(0o660),
            makedev(LOOP_MAJOR, number),
        )
        .with_context(|| format!("make {}", path.display()))?;
    }
    Ok(())
}

/// The first line that comes out of the pipe, empty at its end; `None` if neither comes in time.
fn first_line(pipe: ChildStdout, limit: Duration) -> Option<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        // An error leaves the line short, which the receiver sees.
        let _ = BufReader::new(pipe).read_line(&mut line);
        let _ = send.send(line);
    });
    receive.recv_timeout(limit).ok()
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))
}
