//! `firn install` and `firn uninstall` on a node that has containerd: what they change, and what they leave.
//!
//! The suite `cri` runs pods on a handler that `firn install` has added.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, FIRN, GpuHost, PROGRAMS, SimGpu, cases, matrix, on};
use firn_node::{Platform, wait_for};

const CONFIG: &str = "/etc/containerd/config.toml";
/// Where the release is unpacked.
const RELEASE: &str = "/opt/release";
const INSTALL: [&str; 3] = ["/opt/release/firn", "install", "--containerd"];
const LIMIT: Duration = Duration::from_secs(60);

/// A host on which firn lies in a directory of its own, and is not installed.
fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(1)])?;
    host.node().run(&["mkdir", "-p", RELEASE])?;
    for program in PROGRAMS {
        host.node()
            .run(&["mv", &format!("/usr/local/bin/{program}"), RELEASE])?;
    }
    host.serve_kubernetes()?;
    Ok(host)
}

/// What a command prints, which has to fail.
fn refused(host: &GpuHost, command: &[&str]) -> Result<String> {
    match host.node().run(command) {
        Ok(output) => anyhow::bail!("{command:?} succeeded: {}", output.stdout),
        Err(error) => Ok(format!("{error:#}")),
    }
}

/// Every file below /etc and /usr/local/bin, with its content and mode.
fn files(host: &GpuHost) -> Result<BTreeSet<String>> {
    let list = "find /etc /usr/local/bin -xdev -printf '%p %m %y ' \\
                \\( -type f -exec sha256sum -- {} \\; -o -print \\)";
    let shown = host.node().run(&["sh", "-c", list])?.stdout;
    Ok(shown.lines().map(str::to_owned).collect())
}

/// The files are as they were.
fn as_before(host: &GpuHost, before: &BTreeSet<String>) -> Result<()> {
    let after = files(host)?;
    let different: Vec<_> = before.symmetric_difference(&after).collect();
    ensure!(different.is_empty(), "not as before: {different:#?}");
    Ok(())
}

fn has_handler(host: &GpuHost) -> Result<bool> {
    let dump = host.node().run(&["containerd", "config", "dump"])?.stdout;
    Ok(dump.contains("runtimes.firn]"))
}

/// Installed, used, upgraded, removed: everything is as before.
fn a_node_is_as_before_once_firn_is_removed(platform: Platform) -> Result<()> {
    on([host(platform, "in-a")?], |[host]| {
        let node = host.node();
        let before = files(host)?;
        let shown = node.run(&[&INSTALL[..], &["--dry-run"]].concat())?.stdout;
        ensure!(
            shown.contains("/usr/local/bin/firn-gpu: would be added"),
            "{shown}"
        );
        as_before(host, &before)?;

        let shown = node.run(&INSTALL)?.stdout;
        ensure!(shown.contains("containerd has to be restarted"), "{shown}");
        ensure!(has_handler(host)?, "no handler after {shown}");
        let again = node.run(&INSTALL)?.stdout;
        ensure!(
            again.matches(": unchanged").count() == PROGRAMS.len() + 1,
            "{again}"
        );
        node.restart_containerd()?;

        let job = Container::count(host, "job", &["0"], 1, &[])?;
        job.goes_on(2)?;
        let in_use = refused(host, &["firn", "uninstall"])?;
        ensure!(
            in_use.contains("FIRN-INSTALL-IN-USE") && in_use.contains("default/job"),
            "{in_use}"
        );
        // Another release: the shim's file is longer.
        node.run(&["sh", "-c", "printf x >>/opt/release/containerd-shim-firn-v2"])?;
        let upgraded = node
            .run(&["/opt/release/firn", "upgrade", "--containerd"])?
            .stdout;
        ensure!(
            upgraded.contains("/usr/local/bin/containerd-shim-firn-v2: replaced")
                && upgraded.matches(": unchanged").count() == PROGRAMS.len(),
            "{upgraded}"
        );
        job.goes_on(2)?;
        let in_use = refused(host, &["firn", "uninstall"])?;
        ensure!(in_use.contains("default/job"), "after an upgrade: {in_use}");
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        host.remove_image("checkpoint/job")?;

        let shown = node.run(&["firn", "uninstall"])?.stdout;
        ensure!(
            shown.matches(": removed").count() == PROGRAMS.len() + 1,
            "{shown}"
        );
        as_before(host, &before)?;
        let nothing = node.run(&["/opt/release/firn", "uninstall"])?.stdout;
        ensure!(nothing == "nothing of firn is installed\n", "{nothing}");
        host.idle()
    })
}

/// A node without a configuration file gets one, which is removed again.
fn a_configuration_that_was_not_there_goes_again(platform: Platform) -> Result<()> {
    on([host(platform, "in-n")?], |[host]| {
        host.node().run(&["rm", "-r", "/etc/containerd"])?;
        let before = files(host)?;
        // Nothing here is systemd's. All else is done.
        let why = refused(host, &[&INSTALL[..], &["--restart"]].concat())?;
        ensure!(why.contains("FIRN-INSTALL-RESTART"), "{why}");
        ensure!(has_handler(host)?, "no handler");
        host.node().run(&["firn", "uninstall"])?;
        as_before(host, &before)
    })
}

