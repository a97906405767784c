//! Children that were forked from a CUDA process keep its GPUs open and mapped, and use no CUDA themselves:
//! data loaders and compile workers of PyTorch. They move with their parent, by firn's plugin for CRIU.
//!
//! Needs root.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::shim::oci::CheckpointOptions;
use firn_lab::{
    Container, GpuHost, LOG, SimGpu, Task, cases, describe, failure, matrix, nothing_left_but_metadata, on,
};
use firn_node::{Platform, wait_for};

/// How long a node may be waited for.
const LIMIT: Duration = Duration::from_secs(60);

const PLUGIN: &str = "/usr/local/bin/libfirn_criu.so";

/// The job's processes but the first: parent, whether it lives, number of threads; of NVIDIA's nodes the
/// descriptors with the device's number, and the names of mapped files.
const FAMILY: &str = "for p in /proc/[0-9]*; do pid=${p#/proc/}; read name <$p/comm || continue; \
    test $name = gpu-counter && test $pid != 1 || continue; \
    set -- $(sed 's/.*) //' $p/stat); test $1 = Z || set -- lives $2; \
    echo process $pid $2 $1 $(ls $p/task | wc -l); \
    for f in $p/fd/*; do name=$(readlink $f); case $name in /dev/nvidia*) \
    echo fd $pid:${f##*/} $name $(stat -L -c %t:%T $f);; esac; done; \
    sed -n \"s:.* \\(/[^ ]*\\).*:mapped $pid \\1:p\" $p/maps | grep -e nvidia -e zero | sort -u; \
    done 2>/dev/null";

/// Every kind of child that moves, and how many processes that makes.
const CHILDREN: [&str; 5] = [
    "--forks",
    "idle,grandchild,orphan,zombie,threads,init",
    "--pool=4",
    "--server=2",
    "--mib=8",
];
const PROCESSES: usize = 7 + 4 + 3;

/// A node with one GPU that no other node has.
fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

fn job<'h>(host: &'h GpuHost, habits: &[&str]) -> Result<Container<'h>> {
    let job = Container::count(host, "job", &["0"], 1, habits)?;
    job.goes_on(3)?;
    Ok(job)
}

/// The lines of [`FAMILY`] that begin with a word.
fn family(job: &Container<'_>, of: &str) -> Result<Vec<String>> {
    let lines = job.exec(&["sh", "-c", FAMILY])?;
    let lines = lines.lines().filter(|line| line.starts_with(of));
    Ok(lines.map(str::to_owned).collect())
}

/// The children of a restored job are as they were, and have the same descriptors, of this node's devices,
/// and of the mappings zeroed memory.
fn is_family_of(copy: &Container<'_>, host: &GpuHost, source: &[String]) -> Result<()> {
    let now = family(copy, "")?;
    let column = |all: &[String], of: &str, at: usize| -> Vec<String> {
        let lines = all.iter().filter(|line| line.starts_with(of));
        lines
            .map(|line| line.split(' ').take(at).collect::<Vec<_>>().join(" "))
            .collect()
    };
    for (of, columns) in [("process ", 5), ("fd ", 2), ("mapped ", 2)] {
        let (before, now) = (column(source, of, columns), column(&now, of, columns));
        ensure!(now == before && !now.is_empty(), "{now:?}, not {before:?}");
    }
    for line in &now {
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "fd" => {
                let device = host.node().run(&["stat", "-c", "%t:%T", words[2]])?.stdout;
                ensure!(device.trim() == words[3], "{line} is not {device} of its node");
            }
            "mapped" => ensure!(words[2].contains("zero"), "{line}"),
            _ => {}
        }
    }
    Ok(())
}

fn children_move_with_their_parent(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "fc-a", 1)?, host(platform, "fc-b", 2)?];
    on(hosts, |[a, b]| {
        let source = job(a, &CHILDREN)?;
        let before = family(&source, "")?;
        let count = |of: &str| before.iter().filter(|line| line.contains(of)).count();
        ensure!(count("process ") == PROCESSES, "{before:?}");
        ensure!(count(" Z ") == 1 && count(" lives 3") == 1, "{before:?}");
        // The zombie, and the server with its children, have nothing of the GPU.
        let holders = PROCESSES - 4;
        ensure!(
            count("fd ") >= 3 * holders && count("mapped ") >= holders,
            "{before:?}"
        );
        let audit = a.firn(&["audit", "job"])?.to_string();
        ensure!(audit.contains("inherited_gpus"), "{audit}");
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        let after = family(&source, "")?;
        ensure!(after == before, "in the source {before:?} became {after:?}");
        source.remove()?;
        a.idle()?;

        a.send_image("checkpoint/job", b)?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        is_family_of(&copy, b, &before)?;
        copy.checkpoints_again("checkpoint/job")?;
        copy.remove()?;
        b.idle()
    })
}

