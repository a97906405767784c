//! GPUs that are not NVIDIA's. There are none here: nodes of their names open /dev/null, which CRIU can dump,
//! so that what is seen is what firn does about them.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Result, ensure};
use firn_lab::{BUNDLES, Container, GpuHost, SimGpu, cases, failure, matrix, nothing_left, on};
use firn_node::{Platform, Suite, wait_for};

const KFD: &str = "/dev/kfd";
const RENDER: &str = "/dev/dri/renderD128";
const OTHER_RENDER: &str = "/dev/dri/renderD129";

/// CRIU's log of a restore of the container, in its work directory.
const RESTORE_LOG: &str = "/var/lib/containerd/io.containerd.runtime.v2.task/default/job/restore.log";

/// Where the stand-in for runc notes what it was called for and what CRIU is to load.
const NOTES: &str = "/run/plugins";

/// Notes the plugins that CRIU would load, and lets it load none: there is no driver behind them.
const NOTING: &str = "#!/bin/sh\ncase \" $* \" in *' checkpoint '*) verb=checkpoint;; \
    *' restore '*) verb=restore;; esac\n\
    [ -z \"$verb\" ] || echo $verb $(ls \"$CRIU_LIBS_DIR\") >>/run/plugins\nmkdir -p /run/none\n\
    export CRIU_LIBS_DIR=/run/none\nexec /usr/sbin/runc \"$@\"\n";

/// A node with an NVIDIA GPU and with nodes of AMD's names.
fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    host_with(platform, name, "3")
}

/// One where these nodes open the memory device of this number, and another node of graphics that of the
/// number 3.
fn host_with(platform: Platform, name: &str, minor: &str) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(1)])?;
    host.node().run(&["mkdir", "-p", "/dev/dri"])?;
    for path in [KFD, RENDER] {
        host.node().run(&["mknod", "-m", "666", path, "c", "1", minor])?;
    }
    host.node()
        .run(&["mknod", "-m", "666", OTHER_RENDER, "c", "1", "3"])?;
    Ok(host)
}

/// A container that is given both nodes and keeps these open.
fn with_open<'h>(host: &'h GpuHost, open: &[&str]) -> Result<Container<'h>> {
    let opening: Vec<String> = open
        .iter()
        .zip(3..)
        .map(|(path, fd)| format!("exec {fd}<{path}; "))
        .collect();
    Container::beat(
        host,
        "job",
        &["--device", KFD, "--device", RENDER],
        &opening.concat(),
    )
}

fn beats_on(host: &GpuHost) -> Result<()> {
    Container::known(host, "job").beats_on()
}

/// A checkpoint is refused with this code, for this node, before runc is called, and the container continues;
/// an audit reports it beforehand.
fn expect_refused(host: &GpuHost, job: &Container<'_>, code: &str, named: &str) -> Result<()> {
    let (status, report) = host.firn_shows(&["audit", "job"])?;
    let report = report.to_string();
    ensure!(
        status == Some(1) && report.contains(code) && report.contains(named),
        "{report}"
    );
    let output = failure(job.checkpoint("checkpoint/job"))?;
    ensure!(
        output.contains(&format!("{code}:")) && output.contains(named),
        "{output}"
    );
    ensure!(output.contains("hint: "), "no hint in:\n{output}");
    ensure!(!host.runc_has("checkpoint")?, "runc was called");
    ensure!(job.status()? == "RUNNING", "the task is {}", job.status()?);
    Ok(())
}

