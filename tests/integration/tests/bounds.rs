//! What a hostile container or a dead file server cannot do: make the shim large, or let other containers
//! wait.
//!
//! The chain has 100 processes and not the 32,000 that a pid namespace can hold: a fork costs the kernel the
//! more the longer the chain of forks behind it is. That cost grows with their number and not faster is shown
//! by unit tests with 32,000. Each holds 990 descriptors: 100,000.
//!
//! Needs root.

use std::process::Child;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{StateRequest, StateResponse};
use firn_lab::{
    Built, CommandOutput, Container, FIRN, GpuHost, SimGpu, StallFs, Task, cases, failure, matrix, on,
};
use firn_node::{Platform, wait_for};

const LIMIT: Duration = Duration::from_secs(120);

/// Puts containers into one shim.
const GROUP: [&str; 2] = ["--annotation", "io.containerd.runc.v2.group=pod"];

/// By how much the shim may grow over a refused checkpoint, and how large the one that ships may be, in KiB.
const GROWTH: u64 = 4 << 10;
const MEMORY: u64 = 8 << 10;

/// How long a shim may take to report what state a container is in: the median.
const ANSWER: Duration = Duration::from_millis(100);

fn host(platform: Platform, name: &str) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(1)])
}

/// A container that always runs, in the shim of the others.
fn bystander(host: &GpuHost) -> Result<Container<'_>> {
    let options = [&["--runtime", FIRN], &GROUP[..]].concat();
    Container::run(
        host,
        "other",
        &options,
        &["sh", "-c", "while :; do sleep 1000; done"],
    )
}

/// A counter in the shim of "other".
fn counter<'h>(host: &'h GpuHost, options: &[&str], habits: &[&str]) -> Result<Container<'h>> {
    let options = [&GROUP[..], options].concat();
    let job = Container::count_with(host, "job", &["0"], 1, &options, habits)?;
    job.goes_on(2)?;
    Ok(job)
}

