//! Daemons that no Debian suite has: containerd 2.3, built by Go, which starts shims by another protocol.
//!
//! With its own shim first, then with firn in that one's place; then a Debian host whose daemon is upgraded
//! while firn's containers run. Left out where there is no Go. `FIRN_CONTAINERD=v2.2.9` in the environment
//! takes another release.
//!
//! And firn's own upgrade: its programs are replaced while containers run under the shim that was there. With
//! those of another release, which `FIRN_OTHER_PROGRAMS` names, each restores the images of the other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, Claims, Container, GpuHost, IMAGE, STOCK, SimGpu, Skip, cases, matrix, on};
use firn_node::{Platform, go_install, go_lacks, wait_for};
use serde_json::Value;

const MODULE: &str = "github.com/containerd/containerd/v2";
const VERSION: &str = "v2.3.7";
const VERSION_ENV: &str = "FIRN_CONTAINERD";
/// A directory with the programs of another release of firn.
const OTHER_ENV: &str = "FIRN_OTHER_PROGRAMS";
const LIMIT: Duration = Duration::from_secs(60);
/// Where programs hide those of Debian.
const BIN: &str = "/usr/local/bin";
const SHIM: &str = "containerd-shim-runc-v2";
const FIRNS: [&str; 4] = ["containerd-shim-firn-v2", "firn-gpu", "firn-hook", "firn"];
/// A container that ends with 7 when it is asked to, and counts until then.
const LIVE: &str = "trap 'exit 7' TERM; i=0; while :; do i=$((i+1)); echo $i >>/log; sleep 0.05; done";
const GROUP: &str = "io.containerd.runc.v2.group=pod";

/// The programs of another containerd: the daemon, its client, its shim.
struct Containerd {
    version: String,
    programs: [PathBuf; 3],
}

impl Containerd {
    /// Skips the trial where they cannot be built.
    fn build() -> Result<Self> {
        let version = std::env::var(VERSION_ENV).unwrap_or_else(|_| VERSION.to_owned());
        if let Some(reason) = go_lacks() {
            return Err(Skip::new(format!("containerd {version} is not built: {reason}")).into());
        }
        let build = |name: &str| go_install(&format!("{MODULE}/cmd/{name}"), &version);
        let programs = [build("containerd")?, build("ctr")?, build(SHIM)?];
        Ok(Self { version, programs })
    }

    /// Replaces daemon and client of a host, under running containers, as an upgrade does it.
    fn upgrade(&self, host: &GpuHost) -> Result<()> {
        host.node().kill_containerd()?;
        for (built, name) in self.programs.iter().zip(["containerd", "ctr"]) {
            host.node().install(built, format!("{BIN}/{name}"), 0o755)?;
        }
        host.node().start_containerd()?;
        let version = host.node().run(&["ctr", "version"])?.stdout;
        let number = self.version.trim_start_matches('v');
        ensure!(
            version.matches(number).count() >= 2,
            "another one runs:\n{version}"
        );
        Ok(())
    }

    /// Installs its shim.
    fn own_shim(&self, host: &GpuHost) -> Result<()> {
        host.node()
            .install(&self.programs[2], format!("{BIN}/{SHIM}"), 0o755)?;
        host.node().restart_containerd()
    }
}

fn start<'h>(host: &'h GpuHost, id: &str, options: &[&str]) -> Result<Container<'h>> {
    let options = [&["--runtime", STOCK], options].concat();
    let container = Container::run(host, id, &options, &["sh", "-c", LIVE])?;
    // From then on it ends when it is asked to.
    counts_on(host, id, 1)?;
    Ok(container)
}

/// What containerd has on record of the shim of a container.
fn record(host: &GpuHost, id: &str) -> Result<(String, String)> {
    let json: Value = serde_json::from_str(&host.node().read(format!("{BUNDLES}/{id}/bootstrap.json"))?)?;
    let address = json["address"].as_str().context("no address")?.to_owned();
    Ok((format!("{} {}", json["version"], json["protocol"]), address))
}

