//! The Debian package: a node that has it moves a job to another one, and is as before once it is purged.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_documents::{Page, console, root};
use firn_lab::{
    Built, COUNTER, Container, GpuHost, IMAGE, PROGRAMS, SimGpu, Skip, answer, cases, matrix, on,
};
use firn_node::{Node, Platform, wait_for};

const PACKAGE: &str = "/srv/firn.deb";
const CDI: &str = "/run/cdi/nvidia.yaml";
const LIMIT: Duration = Duration::from_secs(30);

/// The package of the programs under test, which is made once.
fn package() -> Result<&'static PathBuf> {
    static MADE: OnceLock<Result<(tempfile::TempDir, PathBuf), String>> = OnceLock::new();
    let make = || make().map_err(|error| format!("{error:#}"));
    let made = MADE.get_or_init(make).as_ref();
    made.map(|(_, package)| package)
        .map_err(|error| anyhow::anyhow!("{error}"))
}

fn make() -> Result<(tempfile::TempDir, PathBuf)> {
    let built = Built::for_tests()?;
    let dir = tempfile::tempdir()?;
    let programs = dir.path().join("programs");
    std::fs::create_dir(&programs)?;
    for name in PROGRAMS {
        let from = match name {
            "containerd-shim-firn-v2" => built.shim().to_owned(),
            _ => built.program(name),
        };
        // As a release is.
        let mut strip = Command::new("strip");
        let strip = strip.arg("-o").arg(programs.join(name)).arg(from);
        ensure!(strip.status()?.success(), "strip has failed");
    }
    let mut dist = Command::new(env!("CARGO"));
    let dist = dist
        .args(["run", "--quiet", "--locked", "--package", "xtask", "--"])
        .args(["dist", "--deb-of"])
        .arg(&programs)
        .arg("--out")
        .arg(dir.path());
    let output = dist.output().context("run cargo xtask dist")?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "cargo xtask dist: {error}");
    let printed = String::from_utf8(output.stdout)?;
    let package = PathBuf::from(printed.lines().last().context("dist names the package")?);
    Ok((dir, package))
}

/// A host without firn, that has the package in a file.
fn host(platform: Platform, name: &str, first: u32) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(first)])?;
    let node = host.node();
    for program in PROGRAMS {
        node.run(&["rm", &format!("/usr/local/bin/{program}")])?;
    }
    node.install(package()?, PACKAGE, 0o644)?;
    host.serve_kubernetes()?;
    Ok(host)
}

/// Every file and directory of the node's system with its mode, and what it holds, or when that was changed.
fn files(node: &Node) -> Result<BTreeSet<String>> {
    let list = "mkdir -p /run/cdi; find /etc -xdev -type f -exec sha256sum -- {} +; \
                find /etc /usr /run/cdi -xdev -printf '%p %m %y %l\n'; \
                find /usr -xdev -type f -printf '%p %s %T@\n'";
    let shown = node.run(&["sh", "-c", list])?.stdout;
    // dpkg runs ldconfig.
    let ours = shown.lines().filter(|line| !line.contains("/etc/ld.so.cache"));
    Ok(ours.map(str::to_owned).collect())
}

fn install(node: &Node) -> Result<()> {
    node.run(&["dpkg", "--install", PACKAGE]).map(drop)
}

/// Two hosts get the package, do this, and lose it: they are as before.
fn with_the_package(platform: Platform, work: fn([&GpuHost; 2]) -> Result<()>) -> Result<()> {
    let hosts = [host(platform, "pk-a", 1)?, host(platform, "pk-b", 2)?];
    on(hosts, |[a, b]| {
        let mut before = Vec::new();
        for node in [a.node(), b.node()] {
            before.push(files(node)?);
            install(node)?;
            node.run(&["firn", "install", "--containerd"])?;
            node.restart_containerd()?;
        }
        shows_its_manual(a.node())?;
        work([a, b])?;
        for (host, before) in [a, b].into_iter().zip(&before) {
            // Of the runtime that ended last.
            wait_for("the shim's end", LIMIT, || {
                Ok((host.shims().count() == 0).then_some(()))
            })?;
            host.node().run(&["dpkg", "--purge", "firn"])?;
            let after = files(host.node())?;
            let different: Vec<_> = before.symmetric_difference(&after).collect();
            ensure!(different.is_empty(), "not as before: {different:#?}");
            host.idle()?;
        }
        Ok(())
    })
}