/// Asks for the state of "other" until the client has ended. Returns its output, and the median of the
/// answers.
fn meanwhile(host: &GpuHost, mut client: Child) -> Result<(String, Duration)> {
    let task = Task::of(host, "other")?;
    let mut request = StateRequest::new();
    request.id = "other".to_owned();
    let mut answers = Vec::new();
    let begun = Instant::now();
    while answers.len() < 5 || client.try_wait()?.is_none() {
        ensure!(begun.elapsed() < LIMIT, "the client does not end");
        let asked = Instant::now();
        let _state: StateResponse = task.call("State", &request)?;
        answers.push(asked.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = CommandOutput::wait(client)?.failed()?;
    answers.sort();
    Ok((output, answers[answers.len() / 2]))
}

/// Its memory in KiB, now or at most since it was last forgotten.
fn memory(host: &GpuHost, shim: &str, field: &str) -> Result<u64> {
    let status = host.node().read(format!("/proc/{shim}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.split_whitespace().next());
    Ok(kib.with_context(|| format!("no {field}"))?.parse()?)
}

/// A checkpoint is refused for this code; the shim stays small and answers.
fn stays_calm(host: &GpuHost, habits: &[&str], processes: usize, code: &str, names: &str) -> Result<()> {
    let job = counter(host, &[], habits)?;
    wait_for("all of its processes", LIMIT, || {
        Ok((job.pids()?.len() >= processes).then_some(()))
    })?;
    let [shim] = &host.shims().collect::<Vec<_>>()[..] else {
        anyhow::bail!("not one shim");
    };
    let pid = shim.pid.to_string();
    // Forgets the peak.
    host.node().write(format!("/proc/{pid}/clear_refs"), "5")?;
    let before = memory(host, &pid, "VmRSS:")?;
    let dump = ["ctr", "tasks", "checkpoint", "--image-path", "/tmp/image", "job"];
    let begun = Instant::now();
    let (output, median) = meanwhile(host, host.node().spawn(&dump)?)?;
    let (took, peak) = (begun.elapsed(), memory(host, &pid, "VmHWM:")?);
    println!(
        "{habits:?}: {took:?}, State within {median:?} (median), shim {before} KiB, then {peak} KiB at most"
    );
    ensure!(output.contains(code) && output.contains(names), "{output}");
    ensure!(median < ANSWER, "State took {median:?}");
    ensure!(peak < before + GROWTH, "{before} KiB before, {peak} KiB at most");
    let ships = Built::for_tests()?.shim().metadata()?.len() < 8 << 20;
    ensure!(!ships || peak < MEMORY, "{peak} KiB");
    job.goes_on(2)?;
    job.remove()
}

fn an_environment_of_3_gib_is_refused_and_the_shim_stays_small(platform: Platform) -> Result<()> {
    on([host(platform, "ho-env")?], |[host]| {
        let other = bystander(host)?;
        let habit = ["--environment-mib", "3072"];
        stays_calm(host, &habit, 1, "FIRN-PROC:", "it is longer than 8 MiB")?;
        other.remove()?;
        host.idle()
    })
}

fn a_process_chain_with_100000_descriptors_costs_nothing(platform: Platform) -> Result<()> {
    on([host(platform, "ho-chain")?], |[host]| {
        let other = bystander(host)?;
        let habits = ["--chain", "100", "--descriptors", "990", "--io-uring"];
        stays_calm(host, &habits, 101, "FIRN-IO-URING:", "gpu-counter")?;
        other.remove()?;
        host.idle()
    })
}

/// The image's file system does not answer: the checkpoint is refused in time, and everybody continues.
fn an_image_directory_that_hangs_blocks_nobody(platform: Platform) -> Result<()> {
    on([host(platform, "ho-image")?], |[host]| {
        host.configure("[deadlines]\nlook = \"2s\"\n")?;
        let other = bystander(host)?;
        let job = counter(host, &[], &[])?;
        let fs = StallFs::mount(host, "/srv/images")?;
        for operation in ["statfs", "stat"] {
            fs.stall(&[operation])?;
            let image = format!("/srv/images/{operation}");
            let dump = ["ctr", "tasks", "checkpoint", "--image-path", &image, "job"];
            let begun = Instant::now();
            let (output, median) = meanwhile(host, host.node().spawn(&dump)?)?;
            println!(
                "{operation}: {:?}, State within {median:?}: {output}",
                begun.elapsed()
            );
            ensure!(output.contains("FIRN-"), "{output}");
            ensure!(
                begun.elapsed() < Duration::from_secs(30),
                "after {:?}",
                begun.elapsed()
            );
            ensure!(median < ANSWER, "State took {median:?}");
            job.goes_on(2)?;
            fs.go_on()?;
        }
        job.task(&["checkpoint", "--image-path", "/srv/images/last"])?;
        job.goes_on(2)?;
        job.remove()?;
        other.remove()?;
        drop(fs);
        host.idle()
    })
}

/// The source of a bind mount does not answer when a container is restored: Create fails in time, other
/// containers of the pod continue, and the next restore works when the file server is back.
fn a_bind_source_that_hangs_fails_create_and_not_the_pod(platform: Platform) -> Result<()> {
    on([host(platform, "ho-bind")?], |[host]| {
        host.configure("[deadlines]\nlook = \"2s\"\n")?;
        let other = bystander(host)?;
        host.node().run(&["mkdir", "-p", "/srv/data"])?;
        let bind = ["--mount", "type=bind,src=/srv/data,dst=/data,options=rbind:rw"];
        let job = counter(host, &bind, &[])?;
        job.checkpoint("checkpoint/job")?;
        job.remove()?;
        let fs = StallFs::mount(host, "/srv/data")?;
        fs.stall(&["stat"])?;
        let client = Container::begin_restore(host, "job", "checkpoint/job")?;
        let (output, median) = meanwhile(host, client)?;
        println!("State within {median:?}: {output}");
        ensure!(
            output.contains("FIRN-LOOK-TIMEOUT:") && output.contains("/srv/data"),
            "{output}"
        );
        ensure!(median < ANSWER, "State took {median:?}");
        ensure!(other.status()? == "RUNNING", "the other container has ended");
        drop(fs);
        // ctr leaves its own record of what it has not restored.
        let _ = failure(host.node().run(&["ctr", "containers", "delete", "job"]));
        let restored = Container::restore(host, "job", "checkpoint/job", 1);
        let (job, _) = restored.context("when the file server is gone")?;
        job.goes_on(2)?;
        job.remove()?;
        other.remove()?;
        wait_for("no process in state D", LIMIT, || {
            let left = host.node().processes().into_iter();
            let left = left.filter(|process| process.args.iter().any(|arg| arg == "look"));
            Ok((left.count() == 0).then_some(()))
        })?;
        host.remove_image("checkpoint/job")?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        an_environment_of_3_gib_is_refused_and_the_shim_stays_small [FORKY];
        a_process_chain_with_100000_descriptors_costs_nothing [FORKY];
        an_image_directory_that_hangs_blocks_nobody [FORKY];
        a_bind_source_that_hangs_fails_create_and_not_the_pod [FORKY];
    })
    .last()
}