/// How a command of `ctr` went, without its warnings about the host on stderr, with the time.
fn describe(host: &GpuHost, arguments: &[&str]) -> Result<String> {
    let output = host.ctr(arguments, "")?;
    Ok(format!("code {:?}, out {}", output.code, output.stdout.trim()))
}

fn exec(host: &GpuHost, id: &str) -> Result<String> {
    let output = host.exec(id, "e", &["sh", "-c", "echo out; exit 5"])?;
    Ok(format!("code {:?}, out {}", output.code, output.stdout.trim()))
}

fn end(container: Container<'_>) -> Result<String> {
    container.task(&["kill"])?;
    container.becomes("STOPPED")?;
    let seen = format!("exit code {}", container.exit_code()?);
    container.forget()?;
    Ok(seen)
}

fn counts_on(host: &GpuHost, id: &str, more: usize) -> Result<()> {
    let path = host.node().path(format!("{BUNDLES}/{id}/rootfs/log"));
    let read = || std::fs::read_to_string(&path).unwrap_or_default().lines().count();
    let from = read();
    wait_for("the count to continue", LIMIT, || {
        Ok((read() >= from + more).then_some(()))
    })
}

/// What a user sees of this daemon with the shim that is installed.
fn life(host: &GpuHost) -> Result<String> {
    let run = ["run", "--rm", "--runtime", STOCK];
    let command = [IMAGE, "r", "sh", "-c", "echo out; echo err >&2; exit 42"];
    let mut seen = vec![describe(host, &[&run[..], host.limits(), &command].concat())?];

    let container = start(host, "c", &[])?;
    seen.push(record(host, "c")?.0);
    seen.push(exec(host, "c")?);
    container.task(&["pause"])?;
    seen.push(container.status()?);
    container.task(&["resume"])?;
    host.node().restart_containerd()?;
    seen.push(container.status()?);
    seen.push(exec(host, "c")?);
    seen.push(end(container)?);
    Ok(seen.join("\n"))
}

fn pod(host: &GpuHost) -> Result<String> {
    let one = start(host, "p1", &["--annotation", GROUP])?;
    let two = start(host, "p2", &["--annotation", GROUP])?;
    let (first, second) = (record(host, "p1")?, record(host, "p2")?);
    let mut seen = vec![format!(
        "{} {}, one shim {}",
        first.0,
        second.0,
        first.1 == second.1
    )];
    host.node().restart_containerd()?;
    seen.push(exec(host, "p2")?);
    seen.push(end(two)?);
    seen.push(exec(host, "p1")?);
    seen.push(end(one)?);
    Ok(seen.join("\n"))
}

/// A shim that is killed: containerd has `delete` clean up.
fn killed(host: &GpuHost) -> Result<String> {
    let events = host.watch_events()?;
    let container = start(host, "c", &[])?;
    let pid = container.pid()?;
    let status = host.node().read(format!("/proc/{pid}/status"))?;
    let shim = status.lines().find_map(|line| line.strip_prefix("PPid:\t"));
    host.node().run(&["kill", "-KILL", shim.context("no parent")?])?;
    let reported = events.until_deleted(&["c"])?;
    let exits = reported
        .iter()
        .filter(|line| line.contains("/tasks/exit") && line.contains("\"exit_status\":137"));
    let seen = format!("exits with 137: {}", exits.count());
    container.forget()?;
    Ok(seen)
}

fn checkpoint(host: &GpuHost) -> Result<String> {
    let container = start(host, "c", &[])?;
    counts_on(host, "c", 3)?;
    container.checkpoint("checkpoint/c")?;
    counts_on(host, "c", 3)?;
    let mut seen = vec![container.status()?];
    container.remove()?;
    let (copy, _) = Container::restore(host, "c", "checkpoint/c", 0)?;
    counts_on(host, "c", 3)?;
    seen.push(copy.status()?);
    seen.push(exec(host, "c")?);
    seen.push(end(copy)?);
    host.remove_image("checkpoint/c")?;
    Ok(seen.join("\n"))
}

