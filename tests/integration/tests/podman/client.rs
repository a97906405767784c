//! podman on a test node.

use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_lab::{Claims, GpuHost, IMAGE, Lines, SimGpu};
use firn_node::{Platform, wait_for};

pub const LIMIT: Duration = Duration::from_secs(60);
const PACKAGES: &[&str] = &["conmon", "netavark", "podman"];
pub const FIRN_RUNC: &str = "/usr/local/bin/firn-runc";
pub const ARCHIVE: &str = "/root/job.tar.gz";

/// podman's tests of the kernel want to make whiteouts, which a test node may not: no overlays.
const STORAGE: &str = "[storage]\ndriver = \"vfs\"\ngraphroot = \"/var/lib/containerd/podman\"\n\
                       runroot = \"/run/containers/storage\"\n";
/// No limit for pids: cgroup v2 of a host that has v1, too, lacks the controller.
const CONTAINERS: &str = "[containers]\npids_limit = 0\n[engine]\ncgroup_manager = \"cgroupfs\"\n\
                          events_logger = \"file\"\n\
                          runtime_supports_json = [\"crun\", \"runc\", \"firn-runc\"]\n\
                          [engine.runtimes]\nfirn-runc = [\"/usr/local/bin/firn-runc\"]\n";

pub fn host(platform: Platform, name: &str, gpus: u32) -> Result<GpuHost> {
    let gpus: Vec<SimGpu> = (1..=gpus).map(SimGpu::h200).collect();
    let host = GpuHost::for_test_with(platform, name, &gpus, PACKAGES)?;
    let node = host.node();
    node.write("/etc/containers/storage.conf", STORAGE)?;
    node.write("/etc/containers/containers.conf", CONTAINERS)?;
    node.run(&["ctr", "images", "export", "--local", "/root/image.tar", IMAGE])?;
    let loaded = Podman(&host).run(&["load", "--input", "/root/image.tar"])?;
    let loaded = loaded.rsplit(": ").next().context(loaded.clone())?.trim();
    Podman(&host).run(&["tag", loaded, IMAGE])?;
    Ok(host)
}

/// podman on a node.
#[derive(Clone, Copy)]
pub struct Podman<'h>(pub &'h GpuHost);

