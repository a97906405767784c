//! A node with simulated GPUs and firn installed.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use firn_node::{Builder, Cgroup, CgroupMode, Image, Node, Platform, Process, Suite, wait_for};
use serde_json::Value;

use crate::{Built, FIRN, IMAGE, STOCK, SimGpu, Skip, imported};

/// Driver version of a node unless a test asks for another.
pub const DRIVER: &str = "580.159.04";

/// The image of the containers.
fn image(built: &Built) -> Image {
    Image::new(IMAGE)
        .program(built.program("gpu-counter"), "/bin/gpu-counter")
        .program(built.program("gpu-sample"), "/bin/gpu-sample")
        .program(built.program("unix-talk"), "/bin/unix-talk")
        .program(built.program("device-free"), "/bin/device-free")
        .program(built.program("memory-hog"), "/bin/memory-hog")
        .program(built.program("objects"), "/bin/objects")
}

/// Where the shim is on a node.
pub(crate) const SHIM: &str = "/usr/local/bin/containerd-shim-firn-v2";

/// The CDI specification of the node's GPUs.
const CDI: &str = "/etc/cdi/nvidia.json";

/// Where the built libraries of the simulated driver are put before they are installed.
const LIBRARIES: &str = "/tmp/simgpu";

/// Where the watcher notes what runc is called for.
const VERBS: &str = "/run/runc-verbs";

const WATCHER: &str = include_str!("watcher.sh");

/// firn's configuration on a node.
const CONFIG: &str = "/etc/firn/config.toml";

/// How much of containerd's log is shown for a test that failed.
const SHOWN: usize = 80;

/// How long a node may take to be rid of what a container had.
const GONE: Duration = Duration::from_secs(30);

/// A node with firn, simulated GPUs and the test image. Ends when it is dropped.
pub struct GpuHost {
    node: Node,
    gpus: Vec<SimGpu>,
    /// NVLinks between them, `0-1=4`.
    nvlinks: Vec<String>,
    /// Whether the kernel has picked other numbers for UVM's nodes than on other nodes.
    other_majors: bool,
}

impl GpuHost {
    /// Starts a node for a test, with these GPUs. Its name has the platform and this process in it, so that
    /// other trials and other runs of the same test do not get in its way.
    pub fn for_test(platform: Platform, name: &str, gpus: &[SimGpu]) -> Result<Self> {
        let name = test_name(platform, name);
        let node = platform.node().name(&name);
        Self::set_up_on(node, Built::for_tests()?, gpus, DRIVER)
    }

