//! A move to a node that lacks one fact of the container is refused before the container stands still, by
//! code and name. One job needs everything; the other node has everything, less one thing at a time.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{BUNDLES, COUNTER, Container, FREE_HUGE_PAGES, GpuHost, HugePages, on};
use firn_node::{Platform, wait_for};

use super::failures::refused;
use super::moves::{join, knows_nothing, moved, not_moved, pair};
use super::{copy, counter, host, nothing_left};

const WAIT: Duration = Duration::from_secs(60);

/// A fact that the other node lacks.
struct Lack<'a> {
    what: &'a str,
    /// A part of the error.
    part: &'a str,
    /// Options of `firn move`.
    options: &'a [&'a str],
    /// What takes the fact away on the other node, and what brings it back.
    take: &'a str,
    bring: &'a str,
}

/// One that options alone make.
const fn asked<'a>(what: &'a str, part: &'a str, options: &'a [&'a str]) -> Lack<'a> {
    Lack {
        what,
        part,
        options,
        take: ":",
        bring: ":",
    }
}

/// One of the node.
const fn taken<'a>(what: &'a str, part: &'a str, take: &'a str, bring: &'a str) -> Lack<'a> {
    Lack {
        what,
        part,
        options: &[],
        take,
        bring,
    }
}

/// One of its GPUs and their driver, which are set up with these options of simgpu.
const fn gpus<'a>(what: &'a str, part: &'a str, setup: &'a str) -> Lack<'a> {
    taken(what, part, setup, "simgpu teardown; simgpu setup")
}

/// What the job needs of its node, and both nodes have: an address, a directory with a file, a program of a
/// hook.
const PREPARE: &str = r#"ip address add 10.99.0.1/32 dev lo
    mkdir -p /srv/data /etc/cdi
    echo state >/srv/data/state
    touch -d '1970-01-02 0:00' /srv/data/state
    printf '#!/bin/sh\nexit 0\n' >/srv/hook
    chmod 755 /srv/hook
    printf '%s' '{"cdiVersion": "0.6.0", "kind": "firn.test/hook", "devices": [{"name": "one",
        "containerEdits": {"hooks": [{"hookName": "createRuntime", "path": "/srv/hook"}]}}]}' \
        >/etc/cdi/hook.json
    sed '/^flags/s/ sse4_2 / /; /^flags/s/ ssse3 / /' /proc/cpuinfo >/srv/cpuinfo
    sed 's/^MemAvailable: .*/MemAvailable: 9 kB/; s/^SwapFree: .*/SwapFree: 0 kB/' /proc/meminfo >/srv/meminfo
"#;

/// It listens at an address of its node, and at all, and reads a file of its volume.
const LISTEN: &str =
    "exec 7</data/state\nbusybox httpd -f -p 10.99.0.1:8098 -h /data &\nnc -ll -p 8099 -e cat &\n";

/// What it has of its node.
const OF_THE_NODE: [&str; 3] = [
    "--net-host",
    "--mount",
    "type=bind,src=/srv/data,dst=/data,options=rbind:ro",
];