impl Podman<'_> {
    pub fn run(self, words: &[&str]) -> Result<String> {
        Ok(self.0.node().run(&[&["podman"], words].concat())?.stdout)
    }

    /// What it does with firn, for the page of clients.
    pub fn claims(self) -> Result<Claims> {
        let version = self.run(&["version", "--format", "{{.Client.Version}}"])?;
        Ok(Claims::new("podman", &version, "firn-runc"))
    }

    /// What it prints when it fails.
    pub fn fails(self, words: &[&str]) -> Result<String> {
        self.program_fails("podman", words)
    }

    /// What firn-runc prints when it fails.
    pub fn runtime_fails(self, words: &[&str]) -> Result<String> {
        self.program_fails(FIRN_RUNC, words)
    }

    fn program_fails(self, program: &str, words: &[&str]) -> Result<String> {
        let output = self.0.node().command(program).args(words).output()?;
        ensure!(!output.status.success(), "{words:?} did not fail");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Starts a counter on a GPU.
    pub fn count(self, name: &str, gpu: &str) -> Result<()> {
        let device = format!("nvidia.com/gpu={gpu}");
        let run = [
            "--runtime",
            "firn-runc",
            "run",
            "--detach",
            "--network",
            "none",
            "--name",
            name,
        ];
        let job = [
            "--device",
            &device,
            IMAGE,
            "/bin/gpu-counter",
            "--interval-ms",
            "50",
            "--mib",
            "8",
        ];
        self.run(&[&run[..], &job].concat())?;
        self.goes_on(name, 3).map(drop)
    }

    pub fn id(self, name: &str) -> Result<String> {
        Ok(self
            .run(&["inspect", "--format", "{{.Id}}", name])?
            .trim()
            .to_owned())
    }

    pub fn lines(self, name: &str) -> Result<Lines> {
        Ok(Lines::parse(&self.run(&["logs", name])?))
    }

    /// Waits for more iterations of the counter, all of them right. Gives the number of the first.
    pub fn goes_on(self, name: &str, more: u64) -> Result<u64> {
        let from = self.lines(name)?.reached(1);
        wait_for(
            &format!("{more} iterations of {name} after {from}"),
            LIMIT,
            || {
                let lines = self.lines(name)?;
                if let Some(fault) = lines.fault_if_carried(0) {
                    bail!("{name}: {fault}");
                }
                Ok((lines.reached(1) >= from + more).then_some(()))
            },
        )?;
        Ok(from)
    }

    /// Uses GPU memory of these GPUs and of no others.
    pub fn uses(self, gpus: &[usize]) -> Result<()> {
        let shown = self.0.node().run(&["simgpu", "smi"])?.stdout;
        let used = shown.lines().filter(|line| line.starts_with("gpu "));
        let used: Vec<usize> = (0..)
            .zip(used)
            .filter(|(_, line)| !line.contains(" used=0MiB"))
            .map(|(n, _)| n)
            .collect();
        ensure!(used == gpus, "in use: {used:?} instead of {gpus:?}");
        Ok(())
    }

    pub fn checkpoint(self, options: &[&str], name: &str) -> Result<String> {
        let begin = [
            "container",
            "checkpoint",
            "--compress",
            "gzip",
            "--export",
            ARCHIVE,
        ];
        self.run(&[&begin[..], options, &[name]].concat())
    }

    /// Begins a checkpoint that hangs in the driver.
    pub fn hang(self, name: &str) -> Result<Child> {
        self.0.fault(&["--call", "checkpoint", "--hang"])?;
        let mut command = self.0.node().command("podman");
        command.args(["container", "checkpoint", "--export", ARCHIVE, name]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        wait_for("firn-gpu to hang", LIMIT, || {
            let begun = self.is_noted() && self.is_locked()?;
            Ok(begun.then_some(()))
        })?;
        Ok(child)
    }

    pub fn is_locked(self) -> Result<bool> {
        Ok(self.0.node().run(&["simgpu", "smi"])?.stdout.contains("state=1"))
    }

    pub fn processes(self, name: &str) -> usize {
        self.0.processes(name)
    }

    /// Kills the processes of firn-runc: the transaction's alone, or the called one, too.
    pub fn kill(self, both: bool) -> Result<()> {
        let processes = self.0.node().processes().into_iter();
        let is_meant = |name: &String| name == "firn-runc" || both && name == FIRN_RUNC;
        let found = processes.filter(|process| process.args.first().is_some_and(is_meant));
        let pids: Vec<String> = found.map(|process| process.pid.to_string()).collect();
        ensure!(pids.len() == if both { 2 } else { 1 }, "{pids:?}");
        let pids: Vec<&str> = pids.iter().map(String::as_str).collect();
        self.0.node().run(&[&["kill", "-KILL"], &pids[..]].concat())?;
        self.0.no_faults()
    }

    /// Whether firn-runc has a note of an open transaction. podman itself waits for the end of its call.
    pub fn is_noted(self) -> bool {
        !self.notes().is_empty()
    }

    /// The ids of containers with such a note.
    pub fn notes(self) -> Vec<String> {
        let notes = std::fs::read_dir(self.0.node().path("/run/firn/runc/run/runc"));
        let notes = notes.into_iter().flatten().flatten();
        notes
            .map(|note| note.file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// Nothing of a checkpoint is there: no archive, image, journal or note.
    pub fn no_checkpoint(self, name: &str) -> Result<()> {
        let bundle = self.run(&["inspect", "--format", "{{.StaticDir}}", name])?;
        let bundle = self.0.node().path(bundle.trim());
        for left in ["checkpoint", "firn-journal"] {
            ensure!(
                !bundle.join(left).exists(),
                "{left} is left in {}",
                bundle.display()
            );
        }
        ensure!(!self.0.node().path(ARCHIVE).exists(), "{ARCHIVE} is left");
        ensure!(!self.is_noted(), "the note is left");
        ensure!(self.processes("firn-gpu") == 0, "firn-gpu is left");
        Ok(())
    }

    /// Removes all containers. Nothing of them is left.
    pub fn clear(self) -> Result<()> {
        self.run(&["rm", "--all", "--force", "--time", "0"])?;
        self.0.nothing_of_runc_runs(LIMIT)?;
        self.uses(&[])
    }
}