    /// As [`GpuHost::for_test`], with packages of Debian that other nodes have not.
    pub fn for_test_with(
        platform: Platform,
        name: &str,
        gpus: &[SimGpu],
        packages: &'static [&'static str],
    ) -> Result<Self> {
        let name = test_name(platform, name);
        let node = platform.node().name(&name).packages(packages);
        Self::set_up_on(node, Built::for_tests()?, gpus, DRIVER)
    }

    /// Starts a node with these GPUs.
    pub fn start(built: &Built, suite: Suite, name: &str, gpus: &[SimGpu]) -> Result<Self> {
        Self::start_with(built, suite, name, gpus, Cgroup::Auto, DRIVER)
    }

    /// As [`GpuHost::start`], with containerd's data on the disk of the target directory.
    pub fn start_on_disk(built: &Built, suite: Suite, name: &str, gpus: &[SimGpu]) -> Result<Self> {
        let node = Node::builder(suite).name(name).disk(true);
        Self::set_up_on(node, built, gpus, DRIVER)
    }

    /// As [`GpuHost::start`], with a cgroup version and a driver version.
    pub fn start_with(
        built: &Built,
        suite: Suite,
        name: &str,
        gpus: &[SimGpu],
        cgroup: Cgroup,
        driver: &str,
    ) -> Result<Self> {
        let node = Node::builder(suite).name(name).cgroup(cgroup);
        Self::set_up_on(node, built, gpus, driver)
    }

    fn set_up_on(node: Builder, built: &Built, gpus: &[SimGpu], driver: &str) -> Result<Self> {
        let host = Self {
            node: node.containerd(false).start()?,
            gpus: gpus.to_vec(),
            nvlinks: Vec::new(),
            other_majors: false,
        };
        host.set_up(built, driver)
            .with_context(|| format!("set up node {}", host.node.name()))?;
        Ok(host)
    }

    /// Starts a node for a test whose containerd serves Kubernetes too, with these GPUs. `configure` adds to
    /// containerd's configuration before it starts.
    pub fn for_cri(
        platform: Platform,
        name: &str,
        gpus: &[SimGpu],
        configure: impl FnOnce(&Node) -> Result<()>,
    ) -> Result<Self> {
        let name = test_name(platform, name);
        let node = platform.node().name(&name).cri(true).containerd(false);
        let host = Self {
            node: node.start()?,
            gpus: gpus.to_vec(),
            nvlinks: Vec::new(),
            other_majors: false,
        };
        let built = Built::for_tests()?;
        // Order matters: at its start containerd asks the shims what they can do.
        host.install(built, DRIVER)
            .and_then(|()| configure(&host.node))
            .and_then(|()| host.node.start_containerd())
            .with_context(|| format!("set up node {name}"))?;
        Ok(host)
    }

    fn set_up(&self, built: &Built, driver: &str) -> Result<()> {
        self.install(built, driver)?;
        imported::start_containerd_with(&self.node, &image(built))
    }

    /// Gives the image of containers that begin from now on labels.
    pub fn label_image(&self, labels: &[(&str, &str)]) -> Result<()> {
        let labelled = |image: Image, (name, value): &(&str, &str)| image.label(name, value);
        let image = labels.iter().fold(image(Built::for_tests()?), labelled);
        image.import(&self.node)
    }

    /// Installs firn and the simulated GPUs.
    fn install(&self, built: &Built, driver: &str) -> Result<()> {
        let node = &self.node;
        node.install(built.shim(), SHIM, 0o755)?;
        for program in [
            "firn-gpu",
            "firn-hook",
            "firn",
            "firn-runc",
            "libfirn_criu.so",
            "libfirn_cuda.so",
            "simgpu",
            "cuda-step",
            "stall-fs",
            "unix-talk",
        ] {
            node.install(built.program(program), format!("/usr/local/bin/{program}"), 0o755)?;
        }
        for library in ["libcuda.so", "libnvidia_ml.so"] {
            node.install(built.program(library), format!("{LIBRARIES}/{library}"), 0o755)?;
        }
        self.plug_in(driver)
    }

    /// Makes its GPUs and installs this version of their driver.
    fn plug_in(&self, driver: &str) -> Result<()> {
        let node = &self.node;
        node.run(&["simgpu", "install", "--from", LIBRARIES, "--driver", driver])?;
        let mut setup: Vec<String> = ["simgpu", "setup", "--driver", driver].map(String::from).into();
        for (place, gpu) in (0..).zip(&self.gpus) {
            let SimGpu { uuid, name, mib, .. } = gpu;
            let mig = if gpu.mig { "on" } else { "off" };
            let minor = gpu.minor.unwrap_or(place);
            let pci = gpu.pci.as_ref().map(|pci| format!(",pci={pci}"));
            setup.push("--gpu".to_owned());
            setup.push(format!(
                "uuid={uuid},name={name},mem={mib}M,minor={minor},mig={mig}{}",
                pci.unwrap_or_default()
            ));
        }
        if self.other_majors {
            setup.push("--other-majors".to_owned());
        }
        for links in &self.nvlinks {
            setup.extend(["--nvlinks".to_owned(), links.clone()]);
        }
        node.run(&setup)?;
        let cdi = node.run(&["simgpu", "cdi"])?.stdout;
        node.write(CDI, cdi)
    }

    /// Puts other GPUs into the node, which must be idle, with this version of their driver.
    pub fn replace_gpus(&mut self, gpus: &[SimGpu], driver: &str) -> Result<()> {
        self.node.run(&["simgpu", "teardown"])?;
        self.gpus = gpus.to_vec();
        self.plug_in(driver)
    }

    /// Gives the nodes whose numbers the kernel picks others, as a machine has that has loaded its drivers in
    /// another order. The node must be idle.
    pub fn renumber(&mut self) -> Result<()> {
        self.other_majors = true;
        self.replace_gpus(&self.gpus.clone(), DRIVER)
    }

    /// Joins GPUs of the node, which must be idle, by NVLinks: `0-1=4` for four between the first and the
    /// second.
    pub fn join_gpus(&mut self, nvlinks: &[&str]) -> Result<()> {
        self.nvlinks = nvlinks.iter().map(ToString::to_string).collect();
        self.replace_gpus(&self.gpus.clone(), DRIVER)
    }

    /// Lets the node run on after this program.
    pub fn leave(mut self) -> Result<()> {
        self.node.leave()
    }

    /// The node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Its Debian suite.
    pub fn suite(&self) -> Suite {
        self.node.record().suite
    }

    /// Its GPUs.
    pub fn gpus(&self) -> &[SimGpu] {
        &self.gpus
    }

    /// UUIDs of its GPUs.
    pub fn uuids(&self) -> Vec<String> {
        self.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
    }

    /// Options of `ctr run` that grant these GPUs (`0`, `all`, a UUID).
    ///
    /// ctr 1.7 knows no CDI: its user names the device nodes and libraries, which are read off the CDI
    /// specification.
    pub fn ctr_gpu_options(&self, gpus: &[&str]) -> Result<Vec<String>> {
        if self.suite().ctr_knows_cdi() {
            let devices = gpus.iter().map(|gpu| format!("nvidia.com/gpu={gpu}"));
            return Ok(devices
                .flat_map(|device| ["--device".to_owned(), device])
                .collect());
        }
        let cdi: Value = serde_json::from_str(&self.node.read(CDI)?).context("read the CDI specification")?;
        let known = cdi["devices"]
            .as_array()
            .context("no devices in the CDI specification")?;
        let mut edits = Vec::new();
        for gpu in gpus {
            let device = known.iter().find(|device| device["name"] == *gpu);
            edits.push(
                &device.with_context(|| format!("no GPU {gpu} in the CDI specification"))?["containerEdits"],
            );
        }
        if !gpus.is_empty() {
            edits.push(&cdi["containerEdits"]);
        }
        Ok(edits.into_iter().flat_map(options_of_edits).collect())
    }

    /// Options of `ctr run` that every container on this node needs: a v2 node cannot have a controller that
    /// one of the host's v1 hierarchies holds. Its containers then ask for no share of the CPU.
    pub fn limits(&self) -> &'static [&'static str] {
        let v2 = self.node.record().cgroup == CgroupMode::V2;
        if v2 && !self.has_controller("cpu") {
            &["--cpu-shares", "0"]
        } else {
            &[]
        }
    }

    /// Whether the node's unified hierarchy has this controller.
    pub fn has_controller(&self, name: &str) -> bool {
        let controllers = self.node.read("/sys/fs/cgroup/cgroup.controllers");
        controllers.is_ok_and(|all| all.split_whitespace().any(|one| one == name))
    }

    /// Skips the trial where a test cannot change the device rules of a cgroup.
    pub fn needs_device_rules(&self) -> Result<()> {
        match self.node.record().cgroup {
            CgroupMode::V1 => Ok(()),
            CgroupMode::V2 => {
                Err(Skip::new("device rules of cgroup v2 are a program that a test cannot change").into())
            }
        }
    }

    /// Writes firn's configuration.
    pub fn configure(&self, text: &str) -> Result<()> {
        self.node.write(CONFIG, text)
    }

    /// The directory of the node's store, as the configuration names it.
    pub fn store(&self) -> Result<PathBuf> {
        Ok(self.node.path(self.configured("store")?.unwrap_or_default()))
    }

    /// The file of its key.
    pub fn store_key(&self) -> Result<Option<PathBuf>> {
        Ok(self.configured("store-key")?.map(|path| self.node.path(path)))
    }

    fn configured(&self, key: &str) -> Result<Option<String>> {
        let config = self.node.read(CONFIG).unwrap_or_default();
        let value = |line: &str| Some(line.strip_prefix(key)?.strip_prefix(" = ")?.to_owned());
        let value = config.lines().find_map(value);
        Ok(value.map(|value| serde_json::from_str(&value)).transpose()?)
    }

    /// How many processes have this name.
    pub fn processes(&self, name: &str) -> usize {
        let processes = self.node.processes().into_iter();
        processes.filter(|process| process.command == name).count()
    }

    /// Waits until nothing runs of containers that clients of firn-runc have removed.
    pub fn nothing_of_runc_runs(&self, limit: Duration) -> Result<()> {
        let left = ["conmon", "gpu-counter", "firn-runc", "firn-gpu", "criu"];
        wait_for("the end of everything", limit, || {
            Ok(left.iter().all(|name| self.processes(name) == 0).then_some(()))
        })
    }

    /// Disturbs calls of the simulated driver: arguments of `simgpu fault add`.
    pub fn fault(&self, arguments: &[&str]) -> Result<()> {
        self.node
            .run(&[&["simgpu", "fault", "add"], arguments].concat())
            .map(drop)
    }

    /// Ends all disturbances.
    pub fn no_faults(&self) -> Result<()> {
        self.node.run(&["simgpu", "fault", "clear"]).map(drop)
    }

    /// Installs the shim also under the name of containerd's own, so that `io.containerd.runc.v2` is firn.
    /// For clients that send checkpoint options to that runtime alone: ctr 1.7, nerdctl, docker.
    pub fn drop_in(&self) -> Result<()> {
        let (firn, stock) = (self.node.path(SHIM), "/usr/local/bin/containerd-shim-runc-v2");
        self.node.install(firn, stock, 0o755)?;
        // containerd remembers where it has found a shim.
        self.node.restart_containerd()
    }

    /// The name under which ctr sends checkpoint options to firn. Where that is the stock runtime's, firn is
    /// installed under it.
    pub fn runtime_for_options(&self) -> Result<&'static str> {
        if self.suite().ctr_sends_checkpoint_options() {
            return Ok(FIRN);
        }
        self.drop_in()?;
        Ok(STOCK)
    }

    /// The shims of the node.
    pub fn shims(&self) -> impl Iterator<Item = Process> {
        let processes = self.node.processes().into_iter();
        processes.filter(|process| process.command.starts_with("containerd-shim"))
    }

    /// The shim that was started for a container.
    pub fn shim_of(&self, id: &str) -> Result<Process> {
        let is_its = |args: &[String]| args.windows(2).any(|pair| pair[0] == "-id" && pair[1] == id);
        let mut shims = self.shims();
        shims
            .find(|shim| is_its(&shim.args))
            .with_context(|| format!("{id} has no shim"))
    }

    /// Kills the shim of a container, as the OOM killer would.
    pub fn kill_shim(&self, id: &str) -> Result<()> {
        let pid = self.shim_of(id)?.pid.to_string();
        self.node.run(&["kill", "-KILL", &pid]).map(drop)
    }

    /// From now on notes what runc is called for.
    pub fn watch_runc(&self) -> Result<()> {
        self.replace_runc(WATCHER)?;
        self.node.write(VERBS, "")
    }

    /// Puts a script before the node's runc, which is /usr/sbin/runc, in PATH.
    pub fn replace_runc(&self, script: &str) -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), script)?;
        self.node.install(file.path(), "/usr/local/sbin/runc", 0o755)
    }

    /// Whether runc has been called for this since [`GpuHost::watch_runc`].
    pub fn runc_has(&self, verb: &str) -> Result<bool> {
        Ok(self.runc_calls(verb)? > 0)
    }

    /// How often it has been.
    pub fn runc_calls(&self, verb: &str) -> Result<usize> {
        let called = self.node.read(VERBS)?;
        Ok(called.lines().filter(|called| *called == verb).count())
    }

    /// How long containerd's log is.
    pub fn log_length(&self) -> Result<usize> {
        Ok(self.node.read(Node::CONTAINERD_LOG)?.len())
    }

    /// What containerd's log has become since it was this long.
    pub fn log_since(&self, length: usize) -> Result<String> {
        Ok(self.node.read(Node::CONTAINERD_LOG)?.split_off(length))
    }

    /// What containerd's log holds at its end, for messages of a test that failed.
    pub fn log(&self) -> String {
        let log = self.node.read(Node::CONTAINERD_LOG).unwrap_or_default();
        let worth = |line: &&str| !line.contains("loading plugin");
        let lines: Vec<&str> = log.lines().filter(worth).collect();
        let shown = lines[lines.len().saturating_sub(SHOWN)..].join("\n");
        let mut text = format!("containerd's log on {} ends:\n{shown}", self.node.name());
        for (path, log) in self.criu_logs() {
            text.push_str(&format!("\n{path} ends:\n{log}"));
        }
        text
    }

    /// The ends of the logs that CRIU has left in the bundles of the node's containers.
    fn criu_logs(&self) -> Vec<(String, String)> {
        let find = ["find", "/run/containerd", "-name", "*.log", "-path", "*criu*"];
        let found = self
            .node
            .run(&find)
            .map(|output| output.stdout)
            .unwrap_or_default();
        let logs = found.lines().map(|path| {
            let log = self.node.read(path).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let shown = lines[lines.len().saturating_sub(SHOWN)..].join("\n");
            (path.to_owned(), shown)
        });
        logs.collect()
    }

    /// Lets containerd serve Kubernetes, as packages of distributions configure it.
    pub fn serve_kubernetes(&self) -> Result<()> {
        const CONFIG: &str = "/etc/containerd/config.toml";
        let config = self.node.read(CONFIG)?;
        let serves = |line: &&str| !line.starts_with("disabled_plugins");
        let lines: Vec<&str> = config.lines().filter(serves).collect();
        self.node.write(CONFIG, lines.join("\n"))?;
        // It makes directories at its first start.
        self.node.restart_containerd()
    }

    /// Moves an image to another node through a file, as a user would.
    pub fn send_image(&self, image: &str, to: &GpuHost) -> Result<Duration> {
        let begun = Instant::now();
        let file = "/tmp/checkpoint.tar";
        self.export(image, file)?;
        to.node
            .install(self.node.path(file), file, 0o600)
            .context("move the image")?;
        to.import(file)?;
        for node in [&self.node, &to.node] {
            std::fs::remove_file(node.path(file)).context("remove the image file")?;
        }
        Ok(begun.elapsed())
    }

    /// Writes an image to a file of the node.
    pub(crate) fn export(&self, image: &str, file: &str) -> Result<()> {
        // ctr 2.1 takes the parts of a checkpoint image for platforms, and fails, without these two.
        let export = ["ctr", "images", "export", "--local", "--skip-manifest-json"];
        self.node.run(&[&export[..], &[file, image]].concat()).map(drop)
    }

    /// Reads images from a file of the node.
    pub(crate) fn import(&self, file: &str) -> Result<()> {
        self.node
            .run(&["ctr", "images", "import", "--local", "--no-unpack", file])
            .map(drop)
    }

    /// Whether there is an image with this name.
    pub fn has_image(&self, image: &str) -> Result<bool> {
        let names = self.node.run(&["ctr", "images", "list", "--quiet"])?.stdout;
        Ok(names.lines().any(|name| name == image))
    }

    /// Removes an image and what no other image holds of it.
    pub fn remove_image(&self, image: &str) -> Result<()> {
        self.node
            .run(&["ctr", "images", "remove", "--sync", image])
            .map(drop)
    }

    /// MiB in use on each GPU, as the driver's tool reports.
    pub fn gpu_memory(&self) -> Result<Vec<u64>> {
        let smi = self.node.run(&["simgpu", "smi"])?.stdout;
        let gpus = smi.lines().filter(|line| line.starts_with("gpu "));
        gpus.map(|line| {
            let used = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix("used="));
            let used = used.and_then(|used| used.strip_suffix("MiB")?.parse().ok());
            used.with_context(|| format!("no use of memory in {line:?}"))
        })
        .collect()
    }

    /// Waits until no container is left on the node: no shim, runc, CRIU, helper or workload, no memory in
    /// use on any GPU.
    pub fn idle(&self) -> Result<()> {
        let busy = |command: &str| {
            let of_runtime = ["containerd-shim", "firn-", "runc", "criu", "gpu-counter"];
            of_runtime.iter().any(|name| command.starts_with(name))
        };
        let mut last = String::new();
        let waited = wait_for("an idle node", GONE, || {
            let left: Vec<_> = self
                .node
                .processes()
                .into_iter()
                .filter(|p| busy(&p.command))
                .collect();
            last = format!("{left:?}");
            if !left.is_empty() {
                return Ok(None);
            }
            let memory = self.gpu_memory()?;
            last = format!("GPU memory in use {memory:?}");
            Ok(memory.iter().all(|mib| *mib == 0).then_some(()))
        });
        ensure!(waited.is_ok(), "left on {}: {last}", self.node.name());
        Ok(())
    }
}

/// The options of ctr that make these edits of a CDI specification.
fn options_of_edits(edits: &Value) -> Vec<String> {
    let list = |key: &str| edits[key].as_array().cloned().unwrap_or_default();
    let devices = list("deviceNodes")
        .into_iter()
        .filter_map(|node| Some(["--device".to_owned(), node["path"].as_str()?.to_owned()]));
    let mounts = list("mounts").into_iter().filter_map(|mount| {
        let (from, to) = (mount["hostPath"].as_str()?, mount["containerPath"].as_str()?);
        let bind = format!("type=bind,src={from},dst={to},options=rbind:ro");
        Some(["--mount".to_owned(), bind])
    });
    devices.chain(mounts).flatten().collect()
}

/// A name for the node of a test.
fn test_name(platform: Platform, name: &str) -> String {
    let platform = platform.to_string().replace(' ', "-");
    format!("{name}-{platform}-{}", std::process::id())
}
