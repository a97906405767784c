//! The mounts of a restored container, on a node that has not all that its source had.
//!
//! Needs root.

use anyhow::{Result, ensure};
use firn_lab::{Container, DRIVER, FIRN, GpuHost, SimGpu, failure, nothing_left, on};
use firn_node::{Cgroup, Suite};

const SOCKET: &str = "/run/nvidia-persistenced/socket";
const TOOL: &str = "/usr/bin/nvidia-debugdump";

fn host(suite: Suite, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(suite, Cgroup::Auto, name, &[SimGpu::h200(gpu)])
}

/// A bind mount of `ctr run`: what lies at this path of the node, at the same path of the container.
fn mount(path: &str) -> [String; 2] {
    [
        "--mount".to_owned(),
        format!("type=bind,src={path},dst={path},options=rbind:ro"),
    ]
}

/// Numbers of the node that gives unified memory.
fn uvm(said: &str) -> String {
    said.trim().to_owned()
}

fn mounts_of_the_target(suite: Suite, name: &str) -> Result<()> {
    on(
        [
            host(suite, &format!("{name}-a"), 1)?,
            host(suite, &format!("{name}-b"), 2)?,
        ],
        |[a, b]| {
            let name = format!("libnvidia-extra.so.{DRIVER}");
            let (library, elsewhere) = (
                format!("/usr/lib64/{name}"),
                format!("/usr/local/nvidia/lib64/{name}"),
            );
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

            let said = failure(Container::restore(b, "job", "checkpoint/job", 1).map(drop))?;
            ensure!(
                said.contains("FIRN-MOUNT-SOURCE-MISSING:") && said.contains(&library),
                "{said}"
            );
            ensure!(!b.runc_has("restore")?, "runc was called");
            b.node().run(&["ctr", "containers", "delete", "job"])?;
            nothing_left(b, "job")?;

            b.node().write(&elsewhere, "of the target\n")?;
            let log = b.log_length()?;
            let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
            copy.goes_on(3)?;
            assert_eq!(copy.exec(&["cat", &library])?, "of the target\n");
            assert_eq!(
                copy.exec(&["cat", SOCKET, TOOL])?,
                "",
                "what the target lacks is not empty"
            );
            let told = b.log_since(log)?;
            for path in [SOCKET, TOOL] {
                ensure!(
                    told.contains(&format!("mount {path}: this node has none")),
                    "{told}"
                );
            }
            ensure!(
                !told.contains("were not as CRIU's script had left them"),
                "the nodes were set right too late:\n{told}"
            );
            let after = uvm(&copy.exec(&stat)?);
            assert_ne!(after, before, "the nodes do not differ: this shows nothing");
            assert_eq!(after, uvm(&b.node().run(&stat)?.stdout));
            copy.checkpoints_again("checkpoint/job")?;
            copy.remove()?;
            b.idle()
        },
    )
}

/// What a container needs to find the driver's libraries by their short names, and nothing of it is in its image.
const TRACES: [&str; 3] = [
    "sh",
    "-c",
    "cd /usr/lib/x86_64-linux-gnu; readlink libcuda.so.1; readlink libnvidia-ml.so.1; md5sum /etc/ld.so.cache",
];

#[test]
fn programs_started_after_a_restore_without_written_files_find_the_driver() -> Result<()> {
    on(
        [host(Suite::Forky, "mt-l-a", 1)?, host(Suite::Forky, "mt-l-b", 2)?],
        |[a, b]| {
            for host in [&*a, &*b] {
                host.node().run(&["rm", "/etc/cdi/nvidia.json"])?;
                let generate = ["firn", "cdi", "generate", "--output", "/etc/cdi/nvidia.yaml"];
                host.node().run(&generate)?;
            }
            let options = ["--runtime", FIRN, "--device", "nvidia.com/gpu=0"];
            let count = ["/bin/gpu-counter", "--out", "/counter.log", "--interval-ms", "50"];
            let source = Container::run(a, "job", &options, &count)?.counting(1);
            source.goes_on(3)?;
            let made = source.exec(&TRACES)?;
            ensure!(
                made.contains(DRIVER) && made.contains("ld.so.cache"),
                "the hooks have made nothing: {made}"
            );
            let checkpoint = [
                "ctr",
                "containers",
                "checkpoint",
                "--task",
                "job",
                "checkpoint/job",
            ];
            a.node().run(&checkpoint)?;
            source.remove()?;
            a.send_image("checkpoint/job", b)?;

            let restore = ["ctr", "containers", "restore", "--live", "job", "checkpoint/job"];
            b.node().run(&restore)?;
            let copy = Container::known(b, "job").counting(1);
            copy.goes_on(3)?;
            assert_eq!(copy.exec(&TRACES)?, made);
            let again = copy.exec(&["/bin/gpu-counter", "--iterations", "2"])?;
            ensure!(again.contains("iter=1 "), "{again}");
            copy.remove()?;
            b.idle()
        },
    )
}

#[test]
fn a_node_without_daemons_and_with_its_driver_elsewhere_restores_on_forky() -> Result<()> {
    mounts_of_the_target(Suite::Forky, "mt-f")
}

#[test]
fn a_node_without_daemons_and_with_its_driver_elsewhere_restores_on_trixie() -> Result<()> {
    mounts_of_the_target(Suite::Trixie, "mt-t")
}
