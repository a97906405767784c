//! GPUs that are not NVIDIA's. There are none here: nodes of their names open /dev/null, which CRIU can dump, so that what
//! is seen is what firn does about them.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Result, ensure};
use firn_lab::{BUNDLES, Container, FIRN, GpuHost, SimGpu, failure, on};
use firn_node::{Cgroup, Suite, wait_for};

const KFD: &str = "/dev/kfd";
const RENDER: &str = "/dev/dri/renderD128";

/// Where the stand-in for runc notes what it was called for and what CRIU is to load.
const NOTES: &str = "/run/plugins";

/// Notes the plugins that CRIU would load, and lets it load none: there is no driver behind them.
const NOTING: &str = "#!/bin/sh\ncase \" $* \" in *' checkpoint '*) verb=checkpoint;; *' restore '*) verb=restore;; esac\n\
    [ -z \"$verb\" ] || echo $verb $(ls \"$CRIU_LIBS_DIR\") >>/run/plugins\nmkdir -p /run/none\nexport CRIU_LIBS_DIR=/run/none\nexec /usr/sbin/runc \"$@\"\n";

/// A node with an NVIDIA GPU and with nodes of AMD's names.
fn host(name: &str) -> Result<GpuHost> {
    let host = GpuHost::for_test(Suite::Forky, Cgroup::Auto, name, &[SimGpu::h200(1)])?;
    host.node().run(&["mkdir", "-p", "/dev/dri"])?;
    for path in [KFD, RENDER] {
        host.node().run(&["mknod", path, "c", "1", "3"])?;
    }
    Ok(host)
}

/// A container that is given both nodes and keeps these open.
fn with_open<'h>(host: &'h GpuHost, open: &[&str]) -> Result<Container<'h>> {
    let opening: Vec<String> = open
        .iter()
        .zip(3..)
        .map(|(path, fd)| format!("exec {fd}<{path}; "))
        .collect();
    let script = opening.concat() + "while :; do echo x >>/beats; sleep 0.05; done";
    let options = ["--runtime", FIRN, "--device", KFD, "--device", RENDER];
    let job = Container::run(host, "job", &options, &["sh", "-c", &script])?;
    beats_on(host)?;
    Ok(job)
}

fn beats_on(host: &GpuHost) -> Result<()> {
    let count = || -> Result<usize> {
        let beats = host.node().read(format!("{BUNDLES}/job/rootfs/beats"));
        Ok(beats.map_or(0, |beats| beats.len()))
    };
    let before = count()?;
    wait_for("the loop to go on", Duration::from_secs(30), || {
        Ok((count()? > before).then_some(()))
    })
}

/// A checkpoint is refused with this code, for this node, before runc is called, and the container goes on; an audit says so
/// beforehand.
fn refused(host: &GpuHost, job: &Container<'_>, code: &str, named: &str) -> Result<()> {
    let audit = ["sh", "-c", "firn audit job --json; echo exit $?"];
    let report = host.node().run(&audit)?.stdout;
    ensure!(
        report.contains("exit 1") && report.contains(code) && report.contains(named),
        "{report}"
    );
    let said = failure(job.checkpoint("checkpoint/job"))?;
    ensure!(
        said.contains(&format!("{code}:")) && said.contains(named),
        "{said}"
    );
    ensure!(said.contains("hint: "), "no hint in:\n{said}");
    ensure!(!host.runc_has("checkpoint")?, "runc was called");
    ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
    Ok(())
}

#[test]
fn gpus_of_unknown_vendors_and_mixes_are_refused_when_they_are_in_use() -> Result<()> {
    on([host("vn-u")?], |[host]| {
        host.watch_runc()?;
        let graphics = with_open(host, &[RENDER])?;
        refused(host, &graphics, "FIRN-GPU-VENDOR", RENDER)?;
        beats_on(host)?;
        graphics.remove()?;

        let both = Container::count_with(host, "job", &["0"], 1, &["--device", KFD], &[])?;
        both.goes_on(3)?;
        let amd = "exec 3</dev/kfd; echo >/opened; sleep 1000";
        let exec = [
            "ctr",
            "tasks",
            "exec",
            "--exec-id",
            "amd",
            "--detach",
            "job",
            "sh",
            "-c",
            amd,
        ];
        host.node().run(&exec)?;
        let opened = host.node().path(format!("{BUNDLES}/job/rootfs/opened"));
        wait_for("the exec to open it", Duration::from_secs(30), || {
            Ok(opened.exists().then_some(()))
        })?;
        refused(host, &both, "FIRN-GPU-MIXED", KFD)?;
        both.goes_on(3)?;
        both.remove()?;

        // Nodes that nobody opens are no reason: a privileged container has them all.
        let idle = with_open(host, &[])?;
        idle.checkpoint("checkpoint/job")?;
        beats_on(host)?;
        idle.remove()?;
        host.idle()
    })
}

#[test]
fn amds_gpus_are_dumped_and_restored_with_their_plugin_and_no_other() -> Result<()> {
    on([host("vn-a")?], |[host]| {
        host.watch_runc()?;
        let job = with_open(host, &[KFD, RENDER])?;
        refused(host, &job, "FIRN-AMD-PLUGIN", "/usr/lib/criu")?;
        for plugin in ["amdgpu_plugin.so", "cuda_plugin.so"] {
            host.node()
                .write(format!("/usr/lib/criu/{plugin}"), "no library")?;
        }
        host.replace_runc(NOTING)?;
        job.checkpoint("checkpoint/job")?;
        beats_on(host)?;
        job.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 0)?;
        beats_on(host)?;
        let notes = host.node().read(NOTES)?;
        assert_eq!(notes, "checkpoint amdgpu_plugin.so\nrestore amdgpu_plugin.so\n");
        copy.remove()?;
        host.idle()
    })
}
