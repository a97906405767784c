//! A dump is broken off while CRIU writes the memory of the container: CRIU's code is in the process then,
//! and has made memory readable that was not. It comes to its end before the driver maps memory there again.

use anyhow::{Context, Result, ensure};
use firn_lab::{Container, GpuHost, Task, describe, on};
use firn_node::Platform;

use super::{LIMIT, checkpoint, host, image_is};

/// GPU memory in MiB, which is written in much more time than it takes to stop CRIU.
const MIB: &str = "256";

/// Stops CRIU in the middle of the pages, and hits a program. Fails when CRIU was too fast.
const HIT: &str = r#"
of() {
    for dir in /proc/[0-9]*; do
        { read -r name <"$dir/comm"; } 2>/dev/null
        [ "$name" != "$1" ] || echo "${dir#/proc/}"
    done
}
size() {
    total=0
    for size in $(stat -c %s /tmp/image/pages-*.img 2>/dev/null); do total=$((total + size)); done
    echo $total
}
until [ "$(size)" -gt 1048576 ]; do :; done
criu=$(of criu)
kill -STOP $criu || exit 1
if [ "$(size)" -ge 268435456 ]; then
    kill -CONT $criu
    exit 1
fi
case $1 in
criu) kill -KILL $criu ;;
runc) kill -KILL $(of runc) || true ;;
esac
"#;

/// What is killed while CRIU stands still, and the error that the client gets. firn freezes the container
/// before it kills CRIU; where CRIU is killed first, its code ends by itself, mostly before the freeze.
const KILLED: [(&str, &str); 3] = [
    ("runc", "ended by signal 9"),
    ("criu", "FIRN-DUMP"),
    // The deadline of the dump passes.
    ("none", "did not end within"),
];

/// A checkpoint in which it was hit.
fn hit(host: &GpuHost, job: &Container<'_>, killed: &str, cause: &str) -> Result<()> {
    let node = host.node();
    let task = Task::of(host, "job")?;
    for _ in 0..5 {
        let pending = checkpoint(&task, false)?;
        let limit = LIMIT.as_secs().to_string();
        let hit = node.run(&["timeout", &limit, "sh", "-c", HIT, "hit", killed]);
        if hit.is_err() {
            // It had written everything: once more.
            let done = describe(&task.end(pending), |_| "success".to_owned());
            ensure!(done == "success", "it stood still for a moment: {done}");
            image_is(host, true)?;
            continue;
        }
        let ended = describe(&task.end(pending), |_| "success".to_owned());
        ensure!(ended.contains(cause), "the checkpoint returns: {ended}");
        job.goes_on(3).with_context(|| ended)?;
        return image_is(host, false);
    }
    anyhow::bail!("CRIU was never hit in the middle of the pages")
}

pub(super) fn memory_stays_mapped_when_a_dump_ends_in_its_pages(platform: Platform) -> Result<()> {
    on([host(platform, "rc-pages", 1)?], |[host]| {
        host.configure("[deadlines]\ncriu-dump = \"10s\"\n")?;
        let job = Container::count_with(host, "job", &["0"], 1, &[], &["--mib", MIB])?;
        job.goes_on(2)?;
        for (killed, cause) in KILLED {
            hit(host, &job, killed, cause).with_context(|| format!("{killed} is killed"))?;
        }
        job.remove()?;
        host.idle()
    })
}