fn info(host: &GpuHost) -> Result<String> {
    let asked = ["plugins", "inspect-runtime", "--runtime=io.containerd.runc.v2"];
    let output = host.ctr(&asked, "")?;
    let mut json: Value = serde_json::from_str(&output.stdout).with_context(|| output.to_string())?;
    json["Version"] = Value::Null;
    Ok(format!("{json:#}"))
}

type Scenario = fn(&GpuHost) -> Result<String>;

const SCENARIOS: [(&str, &str, Scenario); 5] = [
    ("a life", "exit code 7", life),
    ("a pod", "one shim true", pod),
    ("a killed shim", "exits with 137: 1", killed),
    ("a checkpoint", "exit code 7", checkpoint),
    ("information", "io.containerd.runc.v2", info),
];

fn containerd_2_3_sees_no_difference(platform: Platform) -> Result<()> {
    let containerd = Containerd::build()?;
    let host = GpuHost::for_test(platform, "dm-s", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        containerd.upgrade(host)?;
        containerd.own_shim(host)?;
        let mut stock = Vec::new();
        for (what, expected, scenario) in SCENARIOS {
            let seen = scenario(host).with_context(|| format!("{what}, stock"))?;
            ensure!(seen.contains(expected), "{what}: no {expected:?} in\n{seen}");
            stock.push(seen);
        }
        host.drop_in()?;
        for ((what, _, scenario), stock) in SCENARIOS.iter().zip(stock) {
            let seen = scenario(host).with_context(|| format!("{what}, firn"))?;
            ensure!(seen == stock, "{what}: the stock shim\n{stock}\nfirn\n{seen}");
        }
        Claims::of_ctr(host, STOCK)?.works("`run`, `tasks`, checkpoint and restore without a GPU")?;
        host.idle()
    })
}

/// The shim that a host has before its daemon is upgraded. Afterwards it has firn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Stock,
    Firn,
}

/// A Debian host whose daemon becomes 2.3 under running containers.
fn upgrade(platform: Platform, before: Before, name: &str) -> Result<()> {
    let containerd = Containerd::build()?;
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        if before == Before::Firn {
            host.drop_in()?;
        }
        let alone = start(host, "c", &[])?;
        let one = start(host, "p1", &["--annotation", GROUP])?;
        host.drop_in()?;
        containerd.upgrade(host)?;
        for id in ["c", "p1"] {
            let output = exec(host, id)?;
            ensure!(
                output == "code Some(5), out out",
                "{id} after the upgrade: {output}"
            );
        }
        // The daemon of today asks the shim of yesterday's to take one more.
        let two = start(host, "p2", &["--annotation", GROUP])?;
        ensure!(host.shims().count() == 2, "the pod has two shims");
        let output = exec(host, "p2")?;
        ensure!(output == "code Some(5), out out", "p2: {output}");
        for container in [alone, two, one] {
            let ended = end(container)?;
            ensure!(ended == "exit code 7", "{ended}");
        }
        host.idle()
    })
}

fn containers_survive_an_upgrade_of_containerd(platform: Platform) -> Result<()> {
    upgrade(platform, Before::Firn, "dm-up")
}

fn containers_survive_an_upgrade_of_containerd_and_shim(platform: Platform) -> Result<()> {
    upgrade(platform, Before::Stock, "dm-shim")
}

/// Installs the programs of `from`.
fn install_firn(host: &GpuHost, from: &Path) -> Result<()> {
    let install = |name| {
        host.node()
            .install(from.join(name), format!("{BIN}/{name}"), 0o755)
    };
    FIRNS.into_iter().try_for_each(install)
}

