//! `firn move` between two nodes. A program stands in for ssh, and a thread for sshd: they lose what the test
//! wants lost.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use firn_lab::{Container, GpuHost, IMAGE, failure, on};
use firn_node::{Image, Node, Platform, wait_for};
use serde_json::Value;

use super::failures::{WATCHED, signal_firn};
use super::{LIMIT, copy, counter, host, nothing_left};

/// Hands its command to the thread, and its standard input and output to the command. What is in /srv/wire
/// decides what becomes of it: `cut` ends the stream early, `lose` loses the answer. Nothing is closed, and
/// nothing comes any more, at `stall-check` (the first look), `stall-stream` (in the middle of the stream),
/// `stall-answer` (after its last byte), `stall-confirm` (the second look).
const SSH: &str = r#"#!/bin/sh
stall() { echo here >/srv/stalled; exec sleep 600; }
d=$(mktemp -d /srv/ssh/XXXXXX)
wire=$(cat /srv/wire)
case "$2 $wire" in
*--check*stall-check) stall ;;
*--check*stall-confirm) [ -e /srv/looked ] && stall; : >/srv/looked ;;
*--check*) wire= ;;
esac
mkfifo "$d/in" "$d/out"
printf %s "$2" >"$d/new"
mv "$d/new" "$d/command"
exec 3<&0
case "$wire" in
cut) head -c 1000000 <&3 >"$d/in" 3<&- & exec 3<&- ;;
stall-stream)
    cat "$d/out" >/dev/null 2>&1 3<&- &
    exec 4>"$d/in"
    head -c 1000000 <&3 >&4
    stall ;;
*) cat <&3 >"$d/in" & ;;
esac
case "$wire" in
lose) cat "$d/out" >/dev/null ;;
stall-answer) cat "$d/out" >/dev/null; stall ;;
*) cat "$d/out" ;;
esac
"#;