fn gpus_in_use_of_unknown_or_mixed_vendors_are_refused(platform: Platform) -> Result<()> {
    on([host(platform, "vn-u")?], |[host]| {
        host.watch_runc()?;
        let graphics = with_open(host, &[RENDER])?;
        expect_refused(host, &graphics, "FIRN-GPU-VENDOR", RENDER)?;
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
        expect_refused(host, &both, "FIRN-GPU-MIXED", KFD)?;
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

/// A privileged container has such nodes of every host, and mostly none of AMD's. Nothing of firn's touches
/// its restore.
fn nodes_of_other_accelerators_do_not_change_a_restore(platform: Platform) -> Result<()> {
    on([host(platform, "vn-s")?], |[host]| {
        let accel = "/dev/accel/accel0";
        host.node().run(&["mkdir", "/dev/accel"])?;
        host.node().run(&["mknod", "-m", "666", accel, "c", "1", "3"])?;
        let options = ["--device", RENDER, "--device", accel];
        let script = "mv /dev/dri /dev/other; ln -s other /dev/dri; ";
        let job = Container::beat(host, "job", &options, script)?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        // The host has other numbers, and a configuration that cannot be read.
        host.node().run(&["rm", RENDER, accel])?;
        host.node().write("/etc/firn/config.toml", "no configuration")?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 0)?;
        beats_on(host)?;
        let spec = host.node().read(format!("{BUNDLES}/job/config.json"))?;
        for part in [RENDER, accel] {
            ensure!(spec.contains(part), "{part} is gone from the spec");
        }
        copy.remove()?;
        host.idle()
    })
}

/// A CDI file as AMD's toolkit writes it, with the hook that its runtime adds for a tracker of GPUs.
const AMD_CDI: &str = r#"{"cdiVersion": "0.6.0", "kind": "amd.com/gpu",
    "devices": [{"name": "0", "containerEdits": {
    "deviceNodes": [{"path": "/dev/kfd"}, {"path": "/dev/dri/renderD128"}],
    "hooks": [{"hookName": "poststop", "path": "/usr/local/bin/amd-ctk",
        "args": ["amd-ctk", "gpu-tracker", "release"]}]
}}]}"#;

/// How often AMD's tracker was informed that the container has let go of its GPUs.
fn released(host: &GpuHost) -> usize {
    let reported = host.node().read("/run/released").unwrap_or_default();
    reported
        .lines()
        .filter(|line| *line == "gpu-tracker release")
        .count()
}

fn amds_tracker_learns_of_the_end_of_a_restored_container(platform: Platform) -> Result<()> {
    on([host(platform, "vn-h")?], |[host]| {
        let tracker = tempfile::NamedTempFile::new()?;
        std::fs::write(
            tracker.path(),
            "#!/bin/sh\ncat >/dev/null\necho \"$@\" >>/run/released\n",
        )?;
        host.node()
            .install(tracker.path(), "/usr/local/bin/amd-ctk", 0o755)?;
        host.node().write("/etc/cdi/amd.json", AMD_CDI)?;
        host.node()
            .write("/usr/lib/criu/amdgpu_plugin.so", "no library")?;
        host.replace_runc(NOTING)?;
        let open = format!("exec 3<{KFD}; ");
        let job = Container::beat(host, "job", &["--device", "amd.com/gpu=0"], &open)?;
        job.checkpoint("checkpoint/job")?;
        beats_on(host)?;
        assert_eq!(released(host), 0, "it still has them");
        job.remove()?;
        assert_eq!(released(host), 1);
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 0)?;
        beats_on(host)?;
        assert_eq!(released(host), 1, "the restored container has them");
        copy.remove()?;
        assert_eq!(released(host), 2);
        host.idle()
    })
}

fn amd_gpus_are_dumped_and_restored_by_their_plugin_alone(platform: Platform) -> Result<()> {
    on([host(platform, "vn-amd")?], |[host]| {
        host.watch_runc()?;
        let job = with_open(host, &[KFD, RENDER])?;
        expect_refused(host, &job, "FIRN-AMD-PLUGIN", "/usr/lib/criu")?;
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
        // The operator has no file of CRIU's settings.
        copy.checkpoint("checkpoint/again")?;
        beats_on(host)?;
        copy.remove()?;
        host.idle()
    })
}