const LACKS: [Lack<'_>; 23] = [
    asked("a GPU of this index", "FIRN-GPU-UNKNOWN: ", &["--gpus", "7"]),
    asked("so many GPUs for one", "FIRN-GPU-COUNT: ", &["--gpus", "0,1"]),
    asked("a map of GPUs", "FIRN-MAP-SYNTAX: ", &["--gpu-map", "GPU-1=2"]),
    Lack {
        take: "printf '#!/bin/sh\\nfirn \"$@\" | sed s/0.1.0/0.0.9/\\n' >/srv/older; chmod 755 /srv/older",
        bring: "rm /srv/older",
        ..asked("this firn", "it has firn 0.0.9", &["--remote-firn", "/srv/older"])
    },
    taken(
        "the name",
        "it has a container or a snapshot job",
        "ctr containers create localhost/firn-test:latest job",
        "ctr containers delete job",
    ),
    taken(
        "CRIU",
        "FIRN-CRIU-MISSING: ",
        "command -v criu >/srv/at && mv $(cat /srv/at) /srv/criu",
        "mv /srv/criu $(cat /srv/at)",
    ),
    taken(
        "a configuration without mistakes",
        "FIRN-CONFIG-INVALID: ",
        "mkdir -p /etc/firn; printf '[restore]\\ngpu = [\"0\"]\\n' >/etc/firn/config.toml",
        "rm /etc/firn/config.toml",
    ),
    taken(
        "firn-gpu",
        "cannot read the GPUs of this node",
        "mv /usr/local/bin/firn-gpu /srv",
        "mv /srv/firn-gpu /usr/local/bin",
    ),
    taken(
        "memory",
        "FIRN-HOST-MEMORY: ",
        "mount --bind /srv/meminfo /proc/meminfo",
        "umount /proc/meminfo",
    ),
    taken(
        "room on its disk",
        "FIRN-IMAGE-SPACE: ",
        "mkdir -p /var/lib/firn/restore; mount -t tmpfs -o size=16k tmpfs /var/lib/firn/restore",
        "umount /var/lib/firn/restore",
    ),
    taken(
        "the directory of a mount",
        "FIRN-MOUNT-SOURCE-MISSING: ",
        "mv /srv/data /srv/no-data",
        "mv /srv/no-data /srv/data",
    ),
    taken(
        "a file of a volume",
        "FIRN-FILE-GONE: a process had /data/state open, and /srv/data/state is not there",
        "mv /srv/data/state /srv/no-state",
        "mv /srv/no-state /srv/data/state",
    ),
    taken(
        "the size of a file of a volume",
        "FIRN-FILE-SIZE: a process had /data/state open with 6 bytes, and /srv/data/state has 11",
        "echo more >>/srv/data/state",
        "echo state >/srv/data/state",
    ),
    taken(
        "the program of a hook",
        "FIRN-NODE-LACKS: the container's spec names the program /srv/hook of a hook",
        "mv /srv/hook /srv/no-hook",
        "mv /srv/no-hook /srv/hook",
    ),
    taken(
        "an address",
        "FIRN-ADDRESS: the container has the network of its node and uses TCP 10.99.0.1:8098",
        "ip address delete 10.99.0.1/32 dev lo",
        "ip address add 10.99.0.1/32 dev lo",
    ),
    taken(
        "a port",
        "FIRN-ADDRESS: the container has the network of its node and listens at TCP [::]:8099, and TCP",
        "busybox nc -ll -p 8099 -e cat </dev/null >/dev/null 2>&1 & echo $! >/srv/nc; \
         while ! grep -q :1FA3 /proc/net/tcp6; do sleep 0.02; done",
        "kill $(cat /srv/nc)",
    ),
    taken(
        "instructions of the CPU",
        "FIRN-CPU: the CPU of this node lacks sse4_2, ssse3, which",
        "mount --bind /srv/cpuinfo /proc/cpuinfo",
        "umount /proc/cpuinfo",
    ),
    // The next ones replace its GPUs.
    gpus(
        "a GPU of the model",
        "FIRN-GPU-MODEL: ",
        "--gpu 'name=NVIDIA A100-SXM4-80GB'",
    ),
    gpus(
        "a GPU of the size",
        "FIRN-GPU-MEMORY: ",
        "--gpu 'name=NVIDIA H200,mem=512M'",
    ),
    gpus("a whole GPU", "FIRN-GPU-MIG: ", "--gpu 'name=NVIDIA H200,mig=on'"),
    gpus("the driver", "FIRN-DRIVER-VERSION: ", "--driver 580.95.05"),
    gpus("a driver of today", "FIRN-DRIVER-", "--driver 560.35.03"),
    taken(
        "any GPU",
        "cannot read the GPUs of this node",
        "simgpu teardown",
        "simgpu setup",
    ),
];