/// Runs what the program hands over, one after the other. If /srv/die is there, a container that was restored
/// is killed as soon as it was started, before the answer is complete: it ends with the command's output.
fn serve(from: &Path, node: &Node, ended: &AtomicBool) -> Result<()> {
    while !ended.load(Ordering::Relaxed) {
        for entry in fs::read_dir(from)? {
            let dir = entry?.path();
            let Ok(command) = fs::read_to_string(dir.join("command")) else {
                continue;
            };
            fs::remove_file(dir.join("command"))?;
            let input = File::open(dir.join("in"))?;
            let output = OpenOptions::new().write(true).open(dir.join("out"))?;
            let mut shell = node.command("sh");
            shell.args(["-c", &command]).stdin(input).stdout(output);
            shell.status()?;
            if node.path("/srv/die").exists() && !command.contains("--check") {
                node.run(&["ctr", "tasks", "kill", "--signal", "SIGKILL", "job"])?;
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Does something while commands of the first node run on the second.
pub fn join(a: &GpuHost, b: &GpuHost, test: impl FnOnce() -> Result<()>) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), SSH)?;
    a.node().install(file.path(), "/usr/local/bin/other-ssh", 0o755)?;
    a.node().run(&["mkdir", "-p", "/srv/ssh"])?;
    wire(a, "")?;
    let (from, ended) = (a.node().path("/srv/ssh"), AtomicBool::new(false));
    thread::scope(|scope| {
        let server = scope.spawn(|| serve(&from, b.node(), &ended));
        let tested = test();
        ended.store(true, Ordering::Relaxed);
        let served = server
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")));
        tested.and(served)
    })
}

fn wire(a: &GpuHost, what: &str) -> Result<()> {
    a.node().write("/srv/wire", what)
}

const MOVE: [&str; 6] = ["firn", "move", "job", "root@other", "--ssh", "other-ssh"];

pub fn moved(a: &GpuHost, more: &[&str]) -> Result<Value> {
    a.firn(&[&MOVE[1..], more].concat())
}

/// The move fails with this code. Its exit status, and the line on the container, are those of the code.
pub fn not_moved(a: &GpuHost, more: &[&str], code: &str) -> Result<String> {
    let output = failure(a.node().run(&[&MOVE[..], more].concat()))?;
    let (status, now) = match code {
        "FIRN-MOVE-TARGET" => (3, "job runs"),
        // Nothing that would make two of it.
        "FIRN-MOVE-UNKNOWN" => (1, "job is paused"),
        _ => (1, "job runs"),
    };
    ensure!(
        output.contains(&format!("{code}: "))
            && output.contains("hint: ")
            && output.contains(&format!("(exit status: {status})"))
            && output.trim_end().ends_with(&format!("\nfirn: {now}")),
        "{output}"
    );
    Ok(output)
}

pub fn pair(platform: Platform, name: &str) -> Result<[GpuHost; 2]> {
    Ok([
        host(platform, &format!("{name}-a"), 1)?,
        host(platform, &format!("{name}-b"), 3)?,
    ])
}

/// Nothing of the container is known on a node.
pub fn knows_nothing(host: &GpuHost) -> Result<()> {
    for list in ["containers", "tasks", "snapshots"] {
        let list = host.node().run(&["ctr", list, "list"])?.stdout;
        ensure!(!list.lines().any(|line| line.starts_with("job")), "{list}");
    }
    Container::known(host, "job").nothing_left()?;
    nothing_left(host)
}

pub fn a_container_moves_to_another_node(platform: Platform) -> Result<()> {
    on(pair(platform, "tm")?, |[a, b]| {
        let job = counter(a)?;
        join(a, b, || {
            let done = moved(a, &["--dry-run"])?;
            ensure!(done["dry_run"] == true && job.status()? == "RUNNING", "{done}");
            let before = job.goes_on(3)?;
            let done = moved(a, &["--gpus", "1"])?;
            ensure!(
                done["bytes"].as_u64() > Some(8 << 20) && done["pid"].as_u64() > Some(1),
                "{done}"
            );
            knows_nothing(a)?;
            let copied = copy(b, "job", &b.uuids()[1..])?;
            let first = copied.lines()?;
            ensure!(first.reached(1) > before.reached(1), "it was started afresh");
            copied.remove()?;
            nothing_left(b)?;
            // A node without the image of the root file system gets it.
            b.remove_image(IMAGE)?;
            counter(a)?;
            moved(a, &["--name", "job2"])?;
            knows_nothing(a)?;
            ensure!(b.has_image(IMAGE)?, "the image was not sent");
            copy(b, "job2", &b.uuids()[..1])?.remove()?;
            // It is an image as any other.
            counter(b)?.remove()
        })?;
        a.idle()?;
        b.idle()
    })
}

pub fn a_node_that_cannot_take_it_is_refused_before_the_pause(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-no")?, |[a, b]| {
        let job = counter(a)?;
        not_moved(a, &[], "FIRN-MOVE-SSH")?;
        join(a, b, || {
            let other = counter(b)?;
            let output = not_moved(a, &[], "FIRN-MOVE-TARGET")?;
            ensure!(
                output.contains("it has a container or a snapshot job"),
                "{output}"
            );
            other.remove()?;
            not_moved(a, &["--remote-firn", "/nowhere/firn"], "FIRN-MOVE-SSH")?;
            let refused = |more: &[&str], code: &str| {
                for dry in [&["--dry-run"][..], &[]] {
                    let output = not_moved(a, &[more, dry].concat(), "FIRN-MOVE-TARGET")?;
                    ensure!(output.contains(&format!("{code}: ")), "{code}: {output}");
                    ensure!(!output.contains("pause: "), "it stood still: {output}");
                }
                ensure!(job.status()? == "RUNNING");
                Ok(())
            };
            refused(&["--gpus", "7"], "FIRN-GPU-UNKNOWN")?;
            refused(&["--gpus", "0,1"], "FIRN-GPU-COUNT")?;
            refused(&["--gpu-map", "GPU-1=2"], "FIRN-MAP-SYNTAX")?;
            b.node().run(&[
                "sh",
                "-c",
                "command -v criu >/srv/at && mv $(cat /srv/at) /srv/criu",
            ])?;
            refused(&[], "FIRN-CRIU-MISSING")?;
            b.node().run(&["sh", "-c", "mv /srv/criu $(cat /srv/at)"])?;
            job.goes_on(3)?;
            knows_nothing(b)
        })?;
        job.remove()?;
        a.idle()
    })
}