fn a_node_without_the_plugin_refuses(platform: Platform) -> Result<()> {
    on([host(platform, "fc-none", 1)?], |[host]| {
        host.watch_runc()?;
        let job = job(host, &["--forks=idle"])?;
        host.node().run(&["mv", PLUGIN, "/tmp/plugin"])?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(
            output.contains("FIRN-CRIU-PLUGIN:") && output.contains("(gpu-counter)"),
            "{output}"
        );
        ensure!(!host.runc_has("checkpoint")?, "runc was called");
        let audit = host.node().run(&["sh", "-c", "firn audit job || true"])?.stdout;
        ensure!(audit.contains("FIRN-CRIU-PLUGIN"), "{audit}");
        job.goes_on(3)?;
        host.node().run(&["mv", "/tmp/plugin", PLUGIN])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;

        host.node().run(&["mv", PLUGIN, "/tmp/plugin"])?;
        let output = failure(Container::restore(host, "job", "checkpoint/job", 1))?;
        ensure!(output.contains("FIRN-CRIU-PLUGIN:"), "{output}");
        nothing_left_but_metadata(host, "job")?;
        host.node().run(&["mv", "/tmp/plugin", PLUGIN])?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.remove()?;
        host.idle()
    })
}

/// An operator's own directory of plugins, read at every checkpoint. firn adds its plugin from where it is,
/// and only if something is inherited.
fn plugins_of_the_operator_are_used_too(platform: Platform) -> Result<()> {
    const LIBS: &str = "/opt/plugins";
    on([host(platform, "fc-libs", 1)?], |[host]| {
        let node = host.node();
        // What CRIU's own configuration names is not used.
        node.write("/etc/criu/runc.conf", "libdir /nonexistent\n")?;
        let source = job(host, &["--forks=idle"])?;
        node.run(&["mkdir", LIBS])?;
        host.configure(&format!("[criu]\nlibs-dir = \"{LIBS}\"\n"))?;
        source.checkpoint("checkpoint/from-shim")?;
        node.run(&["mv", PLUGIN, LIBS])?;
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        source.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.remove()?;

        let opens = "exec 3<>/dev/nvidiactl; \
                     gpu-counter --out /counter.log --interval-ms 50 --mib 8 3<&- & wait";
        let parent = Container::script(host, "parent", &["0"], 1, &[], opens)?;
        parent.goes_on(3)?;
        let output = failure(parent.checkpoint("checkpoint/parent"))?;
        ensure!(output.contains("FIRN-DUMP:"), "CRIU has the plugin: {output}");
        parent.goes_on(3)?;
        parent.remove()?;
        host.idle()
    })
}

/// Every file that a dump makes may be there: of an earlier dump into the same directory, and of the first
/// dump of a checkpoint for which CRIU dumps twice, because firn cannot copy memory that is mapped nowhere.
fn a_second_dump_into_one_directory_is_whole(platform: Platform) -> Result<()> {
    on([host(platform, "fc-twice", 1)?], |[host]| {
        let more = ["--semaphores", "--shared-words=detached"];
        let habits = [&CHILDREN[..], &more].concat();
        for config in ["", "[images]\ninline-copy = \"firn\"\n"] {
            host.configure(config)?;
            let job = job(host, &habits)?;
            let before = family(&job, "")?;
            for exit in [false, false, true] {
                let mut options = CheckpointOptions::new();
                options.exit = exit;
                let task = Task::of(host, "job")?;
                let pending = task.checkpoint("/srv/image", &options)?;
                let output = describe(&task.end(pending), |_| "done".to_owned());
                ensure!(output == "done", "{config}: {output}");
                if !exit {
                    job.goes_on(3)?;
                }
            }
            job.becomes("STOPPED")?;
            let _ = job.task(&["delete"]);
            let restore = ["firn", "restore", "--dir", "/srv/image", "job"];
            host.node().run(&restore).context(config)?;
            job.goes_on(3).context(config)?;
            is_family_of(&job, host, &before)?;
            job.remove()?;
            host.node().run(&["rm", "-r", "/srv/image"])?;
        }
        host.idle()
    })
}