/// Checkpoint with the one, restore with the other, both by the package. Removal refuses while a container
/// runs, and leaves nothing.
fn a_job_moves_between_nodes_with_the_package(platform: Platform) -> Result<()> {
    with_the_package(platform, |[a, b]| {
        let source = Container::count(a, "job", &["0"], 1, &[])?;
        source.goes_on(2)?;
        let list = "readlink /proc/[0-9]*/exe | grep containerd-shim";
        let shims = a.node().run(&["sh", "-c", list])?.stdout;
        ensure!(shims == "/usr/bin/containerd-shim-firn-v2\n", "{shims}");
        let refused = a.node().run(&["dpkg", "--remove", "firn"]);
        let refused = format!("{:#}", refused.err().context("it was removed under a container")?);
        ensure!(
            refused.contains("FIRN-INSTALL-IN-USE") && refused.contains("default/job"),
            "{refused}"
        );
        source.checkpoint("checkpoint/job")?;
        source.goes_on(2)?;
        a.send_image("checkpoint/job", b)?;
        source.remove()?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        copy.goes_on(2)?;
        ensure!(copy.gpus_in_use()? == b.uuids(), "it is on another GPU");
        copy.remove()?;
        [a, b]
            .iter()
            .try_for_each(|host| host.remove_image("checkpoint/job"))
    })
}

/// The first checkpoint of README.md, on fresh machines.
fn the_commands_of_the_readme_move_a_job(platform: Platform) -> Result<()> {
    if !root().join("README.md").is_file() {
        return Err(Skip::new("the pages are not on this machine").into());
    }
    with_the_package(platform, |[a, b]| {
        play(a, "firn checkpoint job job.tar")?;
        let source = Container::known(a, "job");
        source.goes_on(2)?;
        b.node().install(a.node().path(FILE), FILE, 0o600)?;
        source.remove()?;
        play(b, "firn restore job.tar")?;
        let copy = Container::known(b, "job").moved_before();
        copy.goes_on(2)?;
        ensure!(copy.gpus_in_use()? == b.uuids(), "it is on another GPU");
        copy.remove()
    })
}

/// What README.md's commands write.
const FILE: &str = "/srv/job.tar";

/// Runs the block of README.md with this command, with the option for GPUs that this containerd's ctr knows.
fn play(host: &GpuHost, command: &str) -> Result<()> {
    let page = Page::new("README.md", std::fs::read_to_string(root().join("README.md"))?);
    let blocks = console::blocks(&page);
    let block = blocks
        .iter()
        .find(|block| block.commands.iter().any(|it| it == command));
    let run = format!("ctr run {} ", host.limits().join(" "));
    let script = block
        .with_context(|| format!("README.md has no {command}"))?
        .script()
        .replace("ctr run ", &run)
        .replace(
            "--device nvidia.com/gpu=0",
            &host.ctr_gpu_options(&["0"])?.join(" "),
        )
        .replace("IMAGE job COMMAND", &format!("{IMAGE} job {COUNTER}"));
    host.node()
        .run(&["sh", "-euc", &format!("cd /srv\n{script}")])
        .map(drop)
}

/// What the package has for people.
fn shows_its_manual(node: &Node) -> Result<()> {
    let page = node.run(&["zcat", "/usr/share/man/man1/firn-audit.1.gz"])?.stdout;
    ensure!(
        page.contains("Show whether a workload can be checkpointed"),
        "{page}"
    );
    let complete = "source /usr/share/bash-completion/completions/firn; \\
                    COMP_WORDS=(firn aud) COMP_CWORD=1; \\
                    _clap_complete_firn firn aud firn; echo ${COMPREPLY[*]}";
    let complete = node.run(&["bash", "-c", complete])?.stdout;
    ensure!(complete.trim() == "audit", "{complete}");
    let sums = node.run(&["dpkg", "--verify", "firn"])?.stdout;
    ensure!(sums.is_empty(), "{sums}");
    let checks = node.run(&["firn", "doctor", "--json"])?.stdout;
    answer(&["doctor"], &checks)?;
    ensure!(!checks.contains("libfirn_criu.so is missing"), "{checks}");
    Ok(())
}