/// The other node's dry run, with the container's GPU memory and base image.
pub fn a_busy_gpu_is_seen_before_the_pause_and_another_one_chosen(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-busy")?, |[a, b]| {
        let job = Container::count(a, "job", &["0"], 1, &["--reserve-mib", "250"])?;
        job.goes_on(3)?;
        let big = Container::count(b, "big", &["0"], 1, &["--reserve-mib", "800"])?;
        big.goes_on(3)?;
        join(a, b, || {
            for dry in [&["--dry-run"][..], &[]] {
                let output = not_moved(a, dry, "FIRN-MOVE-TARGET")?;
                for part in [
                    "FIRN-GPU-OCCUPIED: ",
                    "container big of namespace default has it",
                    &format!("there is room on {}", b.uuids()[1]),
                ] {
                    ensure!(output.contains(part), "{part}: {output}");
                }
                ensure!(job.status()? == "RUNNING", "it stands still");
            }
            let planned = moved(a, &["--gpus", "auto", "--dry-run"])?;
            ensure!(planned["map"][0]["new"] == b.uuids()[1].as_str(), "{planned}");
            // The tag of the image leads to another one here.
            Image::new(IMAGE).import(b.node())?;
            moved(a, &["--gpus", "auto"])?;
            copy(b, "job", &b.uuids()[1..])?.remove()?;
            // It is another image's no more, and the copy's own layers are still known.
            counter(a)?;
            moved(a, &["--gpus", "1", "--name", "job2"])?;
            b.firn(&["checkpoint", "job2", "/srv/job2.tar"])?;
            copy(b, "job2", &b.uuids()[1..])?.remove()?;
            // Nothing of the choice is left: it gets the GPU that its spec names.
            b.firn(&["restore", "/srv/job2.tar"])?;
            copy(b, "job2", &b.uuids()[..1])?.remove()?;
            b.node().run(&["rm", "/srv/job2.tar"])?;
            big.goes_on(3).map(drop)
        })?;
        big.remove()?;
        a.idle()?;
        b.idle()
    })
}

pub fn a_move_that_fails_there_leaves_the_source_running(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-fail")?, |[a, b]| {
        let job = counter(a)?;
        join(a, b, || {
            b.fault(&["--call", "restore", "--error", "CUDA_ERROR_UNKNOWN"])?;
            not_moved(a, &[], "FIRN-MOVE-FAILED")?;
            job.goes_on(3)?;
            knows_nothing(b)?;
            b.no_faults()?;
            // The connection is cut off in the middle.
            wire(a, "cut")?;
            let output = failure(a.node().run(&MOVE))?;
            ensure!(
                output.contains("FIRN-MOVE-FAILED: ") || output.contains("FIRN-FILE: "),
                "{output}"
            );
            ensure!(job.status()? == "RUNNING");
            job.goes_on(3)?;
            knows_nothing(b)?;
            nothing_left(a)
        })?;
        job.remove()?;
        a.idle()
    })
}

/// Never both: it runs there, and stands still here. The copy is removed.
fn runs_only_there(job: &Container<'_>, b: &GpuHost) -> Result<()> {
    ensure!(job.status()? == "PAUSED", "{}", job.status()?);
    copy(b, "job", &b.uuids()[..1])?.remove()?;
    job.stands_still()
}

pub fn a_lost_answer_leaves_the_source_paused(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-lost")?, |[a, b]| {
        let job = counter(a)?;
        join(a, b, || {
            wire(a, "lose")?;
            not_moved(a, &[], "FIRN-MOVE-UNKNOWN")?;
            runs_only_there(&job, b)
        })?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        job.remove()?;
        a.idle()
    })
}

/// Begins a move, and waits until nothing comes from the other node any more.
fn stalled(a: &GpuHost, at: &str) -> Result<Child> {
    let node = a.node();
    node.run(&["rm", "-f", "/srv/stalled", "/srv/looked"])?;
    wire(a, at)?;
    let moving = node.spawn(&MOVE)?;
    wait_for("the stall", LIMIT, || {
        Ok(node.path("/srv/stalled").exists().then_some(()))
    })?;
    Ok(moving)
}

/// Kills a move once nothing comes from the other node any more, with its ssh.
fn kill(a: &GpuHost, at: &str) -> Result<()> {
    let mut moving = stalled(a, at)?;
    signal_firn(a, "-KILL")?;
    moving.wait()?;
    // Its ssh would end with its input.
    wait_for("the end of its ssh", LIMIT, || {
        let processes = a.node().processes();
        let ssh = processes.iter().find(|process| process.args == ["sleep", "600"]);
        if let Some(ssh) = ssh {
            let _gone = a.node().run(&["kill", "-KILL", &ssh.pid.to_string()]);
        }
        Ok(ssh.is_none().then_some(()))
    })
}