/// The driver does not know a process yet that is in cuInit, and CRIU cannot dump what it has open. By then
/// the command has paused it.
fn a_process_in_cu_init_is_waited_for(platform: Platform) -> Result<()> {
    on([host(platform, "fc-init", 1)?], |[host]| {
        let starting = |ms: u32| {
            let habit = format!("--slow-start-ms={ms}");
            let job = Container::count(host, "job", &["0"], 1, &[&habit])?;
            wait_for("the node of the driver", LIMIT, || {
                let open = job.exec(&["sh", "-c", "ls -l /proc/1/fd"])?;
                Ok(open.contains("nvidiactl").then_some(()))
            })?;
            Ok::<_, anyhow::Error>(job)
        };
        // It had no iteration before: it was in cuInit.
        let waited = |words: &[&str]| {
            let job = starting(3500)?;
            ensure!(job.lines()?.reached(1) == 0, "it has started");
            let begun = Instant::now();
            host.node().run(&[&["firn"], words].concat())?;
            ensure!(begun.elapsed() > Duration::from_millis(500), "nobody has waited");
            job.goes_on(3)?;
            Ok::<_, anyhow::Error>(job)
        };
        waited(&["audit", "job"])?.remove()?;
        let job = waited(&["checkpoint", "job", "checkpoint/job"])?;
        job.remove()?;
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        copy.remove()?;
        host.remove_image("checkpoint/job")?;

        let job = starting(600_000)?;
        let (code, shown) = host.firn_shows(&["checkpoint", "job", "checkpoint/job"])?;
        ensure!(
            code == Some(3)
                && shown["failure"]["code"] == "FIRN-GPU-FD"
                && shown["containers"][0]["state"] == "running",
            "{shown}"
        );
        job.remove()?;
        host.idle()
    })
}

/// A compile worker of inductor has CUDA and no context, and its children have what it has open. Another
/// program like it may have imported memory.
fn a_compile_worker_moves_with_its_job(platform: Platform) -> Result<()> {
    const WORKER: &str = "/opt/torch/_inductor/compile_worker/__main__.py";
    let hosts = [host(platform, "fc-comp-a", 1)?, host(platform, "fc-comp-b", 2)?];
    on(hosts, |[a, b]| {
        a.watch_runc()?;
        is_refused(a, job(a, &["--compiles=/opt/train.py"])?, "FIRN-IPC:")?;

        let source = job(a, &["--compiles", WORKER])?;
        let before = family(&source, "process ")?;
        ensure!(before.len() == 3, "{before:?}");
        let audit = a.node().run(&["firn", "audit", "job"])?.stdout;
        ensure!(!audit.contains("FIRN-IPC"), "{audit}");
        source.checkpoint("checkpoint/job")?;
        source.goes_on(3)?;
        source.remove()?;
        a.idle()?;

        a.send_image("checkpoint/job", b)?;
        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        let after = family(&copy, "process ")?;
        ensure!(after == before, "{before:?} became {after:?}");
        copy.checkpoints_again("checkpoint/job")?;
        copy.remove()?;
        b.idle()
    })
}

fn is_refused(host: &GpuHost, job: Container<'_>, code: &str) -> Result<()> {
    let output = failure(job.checkpoint("checkpoint/job"))?;
    ensure!(
        output.contains(code) && output.contains("(gpu-counter)"),
        "{output}"
    );
    ensure!(!host.runc_has("checkpoint")?, "runc was called");
    job.goes_on(3)?;
    job.remove()
}

/// A child that has opened a node itself, or that is none any more, may use the driver: it is not known to
/// have inherited all.
fn other_children_are_refused(platform: Platform) -> Result<()> {
    on([host(platform, "fc-own", 1)?], |[host]| {
        host.watch_runc()?;
        is_refused(host, job(host, &["--forks=opens"])?, "FIRN-GPU-FD:")?;
        is_refused(host, job(host, &["--forks=vfork"])?, "FIRN-VFORK:")?;
        let script = format!("gpu-counter --out {LOG} --interval-ms 50 --mib 8 --forks orphan & wait");
        let orphan = Container::script(host, "job", &["0"], 1, &[], &script)?;
        orphan.goes_on(3)?;
        is_refused(host, orphan, "FIRN-GPU-FD:")?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        children_move_with_their_parent [FORKY, TRIXIE];
        a_second_dump_into_one_directory_is_whole [FORKY, FORKY_V2];
        a_compile_worker_moves_with_its_job [FORKY, TRIXIE];
        a_process_in_cu_init_is_waited_for [FORKY, FORKY_V2];
        a_node_without_the_plugin_refuses [FORKY];
        plugins_of_the_operator_are_used_too [FORKY];
        other_children_are_refused [FORKY];
    })
}