/// Which devices its first process has open, and which the nodes open.
fn devices(job: &Container<'_>) -> Result<Vec<String>> {
    let stat = [
        "stat",
        "-L",
        "-c",
        "%t:%T",
        "/proc/1/fd/3",
        "/proc/1/fd/4",
        KFD,
        RENDER,
    ];
    Ok(job.exec(&stat)?.lines().map(str::to_owned).collect())
}

/// On the other node the same names open other devices. CRIU opens the container's files itself, from its
/// /dev. Of AMD's common node the name counts; of a node of graphics the number: which one the container was
/// given.
///
/// `more` are lines that the operator gives CRIU.
fn files_that_criu_opens_are_the_targets(platform: Platform) -> Result<()> {
    // On one suite with mounts made as CRIU made them before.
    let more = match platform.suite {
        Suite::Forky => "",
        Suite::Trixie | Suite::Noble => "mntns-compat-mode\n",
    };
    let hosts = [
        host_with(platform, "vn-a", "3")?,
        host_with(platform, "vn-b", "5")?,
    ];
    on(hosts, |[a, b]| {
        for host in [&*a, &*b] {
            host.node()
                .write("/usr/lib/criu/amdgpu_plugin.so", "no library")?;
            host.replace_runc(NOTING)?;
        }
        // What an operator has CRIU do is done too.
        let script = "#!/bin/sh\necho $CRTOOLS_SCRIPT_ACTION >>/run/operators\n";
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), script)?;
        b.node().install(file.path(), "/run/script", 0o755)?;
        let lines = format!("action-script /run/script\n{more}");
        b.node().write("/etc/criu/runc.conf", lines)?;

        let job = with_open(a, &[KFD, RENDER])?;
        assert_eq!(devices(&job)?, ["1:3"; 4]);
        job.checkpoint("checkpoint/job")?;
        a.send_image("checkpoint/job", b)?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 0)?;
        beats_on(b)?;
        assert_eq!(devices(&copy)?, ["1:5", "1:3", "1:5", "1:3"]);
        let operators = b.node().read("/run/operators")?;
        ensure!(operators.contains("post-setup-namespaces"), "{operators}");
        let log = b.node().read(RESTORE_LOG)?;
        assert_eq!(
            log.contains("mnt-v2: "),
            more.is_empty(),
            "how CRIU has made the mounts"
        );
        b.remove_image("checkpoint/job")?;
        // CRIU takes these lines at a restore only.
        if more.is_empty() {
            copy.checkpoint("checkpoint/again")?;
            beats_on(b)?;
        }
        copy.remove()?;

        a_dev_that_cannot_be_repaired(a, b, job)
    })
}

/// A /dev that cannot be set right: the restore ends with the reason.
fn a_dev_that_cannot_be_repaired(a: &GpuHost, b: &GpuHost, job: Container<'_>) -> Result<()> {
    job.exec(&["ln", "-s", "other", "/dev/nvidia-caps"])?;
    a.remove_image("checkpoint/job")?;
    job.checkpoint("checkpoint/job")?;
    job.remove()?;
    a.send_image("checkpoint/job", b)?;
    let output = failure(Container::restore(b, "job", "checkpoint/job", 0).map(drop))?;
    for part in ["FIRN-DEV-REPAIR:", "/dev/nvidia-caps", "hint: "] {
        ensure!(output.contains(part), "no {part} in:\n{output}");
    }
    b.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(b, "job")?;
    a.idle()?;
    b.idle()
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        gpus_in_use_of_unknown_or_mixed_vendors_are_refused [FORKY];
        nodes_of_other_accelerators_do_not_change_a_restore [FORKY];
        amds_tracker_learns_of_the_end_of_a_restored_container [FORKY];
        amd_gpus_are_dumped_and_restored_by_their_plugin_alone [FORKY];
        files_that_criu_opens_are_the_targets [FORKY_V2, TRIXIE];
    })
}
