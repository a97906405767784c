//! What a container writes after a restore or a move.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, FIRN, GpuHost, IMAGE, on};
use firn_node::{Platform, wait_for};

use super::failures::ends;
use super::{LIMIT, counter, host, nothing_left};

const TALK: &str = "i=0; while :; do i=$((i + 1)); echo line $i; sleep 0.05; done";
const LOG: &str = "/var/lib/firn/logs/default/talk.log";

/// The numbers of the lines that `firn logs` shows of the container.
fn shown(host: &GpuHost) -> Result<Vec<u64>> {
    numbers(&host.node().run(&["firn", "logs", "talk"])?.stdout)
}

/// The last line may not be whole yet.
fn numbers(text: &str) -> Result<Vec<u64>> {
    let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
    let lines = whole.lines().map(|line| {
        let number = line.trim_end().strip_prefix("line ").context("no line")?;
        Ok(number.parse()?)
    });
    lines.collect::<Result<_>>().with_context(|| text.to_owned())
}

/// No line is missing, and none is there twice.
fn is_in_order(lines: &[u64]) -> bool {
    lines.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

/// Waits until `firn logs` shows more than so many lines.
fn reaches(host: &GpuHost, count: usize) -> Result<Vec<u64>> {
    wait_for("the output of the copy", LIMIT, || {
        let lines = shown(host)?;
        Ok((lines.len() > count).then_some(lines))
    })
}

pub fn what_a_copy_writes_is_kept(platform: Platform) -> Result<()> {
    on([host(platform, "to-out", 1)?], |[host]| {
        for options in ["", "--tty"] {
            // ctr wants a terminal of its own for that.
            let run = format!("ctr run --detach --runtime {FIRN} {options} {IMAGE} talk sh -c '{TALK}'");
            host.node().run(&["script", "-qec", &run, "/dev/null"])?;
            let talk = Container::known(host, "talk");
            host.firn(&["checkpoint", "talk", "/srv/talk.tar", "--exit"])?;
            talk.forget()?;
            let done = host.firn(&["restore", "/srv/talk.tar"])?;
            ensure!(done["log"] == LOG, "{done}");
            is_kept(host).context(options)?;
            host.node().run(&["rm", LOG, "/srv/talk.tar"])?;
        }
        // Its client has taken other ways.
        let job = counter(host)?;
        ends(host, &["logs", "job"], 1, "FIRN-NO-LOG")?;
        job.remove()?;
        ends(host, &["logs", "job"], 1, "FIRN-NO-CONTAINER")?;
        let options = ["--runtime", FIRN, "--log-uri", "file:///srv/talk%20log"];
        let talk = Container::run(host, "talk", &options, &["sh", "-c", TALK])?;
        ensure!(is_in_order(&reaches(host, 3)?));
        talk.remove()?;
        nothing_left(host)?;
        host.idle()
    })
}

fn is_kept(host: &GpuHost) -> Result<()> {
    let talk = Container::known(host, "talk");
    let follow = host.node().spawn(&["firn", "logs", "talk", "--follow"])?;
    ensure!(is_in_order(&reaches(host, 5)?));
    let mode = ["stat", "-c", "%a %U", "/var/lib/firn/logs", LOG];
    let mode = host.node().run(&mode)?.stdout;
    ensure!(mode == "700 root\n600 root\n", "{mode}");
    // Its reader may end before it.
    let first = host
        .node()
        .run(&["sh", "-c", "firn logs talk -f | head -n 1"])?
        .stdout;
    ensure!(numbers(&first)?.len() == 1, "{first}");
    talk.task(&["kill", "--signal", "SIGKILL"])?;
    let followed = follow.wait_with_output()?;
    ensure!(followed.status.success(), "{followed:?}");
    // Its file outlives the task, and a second copy adds to it.
    talk.task(&["delete"])?;
    let first = shown(host)?;
    ensure!(
        numbers(&String::from_utf8(followed.stdout)?)? == first,
        "{first:?}"
    );
    host.firn(&["restore", "/srv/talk.tar", "--into", "talk"])?;
    let all = reaches(host, first.len() + 3)?;
    ensure!(
        all.starts_with(&first) && is_in_order(&all[first.len()..]),
        "{all:?}"
    );
    // Nothing is kept where that is wanted.
    talk.task(&["delete", "--force"])?;
    let all = shown(host)?;
    let again = ["restore", "/srv/talk.tar", "--into", "talk", "--log", "/dev/null"];
    let done = host.firn(&again)?;
    ensure!(done["log"] == "/dev/null", "{done}");
    ends(host, &["logs", "talk"], 1, "FIRN-NO-LOG")?;
    talk.remove()?;
    ensure!(shown(host)? == all);
    Ok(())
}
