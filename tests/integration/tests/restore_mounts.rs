//! The mounts of a restored container, on a node that has not all that its source had.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Result, ensure};
use firn_lab::{
    COUNTER, Container, DRIVER, FIRN, GpuHost, Lines, SimGpu, cases, failure, matrix, nothing_left, on,
};
use firn_node::{Platform, Suite, wait_for};

const WAIT: Duration = Duration::from_secs(60);

const SOCKET: &str = "/run/nvidia-persistenced/socket";
const TOOL: &str = "/usr/bin/nvidia-debugdump";

fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

/// A bind mount of `ctr run`: what lies at this path of the node, at the same path of the container.
fn mount(path: &str) -> [String; 2] {
    [
        "--mount".to_owned(),
        format!("type=bind,src={path},dst={path},options=rbind:ro"),
    ]
}

/// Numbers of the node that gives unified memory.
fn uvm(output: &str) -> String {
    output.trim().to_owned()
}

/// A CDI file that alone leads to a driver in /srv.
const DRIVER_IN_SRV: &str = "cdiVersion: 0.5.0
kind: example.com/driver
devices: [{name: '0', containerEdits: {env: [A=B]}}]
containerEdits: {mounts: [{hostPath: /srv/driver/lib/libany.so.1, containerPath: /usr/lib64/libany.so.1}]}
";

/// A restore is refused for want of this file.
fn refused_without(host: &GpuHost, file: &str) -> Result<()> {
    let output = failure(Container::restore(host, "job", "checkpoint/job", 1).map(drop))?;
    ensure!(
        output.contains("FIRN-MOUNT-SOURCE-MISSING:") && output.contains(file),
        "{output}"
    );
    ensure!(!host.runc_has("restore")?, "runc was called");
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")
}

/// What the target lacks is empty and reported, and its nodes are right before a process runs.
fn mounts_are_reported(copy: &Container<'_>, reported: &str) -> Result<()> {
    assert_eq!(
        copy.exec(&["cat", SOCKET, TOOL])?,
        "",
        "what the target lacks is not empty"
    );
    for path in [SOCKET, TOOL] {
        ensure!(
            reported.contains(&format!("mount {path}: this node has none")),
            "{reported}"
        );
    }
    ensure!(
        !reported.contains("were not as CRIU's script had left them"),
        "the nodes were set right too late:\n{reported}"
    );
    Ok(())
}

/// The target has no daemons and its driver in another directory: one that is searched, or one that a CDI
/// file names.
fn a_node_with_its_driver_elsewhere_restores(platform: Platform) -> Result<()> {
    let (dir, cdi) = match platform.suite {
        Suite::Forky => ("/srv/driver/lib", Some(DRIVER_IN_SRV)),
        Suite::Trixie | Suite::Noble => ("/usr/local/nvidia/lib64", None),
    };
    on(
        [host(platform, "mt-a", 1)?, host(platform, "mt-b", 2)?],
        |[a, b]| {
            let name = format!("libnvidia-extra.so.{DRIVER}");
            let (library, elsewhere) = (format!("/usr/lib64/{name}"), format!("{dir}/{name}"));
            for (path, text) in [
                (SOCKET, "socket\n"),
                (TOOL, "tool\n"),
                (&library, "of the source\n"),
            ] {
                a.node().write(path, text)?;
            }
            b.node().run(&["rm", "-rf", SOCKET, TOOL, &library])?;
            b.watch_runc()?;
            let options = [SOCKET, TOOL, &library].map(mount).concat();
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let source = Container::count_with(a, "job", &["0"], 1, &options, &[])?;
            source.goes_on(3)?;
            let stat = ["stat", "-c", "%t:%T", "/dev/nvidia-uvm"];
            let before = uvm(&source.exec(&stat)?);
            source.checkpoint("checkpoint/job")?;
            source.remove()?;
            a.send_image("checkpoint/job", b)?;

            if cdi.is_some() {
                b.node().write(&elsewhere, "of the target\n")?;
            }
            refused_without(b, &library)?;
            b.node().write(&elsewhere, "of the target\n")?;
            if let Some(cdi) = cdi {
                b.node().write("/etc/cdi/other.yaml", cdi)?;
            }
            let log = b.log_length()?;
            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            assert_eq!(copy.exec(&["cat", &library])?, "of the target\n");
            mounts_are_reported(&copy, &b.log_since(log)?)?;
            let after = uvm(&copy.exec(&stat)?);
            assert_ne!(after, before, "the nodes do not differ: this shows nothing");
            assert_eq!(after, uvm(&b.node().run(&stat)?.stdout));
            copy.checkpoints_again("checkpoint/job")?;
            copy.remove()?;
            b.idle()
        },
    )
}

/// What a container needs to find the driver's libraries by their short names, and nothing of it is in its
/// image.
const TRACES: [&str; 3] = [
    "sh",
    "-c",
    "cd /usr/lib/x86_64-linux-gnu; readlink libcuda.so.1; readlink libnvidia-ml.so.1; \
     md5sum /etc/ld.so.cache",
];