/// Where a directory is imported only by the older format, and where the operator has written the handler.
fn other_configurations_are_kept(platform: Platform) -> Result<()> {
    on([host(platform, "in-o")?], |[host]| {
        let node = host.node();
        node.write(CONFIG, "version = 2\n# by hand")?;
        let before = files(host)?;
        node.run(&INSTALL)?;
        ensure!(has_handler(host)?, "no handler");
        let dump = node.run(&["containerd", "config", "dump"])?.stdout;
        ensure!(dump.contains("runtimes.runc]"), "no stock handler: {dump}");
        let again = host.firn(&INSTALL[1..])?;
        let programs = again["programs"].as_array().context("no programs")?;
        let all = programs.iter().chain([&again["handler"]]);
        let unchanged = all.filter(|one| one["change"] == "unchanged").count();
        ensure!(
            unchanged == PROGRAMS.len() + 1 && again["restart"] == true,
            "{again}"
        );
        let removed = host.firn(&["uninstall"])?;
        ensure!(
            removed["handler"]["path"] == CONFIG && removed["restart"] == true,
            "{removed}"
        );
        as_before(host, &before)?;

        let plugin = platform.suite.cri_plugin();
        let version = platform.suite.config_version();
        let path = "/usr/local/bin/containerd-shim-firn-v2";
        let by_hand = format!(
            "version = {version}\n[plugins.'{plugin}'.containerd.runtimes.firn]\n\
             runtime_type = 'io.containerd.runc.v2'\nruntime_path = '{path}'\n"
        );
        node.write(CONFIG, by_hand)?;
        let before = files(host)?;
        let shown = node.run(&INSTALL)?.stdout;
        ensure!(
            shown.contains("/etc/containerd/config.toml: unchanged"),
            "{shown}"
        );
        node.run(&["firn", "uninstall"])?;
        as_before(host, &before)
    })
}

/// What cannot be installed changes nothing.
fn a_refused_installation_changes_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "in-r")?], |[host]| {
        let node = host.node();
        let good = node.read(CONFIG)?;
        let plugin = platform.suite.cri_plugin();
        let runtimes = format!("[plugins.'{plugin}'.containerd.runtimes");
        for (text, expected) in [
            (
                good.replacen('\n', &format!("\ndisabled_plugins = ['{plugin}']\n"), 1),
                "disables its plugin for CRI",
            ),
            ("version = 2 3\n".to_owned(), "is no configuration of containerd"),
            ("root = '/x'\n".to_owned(), "has version 1"),
            (
                format!("{good}\n{runtimes}.firn]\nruntime_path = '/opt/other'\n"),
                "has a runtime handler firn for /opt/other",
            ),
        ] {
            node.write(CONFIG, &text)?;
            let before = files(host)?;
            let why = refused(host, &INSTALL)?;
            ensure!(
                why.contains("FIRN-INSTALL-CONFIG") && why.contains(expected),
                "{expected} is missing: {why}"
            );
            as_before(host, &before)?;
        }
        node.write(CONFIG, &good)?;
        node.run(&["rm", "/opt/release/firn-hook"])?;
        let why = refused(host, &INSTALL)?;
        ensure!(
            why.contains("FIRN-INSTALL: /opt/release has no firn-hook"),
            "{why}"
        );
        Ok(())
    })
}

/// systemd restarts containerd for the handler; containers run on, and removal waits for them.
fn containerd_is_restarted_by_systemd(platform: Platform) -> Result<()> {
    on([host(platform, "in-s")?], |[host]| {
        let node = host.node();
        node.run(&INSTALL[..2])?;
        let job = Container::run(host, "job", &["--runtime", FIRN], &["sh", "-c", "sleep 600"])?;
        // From now on it is systemd's.
        node.kill_containerd()?;
        node.run(&["systemctl", "start", "containerd"])?;
        let serves = || wait_for("containerd", LIMIT, || Ok(node.run(&["ctr", "version"]).ok()));
        serves()?;
        let pid = || {
            Ok::<_, anyhow::Error>(
                node.run(&["systemctl", "show", "-P", "MainPID", "containerd"])?
                    .stdout,
            )
        };
        let before = pid()?;
        // As a container does that has the node's file system.
        let inside = "mkdir /host; mount --rbind / /host; exec \"$@\" --restart --root /host";
        let unshare = ["unshare", "--mount", "sh", "-euc", inside, "inside"];
        let shown = node.run(&[&unshare[..], &INSTALL].concat())?.stdout;
        ensure!(shown.contains("containerd was restarted"), "{shown}");
        serves()?;
        ensure!(pid()? != before, "it is the same process");
        ensure!(job.status()? == "RUNNING", "the container has ended");
        let mut waits = node.command("firn");
        let mut waits = waits.args(["uninstall", "--wait", "--restart"]).spawn()?;
        std::thread::sleep(Duration::from_secs(2));
        ensure!(waits.try_wait()?.is_none(), "it has not waited");
        // Order matters: containerd is restarted once the shim has gone, maybe before it has answered.
        let _ = job.task(&["delete", "--force"]);
        let ended = wait_for("the end of uninstall", LIMIT, || Ok(waits.try_wait()?))?;
        ensure!(ended.success(), "it has failed");
        serves()?;
        job.remove()?;
        ensure!(!has_handler(host)?, "the handler is still there");
        node.run(&["systemctl", "stop", "containerd"])?;
        Ok(())
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_node_is_as_before_once_firn_is_removed [FORKY, TRIXIE_V2];
        a_configuration_that_was_not_there_goes_again [FORKY, TRIXIE];
        other_configurations_are_kept [FORKY, TRIXIE];
        a_refused_installation_changes_nothing [FORKY, TRIXIE];
        containerd_is_restarted_by_systemd [FORKY_SYSTEMD, TRIXIE_SYSTEMD];
    })
}