/// The CDI file comes with the package, is renewed with the driver's libraries, and goes with the package.
fn systemd_keeps_the_cdi_file_fresh(platform: Platform) -> Result<()> {
    on([host(platform, "pk-s", 1)?], |[host]| {
        let node = host.node();
        node.run(&["sh", "-c", "mkdir /srv/cdi && mv /etc/cdi/* /srv/cdi/"])?;
        install(node)?;
        let is_there = || {
            wait_for("the CDI file", LIMIT, || {
                Ok(node.read(CDI).ok().filter(|file| !file.is_empty()))
            })
        };
        ensure!(is_there()?.contains("nvidia.com/gpu"), "no CDI file of GPUs");
        let devices = node.run(&["firn", "cdi", "list"])?.stdout;
        ensure!(
            devices.contains("nvidia.com/gpu=0") && devices.contains(CDI),
            "{devices}"
        );
        // As an upgrade of the driver does.
        node.run(&["rm", CDI])?;
        node.run(&["ldconfig"])?;
        is_there()?;

        // Another tool's file is left alone, and the service does not fail for it.
        node.run(&["rm", CDI])?;
        node.run(&["sh", "-c", "mv /srv/cdi/* /etc/cdi/"])?;
        node.run(&["systemctl", "start", "firn-cdi.service"])?;
        ensure!(node.read(CDI).is_err(), "every GPU is described twice");
        let bounds = "systemctl show --property CapabilityBoundingSet --property Result firn-cdi.service";
        let bounds = node.run(&["sh", "-c", bounds])?.stdout;
        ensure!(
            bounds.contains("CapabilityBoundingSet=cap_mknod\n") && bounds.contains("Result=success"),
            "{bounds}"
        );
        node.run(&["sh", "-c", "rm /etc/cdi/*"])?;
        node.run(&["systemctl", "start", "firn-cdi.service"])?;
        is_there()?;

        // What the operator has disabled stays disabled in an upgrade.
        node.run(&["systemctl", "disable", "--now", "firn-cdi.path"])?;
        install(node)?;
        let enabled = node.run(&["systemctl", "is-enabled", "firn-cdi.path"]);
        ensure!(enabled.is_err(), "the upgrade has enabled it");
        node.run(&["dpkg", "--purge", "firn"])?;
        ensure!(node.read(CDI).is_err(), "the CDI file is left");
        let units = node.run(&["sh", "-c", "find /etc/systemd /usr/lib/systemd -name 'firn-cdi*'"])?;
        ensure!(units.stdout.is_empty(), "{}", units.stdout);
        Ok(())
    })
}

/// Every manual page is what groff understands.
fn manual_pages_render_without_warnings() -> Result<()> {
    if Command::new("groff").arg("--version").output().is_err() {
        return Err(Skip::new("there is no groff (apt-get install groff-base)").into());
    }
    let dir = tempfile::tempdir()?;
    let firn = Built::for_tests()?.program("firn");
    ensure!(Command::new(firn).arg("man").arg(dir.path()).status()?.success());
    let mut pages = 0;
    for page in std::fs::read_dir(dir.path())? {
        let page = page?.path();
        let mut groff = Command::new("groff");
        let shown = groff
            .args(["-man", "-Tutf8", "-ww", "-P-cbou"])
            .arg(&page)
            .output()?;
        let warnings = String::from_utf8_lossy(&shown.stderr);
        ensure!(
            shown.status.success() && warnings.is_empty(),
            "{}: {warnings}",
            page.display()
        );
        let text = String::from_utf8_lossy(&shown.stdout);
        ensure!(text.contains("SYNOPSIS"), "{} shows {text}", page.display());
        pages += 1;
    }
    ensure!(pages > 20, "only {pages} pages");
    Ok(())
}

/// The service with the metrics works as hardened as it is, and goes with the package.
fn systemd_writes_metrics(platform: Platform) -> Result<()> {
    on([host(platform, "pk-m", 1)?], |[host]| {
        let node = host.node();
        install(node)?;
        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(2)?;
        job.checkpoint("checkpoint/job")?;
        let expected = "kind=\"checkpoint\",outcome=\"done\",code=\"\"} 1";
        let dir = "/var/lib/prometheus/node-exporter";
        // The directory is a user's, who may have put anything there.
        let planted = format!("mkdir -p {dir} && mkfifo {dir}/.firn.prom.tmp && chown -R 1000 {dir}");
        node.run(&["sh", "-c", &planted])?;
        node.run(&["systemctl", "enable", "--now", "firn-textfile.timer"])?;
        let file = format!("{dir}/firn.prom");
        let written = wait_for("the file", LIMIT, || Ok(node.read(&file).ok()))?;
        for sample in [expected, "firn_gpu_containers{state=\"running\"} 1"] {
            ensure!(written.contains(sample), "no {sample} in\n{written}");
        }
        job.remove()?;
        wait_for("the shim's end", LIMIT, || {
            Ok((host.shims().count() == 0).then_some(()))
        })?;
        node.run(&["dpkg", "--purge", "firn"])?;
        let left = "find /etc/systemd /usr/lib/systemd -name 'firn-[cmt]*'; ls /var/lib/firn/history 2>&1; \
                    pgrep -x firn";
        let left = node.run(&["sh", "-c", &format!("{left}; true")])?.stdout;
        ensure!(
            left.contains("No such file") && left.lines().count() == 1,
            "{left}"
        );
        Ok(())
    })
}

pub(crate) fn suite() -> matrix::Suite {
    let cases = cases! {
        a_job_moves_between_nodes_with_the_package [FORKY, TRIXIE_V2];
        the_commands_of_the_readme_move_a_job [NOBLE_V2];
        systemd_keeps_the_cdi_file_fresh [FORKY_SYSTEMD, TRIXIE_SYSTEMD];
        systemd_writes_metrics [FORKY_SYSTEMD];
    };
    let pages = matrix::without_node(
        "manual_pages_render_without_warnings",
        manual_pages_render_without_warnings,
    );
    matrix::Suite::new(&cases).with([pages]).only_in_all()
}