fn programs_started_after_a_restore_find_the_driver(platform: Platform) -> Result<()> {
    on(
        [host(platform, "mt-l-a", 1)?, host(platform, "mt-l-b", 2)?],
        |[a, b]| {
            for host in [&*a, &*b] {
                host.node().run(&["rm", "/etc/cdi/nvidia.json"])?;
                let generate = ["firn", "cdi", "generate", "--output", "/etc/cdi/nvidia.yaml"];
                host.node().run(&generate)?;
            }
            let options = ["--runtime", FIRN, "--device", "nvidia.com/gpu=0"];
            let source = Container::run(a, "job", &options, &COUNT_IN_MEMORY)?;
            counts_in_memory(&source)?;
            let made = source.exec(&TRACES)?;
            ensure!(
                made.contains(DRIVER) && made.contains("ld.so.cache"),
                "the hooks have made nothing: {made}"
            );
            let copy = without_written_files(a, source, b)?;
            assert_eq!(copy.exec(&TRACES)?, made);
            copy.remove()?;
            b.idle()
        },
    )
}

/// A job that never has a file open that a copy without written files lacks. Its log is in /dev/shm, which
/// is part of its memory; the link is a written file, so a copy has a log of its own.
const COUNT_IN_MEMORY: [&str; 3] = [
    "sh",
    "-c",
    "ln -s /dev/shm/counter.log /counter.log; exec gpu-counter --out /counter.log --interval-ms 50",
];

/// Waits for three iterations of a job that counts in memory.
fn counts_in_memory(source: &Container<'_>) -> Result<()> {
    let read = ["sh", "-c", "cat /counter.log; :"];
    wait_for("3 iterations in /dev/shm", WAIT, || {
        let lines = Lines::parse(&source.exec(&read)?);
        Ok((lines.reached(1) >= 3).then_some(()))
    })
}

/// Moves a job from `a` to `b` without the files that it has written. It continues, and programs started in
/// it find the driver.
fn without_written_files<'b>(a: &GpuHost, source: Container<'_>, b: &'b GpuHost) -> Result<Container<'b>> {
    let image = ["--task", "job", "checkpoint/job"];
    a.node()
        .run(&[&["ctr", "containers", "checkpoint"][..], &image].concat())?;
    source.remove()?;
    a.send_image("checkpoint/job", b)?;
    let restore = ["ctr", "containers", "restore", "--live", "job", "checkpoint/job"];
    b.node().run(&restore)?;
    let copy = Container::known(b, "job").counting(1);
    copy.goes_on(3)?;
    let again = copy.exec(&["/bin/gpu-counter", "--iterations", "2"])?;
    ensure!(again.contains("iter=1 "), "{again}");
    Ok(copy)
}

/// The source's CDI file has the libraries in the directory of one distribution, the target's in that of
/// another, and the spec of the restored container is made by the target's.
fn libraries_stay_where_the_checkpoint_has_them(platform: Platform) -> Result<()> {
    on(
        [host(platform, "mt-d-a", 1)?, host(platform, "mt-d-b", 2)?],
        |[a, b]| {
            for host in [&*a, &*b] {
                host.node().run(&["rm", "/etc/cdi/nvidia.json"])?;
                let generate = ["firn", "cdi", "generate", "--output", "/etc/cdi/nvidia.json"];
                host.node().run(&generate)?;
                host.configure("[create]\nvisible-devices = true\n")?;
            }
            let there = "/hostPath/!s#/usr/lib/x86_64-linux-gnu#/usr/lib64#g";
            a.node().run(&["sed", "-i", there, "/etc/cdi/nvidia.json"])?;
            let options = ["--runtime", FIRN, "--env", "NVIDIA_VISIBLE_DEVICES=0"];
            let source = Container::run(a, "job", &options, &COUNT_IN_MEMORY)?;
            counts_in_memory(&source)?;
            let mounted = ["sh", "-c", "grep libcuda /proc/1/mountinfo | cut -d ' ' -f 5"];
            let library = format!("/usr/lib64/libcuda.so.{DRIVER}\n");
            assert_eq!(source.exec(&mounted)?, library);
            // Without its written files, too: what this node's hooks would make leads nowhere there.
            let copy = without_written_files(a, source, b)?;
            assert_eq!(copy.exec(&mounted)?, library);
            copy.checkpoints_again("checkpoint/job")?;
            copy.remove()?;
            b.idle()
        },
    )
}

/// A directory of a configMap, and a file of it once more as subPath: the kubelet's mounts.
const CONFIG: [&str; 2] = [
    "type=bind,src=/srv/config,dst=/config,options=rbind:ro:rprivate",
    "type=bind,src=/srv/subpath/0,dst=/app.conf,options=rbind:ro:rprivate",
];

