//! Files that are open or mapped by a deleted name while another one leads to them, as glibc maps a named
//! semaphore: those in a tmpfs of the container move, by links that CRIU makes. The links are left nowhere,
//! also if CRIU is killed.
//!
//! Needs root.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{COUNTER, Container, GpuHost, SimGpu, cases, failure, matrix, on};
use firn_node::{Platform, wait_for};

const WAIT: Duration = Duration::from_secs(60);

/// All that a job has in /dev/shm.
const SEMAPHORES: &str = "sem.answers\nsem.requests\nsem.rounds";

/// A node with one GPU that no other node has.
fn host(platform: Platform, name: &str, gpu: u32) -> Result<GpuHost> {
    GpuHost::for_test(platform, name, &[SimGpu::h200(gpu)])
}

/// A job of two processes that exchange posts of semaphores.
fn job(host: &GpuHost) -> Result<Container<'_>> {
    let job = Container::count(host, "job", &["0"], 1, &["--semaphores"])?;
    exchanges(&job)?;
    Ok(job)
}

/// How many rounds the two processes have made: the value of a semaphore, which begins with it.
fn rounds(job: &Container<'_>) -> Result<u32> {
    let value = job.exec(&["od", "-A", "n", "-t", "u4", "-N", "4", "/dev/shm/sem.rounds"])?;
    value
        .trim()
        .parse()
        .with_context(|| format!("{value:?} is no value"))
}

/// The job computes and its processes exchange posts by mappings with deleted names, and one of them by its
/// name; no other name is in /dev/shm.
fn exchanges(job: &Container<'_>) -> Result<()> {
    job.goes_on(3)?;
    let before = rounds(job)?;
    wait_for("posts of the semaphores", WAIT, || {
        Ok((rounds(job)? > before + 3).then_some(()))
    })?;
    let maps = job.exec(&["sh", "-c", "cat /proc/[0-9]*/maps | grep /dev/shm/sem"])?;
    // In a copy all mappings of a file have the name of the first.
    let deleted = maps.lines().filter(|line| line.ends_with(" (deleted)")).count();
    ensure!(maps.lines().count() == 6 && deleted >= 5, "{maps}");
    let names = job.exec(&["ls", "-A", "/dev/shm"])?;
    ensure!(names.trim() == SEMAPHORES, "in /dev/shm are {names}");
    Ok(())
}

fn a_file_with_a_deleted_name_and_another_one_moves(platform: Platform) -> Result<()> {
    let hosts = [host(platform, "dn-a", 1)?, host(platform, "dn-b", 2)?];
    on(hosts, |[a, b]| {
        a.install_blow()?;
        a.configure("[deadlines]\ncriu-dump = \"4s\"\n")?;
        let source = job(a)?;
        a.node().run(&["firn", "audit", "job"])?;
        for signal in ["KILL", "STOP"] {
            a.blow(&format!("{signal} criu"))?;
            let output = failure(source.checkpoint("checkpoint/job"))?;
            a.was_struck().context(output.clone())?;
            exchanges(&source).with_context(|| format!("after {signal}: {output}"))?;
        }
        let before = rounds(&source)?;
        source.checkpoint("checkpoint/job")?;
        exchanges(&source)?;
        a.send_image("checkpoint/job", b)?;
        source.remove()?;
        a.idle()?;

        let (copy, _) = Container::restore(b, "job", "checkpoint/job", 1)?;
        let after = rounds(&copy)?;
        ensure!(after >= before, "{before} rounds became {after}");
        exchanges(&copy)?;
        copy.checkpoints_again("checkpoint/job")?;
        exchanges(&copy)?;
        copy.remove()?;
        b.idle()
    })
}

/// What the container itself has named as CRIU names links is refused, or in CRIU's way; it stays.
fn names_of_the_container_are_left_to_it(platform: Platform) -> Result<()> {
    on([host(platform, "dn-own", 1)?], |[host]| {
        host.watch_runc()?;
        let job = job(host)?;
        job.exec(&["ln", "/dev/shm/sem.rounds", "/dev/shm/link_remap.77"])?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        let named = "/dev/shm/link_remap.77 has a name that CRIU would give";
        ensure!(
            output.contains("FIRN-LINK-REMAP:") && output.contains(named),
            "{output}"
        );
        ensure!(!host.runc_has("checkpoint")?, "runc was called");
        let audit = host.node().run(&["sh", "-c", "firn audit job || true"])?.stdout;
        ensure!(audit.contains("FIRN-LINK-REMAP"), "{audit}");
        job.exec(&["rm", "/dev/shm/link_remap.77"])?;

        let others = "cd /dev/shm; for n in $(seq 400); do echo $n >link_remap.$n; done";
        job.exec(&["sh", "-c", others])?;
        let output = failure(job.checkpoint("checkpoint/job"))?;
        ensure!(
            output.contains("FIRN-DUMP") && output.contains("File exists"),
            "{output}"
        );
        let left = job.exec(&[
            "sh",
            "-c",
            "cd /dev/shm; cat link_remap.* | wc -l; rm link_remap.*",
        ])?;
        ensure!(left.trim() == "400", "{left} of 400 files are left");
        exchanges(&job)?;
        job.checkpoint("checkpoint/job")?;
        exchanges(&job)?;
        job.remove()?;
        host.idle()
    })
}

/// The root file system is copied without the links of CRIU.
fn such_a_file_outside_of_a_tmpfs_is_refused(platform: Platform) -> Result<()> {
    on([host(platform, "dn-root", 1)?], |[host]| {
        let open =
            |fd: u8, dir: &str| format!("echo x >{dir}/a; exec {fd}<{dir}/a; ln {dir}/a {dir}/b; rm {dir}/a");
        for (first, fits) in [(open(3, "/home"), false), ("true".to_owned(), true)] {
            let script = format!("mkdir -p /home; {first}; {}; {COUNTER}", open(4, "/dev/shm"));
            let job = Container::script(host, "job", &["0"], 1, &[], &script)?;
            job.goes_on(3)?;
            let result = job.checkpoint("checkpoint/job");
            if fits {
                result?;
            } else {
                let output = failure(result)?;
                ensure!(
                    output.contains("FIRN-DELETED-NAME") && output.contains("/home/a"),
                    "{output}"
                );
                let audit = host.output_of(&["firn", "audit", "job"], "")?.failed()?;
                ensure!(audit.contains("FIRN-DELETED-NAME"), "{audit}");
            }
            job.goes_on(3)?;
            let names = job.exec(&["sh", "-c", "ls -A /home /dev/shm"])?;
            ensure!(!names.contains("link_remap"), "{names}");
            job.remove()?;
            host.idle()?;
        }
        let (copy, _) = Container::restore(host, "job", "checkpoint/job", 1)?;
        copy.goes_on(3)?;
        ensure!(
            copy.exec(&["ls", "-A", "/dev/shm"])?.trim() == "b",
            "another name is there"
        );
        copy.remove()?;
        host.idle()
    })
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        a_file_with_a_deleted_name_and_another_one_moves [FORKY, TRIXIE, FORKY_V2, TRIXIE_V2];
        names_of_the_container_are_left_to_it [FORKY, TRIXIE];
        such_a_file_outside_of_a_tmpfs_is_refused [FORKY, TRIXIE];
    })
}