/// The source continues if no copy can run. Once one may, only its user resumes it.
pub fn a_killed_move_never_leaves_two(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-kill")?, |[a, b]| {
        let job = counter(a)?;
        join(a, b, || {
            kill(a, "stall-stream")?;
            job.becomes("RUNNING")?;
            job.goes_on(3)?;
            wait_for("the end of the restore there", LIMIT, || {
                Ok(knows_nothing(b).is_ok().then_some(()))
            })?;
            kill(a, "stall-answer")?;
            sleep(WATCHED);
            runs_only_there(&job, b)
        })?;
        let shown = a.node().run(&["firn", "ps"])?.stdout;
        ensure!(
            shown.contains("its copy may run") && !shown.contains("; to resume it: "),
            "{shown}"
        );
        let doctor = || Ok::<_, anyhow::Error>(a.node().run(&["sh", "-c", "firn doctor || true"])?.stdout);
        let paused = "default/job is paused: ";
        let found = doctor()?;
        ensure!(found.contains(paused), "{found}");
        job.task(&["resume"])?;
        job.goes_on(3)?;
        let shown = a.node().run(&["firn", "ps"])?.stdout;
        ensure!(!shown.contains("its copy may run"), "{shown}");
        let found = doctor()?;
        ensure!(!found.contains(paused), "{found}");
        job.remove()?;
        a.idle()?;
        b.idle()
    })
}

/// Interrupts a move once nothing comes from the other node any more. It ends at once, with this code.
fn interrupt(a: &GpuHost, at: &str, code: &str) -> Result<()> {
    let moving = stalled(a, at)?;
    let begun = Instant::now();
    signal_firn(a, "-INT")?;
    let output = moving.wait_with_output()?;
    ensure!(begun.elapsed() < LIMIT, "{at}: {:?}", begun.elapsed());
    let shown = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1), "{at}: {shown}");
    ensure!(shown.contains(&format!("{code}: ")), "{at}: {shown}");
    Ok(())
}

pub fn a_node_that_stalls_holds_nothing(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-stall")?, |[a, b]| {
        let job = counter(a)?;
        join(a, b, || {
            // Without an index nothing is begun there.
            for at in ["stall-check", "stall-stream"] {
                interrupt(a, at, "FIRN-INTERRUPTED")?;
                ensure!(job.status()? == "RUNNING", "{at}: {}", job.status()?);
                job.goes_on(3)?;
                knows_nothing(b)?;
                nothing_left(a)?;
            }
            // It runs there: it is for the person who interrupts to look.
            for at in ["stall-answer", "stall-confirm"] {
                interrupt(a, at, "FIRN-MOVE-UNKNOWN")?;
                ensure!(job.status()? == "PAUSED", "{at}: {}", job.status()?);
                copy(b, "job", &b.uuids()[..1])?.remove()?;
                job.stands_still()?;
                job.task(&["resume"])?;
                job.goes_on(3)?;
            }
            // Nobody interrupts: every wait has a limit, by the deadlines of a restore.
            a.configure(
                "[deadlines]\ninventory = \"10s\"\nlook = \"10s\"\nverify = \"1s\"\ncriu-restore = \"1s\"\n\
                 gpu-restore = \"5s\"\ngpu-unlock = \"1s\"\nrestored = \"1s\"\nend = \"5s\"\n",
            )?;
            wire(a, "stall-answer")?;
            not_moved(a, &[], "FIRN-MOVE-UNKNOWN")?;
            ensure!(job.status()? == "PAUSED");
            copy(b, "job", &b.uuids()[..1])?.remove()
        })?;
        job.task(&["resume"])?;
        job.goes_on(3)?;
        job.remove()?;
        a.idle()
    })
}

pub fn a_copy_that_dies_after_its_start_costs_nothing(platform: Platform) -> Result<()> {
    on(pair(platform, "tm-dies")?, |[a, b]| {
        let job = counter(a)?;
        join(a, b, || {
            let before = job.lines()?;
            b.node().run(&["touch", "/srv/die"])?;
            let output = not_moved(a, &[], "FIRN-MOVE-ENDED")?;
            ensure!(output.contains("with status 137"), "{output}");
            ensure!(job.status()? == "RUNNING");
            ensure!(job.goes_on(3)?.reached(1) >= before.reached(1));
            b.node().run(&["rm", "/srv/die"])?;
            // What is left there is named, and in the way of the next move.
            not_moved(a, &[], "FIRN-MOVE-TARGET")?;
            Container::known(b, "job").remove()?;
            moved(a, &[])?;
            knows_nothing(a)?;
            copy(b, "job", &b.uuids()[..1])?.remove()
        })?;
        a.idle()?;
        b.idle()
    })
}