/// With the stock shim the file of the second mount can be written in the copy.
fn read_only_mounts_are_read_only_after_a_restore(platform: Platform) -> Result<()> {
    on([host(platform, "mt-ro", 1)?], |[a]| {
        let make = "mkdir -p /srv/config/data /srv/subpath; echo text >/srv/config/data/app.conf; \
                    touch /srv/subpath/0; mount --bind /srv/config/data/app.conf /srv/subpath/0";
        a.node().run(&["sh", "-ec", make])?;
        for gpu in [true, false] {
            let options = ["--runtime", FIRN, "--mount", CONFIG[0], "--mount", CONFIG[1]];
            let source = if gpu {
                Container::count_with(a, "job", &["0"], 1, &options, &[])?
            } else {
                Container::beat(a, "job", &options, "")?
            };
            let write = |container: &Container<'_>| {
                let script = "for file in /config/data/app.conf /app.conf; do
                                  if (echo more >>$file) 2>/dev/null; then echo $file is written; fi
                              done; grep -E ' /(config|app.conf) ' /proc/self/mountinfo | cut -d ' ' -f 5,6
                              echo all";
                container.exec(&["sh", "-c", script])
            };
            let before = write(&source)?;
            ensure!(
                !before.contains("written") && before.contains("/app.conf ro"),
                "{before}"
            );
            source.checkpoint("checkpoint/job")?;
            source.remove()?;
            // With its files: it may have had one of them open.
            let (copy, _) = Container::restore(a, "job", "checkpoint/job", usize::from(gpu))?;
            assert_eq!(write(&copy)?, before, "gpu: {gpu}");
            copy.remove()?;
            a.remove_image("checkpoint/job")?;
        }
        a.node().run(&["umount", "/srv/subpath/0"])?;
        a.idle()
    })
}

/// A volume with files that a job has open: one that it writes, one that it appends to, one whose name is
/// deleted.
const VOLUME: &str = "type=bind,src=/srv/data,dst=/data,options=rbind:rw";
const USE: &str = "cd /data; exec 3<>state; exec 4>>log; exec 5<>temporary; rm temporary; cd /;";

/// CRIU would refuse it when the GPU state has been read already.
fn a_volume_whose_files_have_changed_refuses_a_restore(platform: Platform) -> Result<()> {
    on([host(platform, "mt-vol", 1)?], |[host]| {
        let node = host.node();
        let sh = |script: &str| {
            node.run(&["sh", "-ec", &format!("cd /srv/data; {script}")])
                .map(drop)
        };
        for gpus in [&["0"][..], &[]] {
            host.watch_runc()?;
            node.run(&["mkdir", "-p", "/srv/data"])?;
            sh("rm -f *; echo state >state; echo text >temporary")?;
            let script = format!("{USE} {COUNTER}");
            let script = match gpus {
                [] => format!("{USE} while :; do echo x >>/counter.log; sleep 0.1; done"),
                _ => script,
            };
            let source = Container::script(host, "job", gpus, 1, &["--mount", VOLUME], &script)?;
            wait_for("its files", WAIT, || {
                Ok(source
                    .exec(&["sh", "-c", "[ -e /counter.log ] && [ ! -e /data/temporary ]"])
                    .ok()
                    .map(drop))
            })?;
            source.checkpoint("checkpoint/job")?;
            source.remove()?;
            let restores = || -> Result<()> {
                let (copy, _) = Container::restore(host, "job", "checkpoint/job", gpus.len())?;
                copy.remove()?;
                host.idle()
            };
            let refused = |code: &str| -> Result<()> {
                let output =
                    failure(Container::restore(host, "job", "checkpoint/job", gpus.len()).map(drop))?;
                ensure!(
                    output.contains(code) && output.contains("/srv/data/state"),
                    "{output}"
                );
                ensure!(!host.runc_has("restore")?, "runc was called");
                node.run(&["ctr", "containers", "delete", "job"])?;
                let dry = failure(host.firn(&["restore", "checkpoint/job", "--dry-run"]).map(drop))?;
                ensure!(dry.contains(code) && dry.contains("/srv/data/state"), "{dry}");
                nothing_left(host, "job")
            };
            sh("mv state kept; cp kept state; echo more >>state; echo more >>log")?;
            refused("FIRN-FILE-SIZE")?;
            sh("truncate --size 3 state")?;
            refused("FIRN-FILE-SIZE")?;
            sh("rm state")?;
            refused("FIRN-FILE-GONE")?;
            sh("cp kept state; echo more >>state; truncate --size 6 state")?;
            restores()?;
            host.remove_image("checkpoint/job")?;
        }
        Ok(())
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        programs_started_after_a_restore_find_the_driver [FORKY];
        read_only_mounts_are_read_only_after_a_restore [FORKY, TRIXIE];
        libraries_stay_where_the_checkpoint_has_them [FORKY];
        a_node_with_its_driver_elsewhere_restores [FORKY, TRIXIE];
        a_volume_whose_files_have_changed_refuses_a_restore [FORKY, TRIXIE];
    })
}