/// Every move to a node without one of these is refused as it is to be. Nothing comes of it there.
fn refused_without(a: &GpuHost, b: &GpuHost, lacks: &[&Lack<'_>]) -> Result<()> {
    let job = Container::known(a, "job");
    let mut wrong = Vec::new();
    for lack in lacks {
        let take = match lack.take.strip_prefix("--") {
            Some(_) => format!("simgpu teardown; simgpu setup {}", lack.take),
            None => lack.take.to_owned(),
        };
        b.node()
            .run(&["sh", "-euc", &take])
            .context(lack.what.to_owned())?;
        let dry = [lack.options, &["--dry-run"]].concat();
        let refused = [&dry[..], lack.options].into_iter().try_for_each(|options| {
            let output = not_moved(a, options, "FIRN-MOVE-TARGET")?;
            ensure!(
                output.contains(lack.part) && !output.contains("pause: "),
                "{output}"
            );
            Ok(())
        });
        b.node()
            .run(&["sh", "-euc", lack.bring])
            .context(lack.what.to_owned())?;
        if let Err(error) = refused {
            wrong.push(format!("without {}: {error}", lack.what));
        }
        // Nothing more can be tried once it has gone.
        ensure!(job.status()? == "RUNNING", "{wrong:?}");
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    knows_nothing(b)
}

pub fn what_the_other_node_lacks_is_named_before_the_pause(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-lacks")?, |[a, b]| {
        for host in [&*a, &*b] {
            host.node().run(&["sh", "-euc", PREPARE])?;
        }
        let hook = ["--device", "firn.test/hook=one"];
        let options = [&OF_THE_NODE[..], &hook].concat();
        let job = Container::script(a, "job", &["0"], 1, &options, &format!("{LISTEN}{COUNTER}"))?;
        job.goes_on(3)?;
        join(a, b, || {
            moved(a, &["--dry-run"])?;
            refused_without(a, b, &LACKS.iter().collect::<Vec<_>>())
        })?;
        job.goes_on(3)?;
        job.remove()?;
        a.idle()?;
        b.idle()
    })
}

pub fn a_container_without_a_gpu_is_looked_at_as_well(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-plain")?, |[a, b]| {
        for host in [&*a, &*b] {
            host.node().run(&["sh", "-euc", PREPARE])?;
        }
        let job = Container::beat(a, "job", &OF_THE_NODE, LISTEN)?;
        let of_all = |lack: &&Lack<'_>| {
            let codes = [
                "FIRN-HOST",
                "FIRN-IMAGE",
                "FIRN-MOUNT",
                "FIRN-FILE",
                "FIRN-ADDRESS",
                "FIRN-CPU",
            ];
            codes.iter().any(|code| lack.part.starts_with(code))
        };
        join(a, b, || {
            refused_without(a, b, &LACKS.iter().filter(of_all).collect::<Vec<_>>())?;
            b.node()
                .run(&["mount", "--bind", "/srv/cpuinfo", "/proc/cpuinfo"])?;
            moved(a, &["--cpu", "any"])?;
            let copy = Container::known(b, "job");
            copy.beats_on()?;
            copy.remove()
        })?;
        ensure!(job.status().is_err(), "the source is left");
        a.idle()?;
        b.idle()
    })
}

/// It has a GPU, and no process uses it.
pub fn an_idle_gpu_needs_the_mounts_as_well(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-idle")?, |[a, b]| {
        for host in [&*a, &*b] {
            host.node().run(&["sh", "-euc", PREPARE])?;
        }
        let script = "while :; do echo x >>/beats; sleep 0.05; done";
        let job = Container::script(a, "job", &["0"], 0, &OF_THE_NODE, script)?;
        job.beats_on()?;
        let of_mounts = |lack: &&Lack<'_>| lack.part.starts_with("FIRN-MOUNT");
        join(a, b, || {
            moved(a, &["--dry-run"])?;
            refused_without(a, b, &LACKS.iter().filter(of_mounts).collect::<Vec<_>>())
        })?;
        job.beats_on()?;
        job.remove()?;
        a.idle()?;
        b.idle()
    })
}

/// Both nodes have one kernel, so one of them is shown another count.
pub fn huge_pages_of_the_other_node_are_counted(platform: Platform) -> Result<()> {
    const HUGE: &str = "objects huge-page /none /log-huge &\n";
    const COUNT: &str =
        "FIRN-HUGE-PAGES: the processes have 1 huge pages of 2048 KiB, and this node has 0 to give";
    on(pair(platform, "tm-huge")?, |[a, b]| {
        let _pages = HugePages::add(4)?;
        let job = Container::beat(a, "job", &[], HUGE)?;
        wait_for("the page", WAIT, || {
            Ok(job.exec(&["test", "-s", "/log-huge"]).ok().map(drop))
        })?;
        b.node().run(&["sh", "-c", "echo 0 >/srv/none"])?;
        let take = format!("mount --bind /srv/none {FREE_HUGE_PAGES}");
        let bring = format!("umount {FREE_HUGE_PAGES}");
        let lack = Lack {
            what: "huge pages",
            part: COUNT,
            options: &[],
            take: &take,
            bring: &bring,
        };
        join(a, b, || {
            refused_without(a, b, &[&lack])?;
            moved(a, &[])?;
            let copy = Container::known(b, "job");
            copy.beats_on()?;
            copy.remove()
        })?;
        ensure!(job.status().is_err(), "the source is left");
        a.idle()?;
        b.idle()
    })
}

