//! The commands of README.md, of docs/guide and of examples/, as they are written there, on nodes with
//! simulated GPUs. Every console block of these pages is run, or a reason stands here why it is not.

#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

mod scripts;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_documents::{Page, console, root};
use firn_lab::{BUNDLES, COUNTER, Container, FIRN, GpuHost, IMAGE, Lines, SimGpu, Skip, cases, matrix, on};
use firn_node::{Platform, wait_for};

use crate::guide::Step::{A, B, Do, Left, Send};

/// What is done for a page, in this order.
enum Step {
    /// Runs the block with this number, the first is 1, on the first node.
    A(usize),
    /// Runs it on the second node.
    B(usize),
    /// Takes a file from the first node to the second.
    Send(&'static str),
    /// What the page takes for granted.
    Do(fn(&[GpuHost; 2]) -> Result<()>),
    /// The block is not run, for this reason.
    Left(usize, &'static str),
}

struct Story {
    path: &'static str,
    steps: &'static [Step],
    /// What readers put something else for.
    replace: &'static [(&'static str, &'static str)],
}

/// Where the commands run.
const DIR: &str = "/srv";

const PAGES: &[Story] = &[
    Story {
        path: "README.md",
        steps: &[
            Left(1, "makes nodes of its own; CI runs it"),
            Left(2, "needs a release; suite package does it with dpkg"),
            A(3),
            Do(a_counts),
            Send("job.tar"),
            B(4),
            Do(b_counts),
            Left(5, "runs this suite"),
        ],
        replace: &[],
    },
    Story {
        path: "docs/guide/device-free.md",
        steps: &[Do(releases_its_device), A(1), Do(goes_on_with_another)],
        replace: &[
            ("IMAGE with", "localhost/firn-test:latest with"),
            (
                "python3 /job/device_free.py run",
                "/bin/device-free --out /dev/shm/lines",
            ),
        ],
    },
    Story {
        path: "docs/guide/first-checkpoint.md",
        steps: &[
            A(1),
            Do(a_counts),
            A(2),
            A(3),
            Do(a_counts),
            Send("job.tar"),
            B(4),
            Do(b_counts),
            Do(b_removes),
            Left(5, "needs ssh; the suite tool moves with a program in its place"),
            Do(a_removes_file),
            A(6),
            Do(a_counts),
            Send("job.tar"),
            B(7),
            Do(b_counts),
            A(8),
            Do(a_counts),
        ],
        replace: &[],
    },
    Story {
        path: "docs/guide/gpu-requests.md",
        steps: &[Do(without_cdi_file), A(1), A(2), Do(a_counts)],
        replace: &[],
    },
    Story {
        path: "docs/guide/install.md",
        steps: &[
            Left(1, "needs a release; suite package does it with dpkg"),
            Left(2, "the roots of Ubuntu's nodes are made so"),
            Left(3, "builds a release"),
            Left(4, "needs a containerd with CRI; suite install does it"),
        ],
        replace: &[],
    },
    Story {
        path: "docs/guide/interposer.md",
        steps: &[A(1), Do(a_counts)],
        replace: &[("IMAGE job COMMAND", "IMAGE job COMMAND; sleep 1")],
    },
    Story {
        path: "docs/guide/job-hooks.md",
        steps: &[Left(1, "needs Python; the suite job_hooks calls by signal")],
        replace: &[],
    },
    Story {
        path: "docs/guide/kubernetes.md",
        steps: &[
            Left(1, "needs a cluster; the suite cluster applies it"),
            Left(
                2,
                "needs a cluster; the suite cluster compares what helm makes of it",
            ),
            Left(3, "needs a cluster"),
            Left(4, "needs a kubelet; the suite cri makes its call"),
            Left(5, "needs crictl; the suite cri makes its calls"),
            Left(6, "needs a pod; the suite cri has one"),
            Left(7, "needs buildah and a registry"),
            Left(8, "needs an archive of the kubelet; the suite cri has one"),
            Left(
                9,
                "needs a container of Kubernetes; the suite cri makes such an image",
            ),
            Left(10, "needs a registry"),
            Left(11, "needs an archive of the kubelet; the suite cri has one"),
            Left(12, "needs an archive of the kubelet; the suite cri signs one"),
            Left(13, "needs a cluster; the suite cluster applies it"),
            Left(14, "needs a cluster; the suite cluster drains nodes"),
        ],
        replace: &[],
    },
    Story {
        path: "docs/guide/lending-gpus.md",
        steps: &[A(1), Do(a_counts), A(2), Do(a_counts)],
        replace: &[("IMAGE job COMMAND", "IMAGE job COMMAND; sleep 1")],
    },
    Story {
        path: "docs/guide/multi-gpu-jobs.md",
        steps: &[A(1), Do(a_counts_twice)],
        replace: &[(
            "torchrun --nproc-per-node 2 train.py",
            "/bin/gpu-counter --out /counter.log --interval-ms 50 --mib 8 --ranks 2 --gpu 0,1",
        )],
    },
    Story {
        path: "docs/guide/podman.md",
        steps: &[Left(1, "needs podman; the suite podman runs it")],
        replace: &[],
    },
    Story {
        path: "docs/guide/operating.md",
        steps: &[
            Do(operate),
            A(1),
            Left(2, "needs a checkpoint that lasts; the suite listing watches one"),
            A(3),
            Left(4, "needs systemd; the suite package enables them"),
            Left(5, "needs journald"),
            A(6),
            Do(pause),
            A(7),
            Do(a_counts),
            A(8),
        ],
        replace: &[
            (
                "-n k8s.io --state /run/k3s/containerd",
                "-n default --state /run/containerd",
            ),
            ("4711", "$(cat pid)"),
            (
                "ctr tasks delete job",
                "until ctr tasks delete job; do sleep 0.1; done",
            ),
        ],
    },
    Story {
        path: "docs/guide/restore-onto-other-gpus.md",
        steps: &[Do(operate), A(1), A(2)],
        replace: &[],
    },
    Story {
        path: "docs/guide/stores.md",
        steps: &[
            Do(counts_with_a_store),
            A(1),
            Left(
                2,
                "the next commands need this checkpoint; firn's tests of gc prune one",
            ),
            Left(3, "firn's tests of gc and the suite stored_memory run it"),
            A(4),
            Send("job.tar"),
            Do(exchange_is_shared),
            B(5),
            Do(b_counts),
            Left(6, "the suite remote_stores pushes into an encrypted bucket"),
            A(7),
            Do(a_counts),
            A(8),
            Do(without_a_store),
        ],
        // The suite remote_stores has an object store.
        replace: &[
            ("s3://checkpoints/train ID", "/srv/exchange $(ls exchange/images)"),
            ("s3://checkpoints/train", "/srv/exchange"),
        ],
    },
    Story {
        path: "docs/guide/time-slicing.md",
        steps: &[Left(1, "the suite pauses makes these calls with two containers")],
        replace: &[],
    },
];

fn counts(host: &GpuHost, counters: usize) -> Result<()> {
    Container::known(host, "job")
        .counting(counters)
        .moved_before()
        .goes_on(3)
        .map(drop)
}

fn a_counts([a, _]: &[GpuHost; 2]) -> Result<()> {
    counts(a, 1)
}

fn a_counts_twice([a, _]: &[GpuHost; 2]) -> Result<()> {
    counts(a, 2)
}

fn b_removes([_, b]: &[GpuHost; 2]) -> Result<()> {
    Container::known(b, "job").remove()
}

fn a_removes_file([a, _]: &[GpuHost; 2]) -> Result<()> {
    fs::remove_file(a.node().path("/srv/job.tar")).context("remove job.tar")
}

fn b_counts([_, b]: &[GpuHost; 2]) -> Result<()> {
    counts(b, 1)
}

fn without_cdi_file([a, _]: &[GpuHost; 2]) -> Result<()> {
    a.node().run(&["rm", "/etc/cdi/nvidia.json"]).map(drop)
}

/// A job as the page has it, whose GPU is not the one that its copy gets.
fn releases_its_device([a, _]: &[GpuHost; 2]) -> Result<()> {
    let grant = a.ctr_gpu_options(&["0"])?;
    let hooks = [
        ("prepare", "release"),
        ("resumed", "take"),
        ("restored", "take"),
        ("failed", "take"),
    ];
    let hooks = hooks.map(|(hook, verb)| format!("firn.dev/hook-{hook}=exec: /bin/device-free {verb}"));
    let annotations = hooks
        .iter()
        .map(String::as_str)
        .chain(["firn.dev/gpu=released-by-hook"]);
    let options = ["--runtime", FIRN]
        .into_iter()
        .chain(grant.iter().map(String::as_str));
    let options = options.chain(annotations.flat_map(|value| ["--annotation", value]));
    let options: Vec<&str> = options.collect();
    Container::run(
        a,
        "job",
        &options,
        &["/bin/device-free", "--out", "/dev/shm/lines"],
    )?;
    Ok(())
}

fn goes_on_with_another([a, _]: &[GpuHost; 2]) -> Result<()> {
    let (with, other) = (Container::known(a, "with"), &a.uuids()[1]);
    wait_for("the copy to compute on its GPU", Duration::from_secs(30), || {
        let lines = Lines::parse(&with.exec(&["cat", "/dev/shm/lines"])?);
        ensure!(lines.fault().is_none(), "{:?}", lines.fault());
        Ok(lines
            .0
            .last()
            .is_some_and(|line| line.uuid == *other)
            .then_some(()))
    })?;
    with.remove()?;
    Container::known(a, "without").remove()
}

/// A container, its pid, its spec, an image directory, and the inventory of the other node.
fn operate([a, b]: &[GpuHost; 2]) -> Result<()> {
    let job = Container::count(a, "job", &["0"], 1, &[])?;
    job.goes_on(2)?;
    let spec = a.node().read(format!("{BUNDLES}/job/config.json"))?;
    a.node().write(format!("{DIR}/config.json"), spec)?;
    a.node().write(format!("{DIR}/pid"), job.pid()?.to_string())?;
    a.node().run(&["mkdir", &format!("{DIR}/images")])?;
    job.task(&["checkpoint", "--image-path", &format!("{DIR}/checkpoint")])?;
    let inventory = b.node().run(&["firn-gpu", "inventory"])?.stdout;
    a.node().write(format!("{DIR}/other-node.json"), inventory)
}

/// A job with large memory, on nodes as the page configures them.
fn counts_with_a_store(hosts: &[GpuHost; 2]) -> Result<()> {
    for host in hosts {
        host.configure(
            "[images]\nstore = \"/var/lib/firn/store\"\nstore-cap = \"2TiB\"\nbulk = \"store\"\n",
        )?;
    }
    let job = Container::count_with(&hosts[0], "job", &["0"], 1, &[], &["--mib", "40"])?;
    job.goes_on(2).map(drop)
}

/// Stands for the place that both nodes reach.
fn exchange_is_shared([a, b]: &[GpuHost; 2]) -> Result<()> {
    let dir = format!("{DIR}/exchange");
    let (from, to) = (a.node().path(&dir), b.node().path(&dir));
    let copied = Command::new("cp").arg("-a").args([from, to]).status()?;
    ensure!(copied.success(), "cannot copy {dir}");
    Ok(())
}

fn without_a_store(hosts: &[GpuHost; 2]) -> Result<()> {
    hosts.iter().try_for_each(|host| {
        host.configure("")?;
        host.node().run(&["rm", "-r", "/var/lib/firn/store"]).map(drop)
    })
}

fn pause([a, _]: &[GpuHost; 2]) -> Result<()> {
    Container::known(a, "job").task(&["pause"]).map(drop)
}

fn console_blocks(path: &str) -> Result<Vec<console::Block>> {
    let text = fs::read_to_string(root().join(path)).with_context(|| path.to_owned())?;
    Ok(console::blocks(&Page::new(path, text)))
}

/// Runs a block as it is written, but for what readers replace.
fn play(host: &GpuHost, page: &Story, block: &console::Block) -> Result<()> {
    let mut script = block.script();
    for (from, to) in page.replace {
        script = script.replace(from, to);
    }
    let script = script
        .replace("IMAGE job COMMAND", &format!("IMAGE job {COUNTER}"))
        .replace("IMAGE job", &format!("{IMAGE} job"))
        .replace("ctr run", &format!("ctr run {}", host.limits().join(" ")));
    let output = host
        .node()
        .run(&["sh", "-euc", &format!("cd {DIR}\n{script}")])?
        .stdout;
    let missing = block.not_in(&output);
    ensure!(missing.is_empty(), "not printed: {missing:?}, but\n{output}");
    Ok(())
}

fn run(hosts: &[GpuHost; 2], page: &Story) -> Result<()> {
    let blocks = console_blocks(page.path)?;
    let block = |number: usize| {
        let block = blocks.get(number - 1);
        block.with_context(|| format!("there is no block {number}"))
    };
    let [a, b] = hosts;
    for step in page.steps {
        match step {
            A(number) => play(a, page, block(*number)?).with_context(|| format!("block {number}"))?,
            B(number) => play(b, page, block(*number)?).with_context(|| format!("block {number}"))?,
            Send(file) => {
                let path = format!("{DIR}/{file}");
                b.node().install(a.node().path(&path), &path, 0o600)?;
            }
            Do(prepare) => prepare(hosts)?,
            Left(..) => {}
        }
    }
    Ok(())
}

/// Removes what a page has left.
fn clear(hosts: &[GpuHost; 2]) -> Result<()> {
    for host in hosts {
        let ended =
            "ctr tasks delete --force job; ctr containers delete job; ctr images list -q | grep checkpoint/ |
             xargs -r ctr images remove; rm -rf /srv/*; true";
        host.node().run(&["sh", "-c", ended])?;
        host.idle()?;
    }
    Ok(())
}

fn pair(platform: Platform, name: &str) -> Result<[GpuHost; 2]> {
    let host = |letter: &str, first| {
        let gpus = [SimGpu::h200(first), SimGpu::h200(first + 1)];
        GpuHost::for_test(platform, &format!("{name}-{letter}"), &gpus)
    };
    Ok([host("a", 1)?, host("b", 3)?])
}

/// Skips the trial where the test program runs without its repository.
fn needs_pages() -> Result<()> {
    if root().join("README.md").is_file() {
        Ok(())
    } else {
        Err(Skip::new("the pages are not on this machine").into())
    }
}

fn commands_of_the_pages_work_as_written(platform: Platform) -> Result<()> {
    needs_pages()?;
    on(pair(platform, "guide")?, |hosts| {
        for page in PAGES {
            run(hosts, page).with_context(|| page.path)?;
            clear(hosts).with_context(|| format!("after {}", page.path))?;
        }
        Ok(())
    })
}

/// Every console block of the pages is run or has a reason, and no page is left out.
fn every_console_block_is_run_or_has_a_reason() -> Result<()> {
    needs_pages()?;
    for page in PAGES {
        let blocks = console_blocks(page.path)?;
        let numbers = page.steps.iter().filter_map(|step| match step {
            A(number) | B(number) => Some(*number),
            Left(number, why) => (!why.is_empty()).then_some(*number),
            Send(_) | Do(_) => None,
        });
        let numbers: Vec<usize> = numbers.collect();
        let every: Vec<usize> = (1..=blocks.len()).collect();
        ensure!(
            numbers == every,
            "{}: blocks {every:?}, here {numbers:?}",
            page.path
        );
    }
    let known: BTreeSet<&str> = PAGES.iter().map(|page| page.path).collect();
    for entry in fs::read_dir(root().join("docs/guide"))? {
        let path = format!("docs/guide/{}", entry?.file_name().to_string_lossy());
        let has_blocks = !console_blocks(&path)?.is_empty();
        ensure!(known.contains(&*path) || !has_blocks, "{path} is not run");
    }
    Ok(())
}

pub(crate) fn suite() -> matrix::Suite {
    let cases = cases! {
        commands_of_the_pages_work_as_written [FORKY];
        scripts::one_node_works [FORKY];
        scripts::two_nodes_work [FORKY];
        scripts::two_nodes_and_a_registry_work [FORKY];
    };
    let documents = [
        matrix::without_node(
            "every_console_block_is_run_or_has_a_reason",
            every_console_block_is_run_or_has_a_reason,
        ),
        matrix::without_node("scripts::every_example_is_run", scripts::every_example_is_run),
    ];
    matrix::Suite::new(&cases).with(documents)
}