/// With the programs of another release of firn: each restores what the other has made.
fn images_of_another_firn_restore_and_it_restores_ours(platform: Platform) -> Result<()> {
    let Some(other) = std::env::var_os(OTHER_ENV).map(PathBuf::from) else {
        return Err(Skip::new(format!("{OTHER_ENV} names no programs of another firn")).into());
    };
    let own = tempfile::tempdir()?;
    let host = GpuHost::for_test(platform, "dm-other", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        for name in FIRNS {
            std::fs::copy(host.node().path(format!("{BIN}/{name}")), own.path().join(name))?;
        }
        for config in ["", "[images]\nstore = \"/srv/store\"\nbulk = \"store\"\n"] {
            host.configure(config)?;
            for (maker, user) in [(own.path(), &*other), (&*other, own.path())] {
                restores_image_of(host, maker, user)
                    .with_context(|| format!("{} by {}, {config:?}", maker.display(), user.display()))?;
            }
        }
        install_firn(host, own.path())?;
        host.idle()
    })
}

fn restores_image_of(host: &GpuHost, maker: &Path, user: &Path) -> Result<()> {
    install_firn(host, maker)?;
    let job = Container::count(host, "job", &["0"], 1, &[])?;
    job.goes_on(3)?;
    job.checkpoint("checkpoint/job")?;
    job.goes_on(3)?;
    job.remove()?;
    install_firn(host, user)?;
    host.node().run(&["firn", "inspect", "checkpoint/job"])?;
    host.node().run(&["firn", "audit", "checkpoint/job"])?;
    let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
    copy.goes_on(3)?;
    copy.checkpoints_again("checkpoint/job")?;
    copy.remove()?;
    host.remove_image("checkpoint/job")
}

/// Replaces firn's programs as a package manager does: another file under the same path.
fn upgrade_firn(host: &GpuHost) -> Result<()> {
    for name in FIRNS {
        let path = format!("{BIN}/{name}");
        let mut program = std::fs::read(host.node().path(&path))?;
        program.push(0);
        let copy = tempfile::NamedTempFile::new()?;
        std::fs::write(copy.path(), program)?;
        host.node().install(copy.path(), path, 0o755)?;
    }
    Ok(())
}

/// Whether the shim of a container runs the program that is installed now.
fn is_upgraded(host: &GpuHost, id: &str) -> Result<bool> {
    let exe = format!("/proc/{}/exe", host.shim_of(id)?.pid);
    let program = host.node().run(&["readlink", &exe])?.stdout;
    Ok(!program.trim_end().ends_with("(deleted)"))
}

/// The shim of before checkpoints with the driver worker of today, the shim of today restores the image, and
/// cleans up after a shim of before that is killed.
fn gpu_containers_survive_an_upgrade_of_firn(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "dm-firn", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        let killed = Container::count(host, "killed", &["0"], 1, &[])?;
        job.goes_on(3)?;
        job.task(&["pause"])?;
        upgrade_firn(host)?;
        host.node().restart_containerd()?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        ensure!(
            !is_upgraded(host, "job")?,
            "the shim of a running container was replaced"
        );
        job.checkpoint("checkpoint/job")?;
        job.goes_on(3)?;
        job.exec(&["true"])?;
        job.remove()?;

        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        ensure!(is_upgraded(host, "job")?, "the shim of before was started");
        copy.goes_on(3)?;
        copy.checkpoints_again("checkpoint/job")?;
        copy.remove()?;

        killed.goes_on(1)?;
        let events = host.watch_events()?;
        host.kill_shim("killed")?;
        events.until_deleted(&["killed"])?;
        killed.forget()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        containerd_2_3_sees_no_difference [FORKY];
        containers_survive_an_upgrade_of_containerd [FORKY, TRIXIE];
        containers_survive_an_upgrade_of_containerd_and_shim [FORKY, TRIXIE];
        gpu_containers_survive_an_upgrade_of_firn [FORKY, TRIXIE];
        images_of_another_firn_restore_and_it_restores_ours [FORKY, TRIXIE];
    })
}