/// By each way into a restore: firn's dry run, firn, ctr.
pub fn a_cpu_that_can_do_less_refuses_a_restore(platform: Platform) -> Result<()> {
    on([host(platform, "to-cpu", 1)?], |[host]| {
        let node = host.node();
        node.run(&["sh", "-euc", PREPARE])?;
        let job = counter(host)?;
        job.checkpoint("checkpoint/job")?;
        host.firn(&["checkpoint", "job", "/srv/job.tar"])?;
        job.remove()?;
        node.run(&["mount", "--bind", "/srv/cpuinfo", "/proc/cpuinfo"])?;
        for words in [
            &["restore", "/srv/job.tar", "--dry-run"][..],
            &["restore", "/srv/job.tar"],
        ] {
            let output = refused(host, words, "FIRN-CPU")?;
            ensure!(output.contains("lacks sse4_2, ssse3, which"), "{output}");
        }
        let error = Container::restore(host, "job", "checkpoint/job", 1)
            .err()
            .map(|error| error.to_string());
        let error = error.context("ctr has restored it")?;
        ensure!(error.contains("FIRN-CPU: "), "{error}");
        node.run(&["ctr", "containers", "delete", "job"])?;
        host.firn(&["restore", "/srv/job.tar", "--cpu", "any"])?;
        let restored = copy(host, "job", &host.uuids()[..1])?;
        let spec = node.run(&["ctr", "containers", "info", "--spec", "job"])?.stdout;
        ensure!(
            spec.contains("ociVersion") && !spec.contains("firn.dev/cpu"),
            "{spec}"
        );
        restored.remove()?;
        host.remove_image("checkpoint/job")?;
        // ctr leaves them when a restore fails.
        node.run(&["sh", "-c", "rm -r /srv/job.tar /tmp/ctrd-checkpoint*"])?;
        nothing_left(host)?;
        host.idle()
    })
}

/// A container with the PID namespace of its node: CRIU gives its processes the ids that they had.
pub fn ids_of_processes_are_free_on_the_other_node(platform: Platform) -> Result<()> {
    const NODES: [&str; 2] = ["--with-ns", "pid:/proc/1/ns/pid"];
    /// Far from those of the nodes' own processes.
    const FAR: &str = "echo 20000 >/proc/sys/kernel/ns_last_pid";
    on(pair(platform, "tm-pid")?, |[a, b]| {
        a.node().run(&["sh", "-c", FAR])?;
        let job = Container::beat(a, "job", &NODES, "")?;
        let pid = a.node().read(format!("{BUNDLES}/job/init.pid"))?;
        ensure!(pid.parse::<u32>()? > 20_000, "{pid}");
        // The ids after it are left to the job's children.
        let take = format!(
            "for _ in $(seq 100); do
                 sleep 1000 >/dev/null 2>&1 &
                 [ $! -eq {pid} ] && break
                 kill $!; echo $(({pid} - 1)) >/proc/sys/kernel/ns_last_pid
             done
             echo 1000 >/proc/sys/kernel/ns_last_pid; [ -e /proc/{pid} ]"
        );
        let part = format!("process id {pid} is taken by process {pid} of the node (sleep)");
        let lack = Lack {
            what: "an id of a process",
            part: &part,
            options: &[],
            take: &take,
            bring: &format!("kill {pid}; timeout 60 sh -c 'while [ -e /proc/{pid} ]; do sleep 0.1; done'"),
        };
        join(a, b, || {
            refused_without(a, b, &[&lack])?;
            moved(a, &[])?;
            let copy = Container::known(b, "job");
            copy.beats_on()?;
            // By a restore, too: the first of the checkpoint has its own ids.
            copy.checkpoint("checkpoint/job")?;
            let again = ["restore", "checkpoint/job", "--name", "other"];
            refused(b, &[&again[..], &["--dry-run"]].concat(), "FIRN-PID-TAKEN")?;
            refused(b, &again, "FIRN-PID-TAKEN")?;
            copy.remove()?;
            b.firn(&again)?;
            let other = Container::known(b, "other");
            other.beats_on()?;
            other.remove()?;
            b.remove_image("checkpoint/job")
        })?;
        ensure!(job.status().is_err(), "the source is left");
        a.idle()?;
        b.idle()
    })
}
