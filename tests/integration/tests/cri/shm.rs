//! Files in a pod's /dev/shm: the checkpoint of a container has them, and its copy in another pod gets them.

use anyhow::{Result, ensure};
use firn_node::wait_for;
use serde_json::{Value, json};

use crate::cri::Point;
use crate::cri::client::{Cri, Ctr, Pod};
use crate::cri::named::{FROM, LIMIT, allowed, counter_after, keep_of, on_gpu};

pub const POINTS: &[Point] = &[Point::new(
    "restore by name: files in the pod's /dev/shm",
    "with a GPU: moved, no room: FIRN-POD-SHM; without: moved, no room: FIRN-POD-SHM",
    files,
)
.firn_only()];

/// Makes files in /dev/shm, and keeps one of them open.
const MAKE: &str = "cd /dev/shm; echo open >open; exec 7<>open; mkfifo pipe; exec 5<>pipe; \
                    echo closed >closed; mkdir -m 700 dir; echo deep >dir/deep; ln -s dir link; >/made;";

/// Opens a file by a name that is deleted while it has another one, as glibc opens a named semaphore. CRIU
/// alone cannot dump it: without a GPU firn leaves it to CRIU.
const LINKED: &str = "echo linked >/dev/shm/temporary; exec 6<>/dev/shm/temporary; \
                      ln /dev/shm/temporary /dev/shm/named; rm /dev/shm/temporary;";

/// What another container of the pod has open there.
const THEIRS: &str = "echo theirs >/dev/shm/theirs; exec 8</dev/shm/theirs; exec sleep 1000";

/// The files, and whether the open one still is the one with that name.
const SHOW: &str = "cd /dev/shm; for f in *; do [ ! -f $f ] || echo $f: $(cat $f); done; cat link/deep; \
                    [ /proc/1/fd/7 -ef open ] && [ -p pipe ] && echo same; \
                    [ ! -e named ] || [ /proc/1/fd/6 -ef named ] || echo another";

fn files(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let with_gpu = on_gpu(0, &counter_after(&format!("{LINKED} {MAKE}")));
        let plain = json!({ "command": ["sh", "-c", format!("{MAKE} while :; do sleep 1; done")] });
        let mut seen = Vec::new();
        for (what, special) in [("with a GPU", &with_gpu), ("without", &plain)] {
            keep(cri, special)?;
            let pod = pod(cri, what)?;
            let copy = pod.start_with("c", special)?;
            let named = if what == "without" { "" } else { "named: linked\n" };
            let expected =
                |closed: &str, open: &str| format!("closed: {closed}\n{named}open: {open}\ndeep\nsame\n");
            shows(&copy, &expected("closed", "open"))?;
            end(&copy)?;
            // What the checkpoint did not have open may be another container's by now.
            let copy = pod.start_with("c", special)?;
            shows(&copy, &expected("changed", "open"))?;
            pod.remove(&[&copy])?;
            find_in_use(cri, special, &expected("own", "used"))?;
            seen.push(format!("{what}: moved, no room: {}", without_room(cri, special)?));
        }
        Ok(seen.join("; "))
    })
}

/// A checkpoint of a container with files, in a pod in which another one has files, too.
fn keep(cri: Cri<'_>, special: &Value) -> Result<()> {
    cri.host.node().run(&["rm", "-rf", FROM])?;
    let pod = cri.pod_annotated("source", &json!({}))?;
    let other = pod.start("other", THEIRS)?;
    let container = pod.start_with("c", special)?;
    has_made(&container, "/made")?;
    has_made(&other, "/dev/shm/theirs")?;
    costs_nothing(&other, &container)?;
    keep_of(&pod, &container, "files")
}

/// Files that cannot be kept, here because of another container, cost a checkpoint and nothing else.
fn costs_nothing(other: &Ctr<'_>, container: &Ctr<'_>) -> Result<()> {
    const IMAGE: &str = "/tmp/refused";
    let host = container.cri.host;
    other.exec("mkdir -p /dev/shm/$(yes d | head -n 70 | tr '\\n' /)")?;
    let checkpoint = [
        "ctr",
        "-n",
        "k8s.io",
        "tasks",
        "checkpoint",
        "--image-path",
        IMAGE,
        &container.id,
    ];
    let output = host.output_of(&checkpoint, "")?.failed()?;
    ensure!(
        output.contains("FIRN-POD-SHM") && output.contains("in each other"),
        "{output}"
    );
    ensure!(container.exec("echo runs")?.contains("runs"), "it stands still");
    let image = host.node().path(IMAGE);
    let left = std::fs::read_dir(&image).map_or(0, Iterator::count);
    ensure!(left == 0, "{left} files are left");
    let _absent = std::fs::remove_dir(image);
    other.exec("rm -r /dev/shm/d").map(drop)
}

/// A pod whose container `c` is a copy.
fn pod<'h>(cri: Cri<'h>, what: &str) -> Result<Pod<'h>> {
    let name = what.replace(' ', "-").to_lowercase();
    cri.pod_annotated(&name, &json!({ "firn.dev/restore-from": "c=files" }))
}

fn has_made(container: &Ctr<'_>, file: &str) -> Result<()> {
    wait_for(file, LIMIT, || {
        let is_there = container.exec(&format!("test -e {file}"))?.starts_with('0');
        Ok(is_there.then_some(()))
    })
}

fn shows(container: &Ctr<'_>, expected: &str) -> Result<()> {
    let seen = container.output(SHOW)?;
    ensure!(seen == expected, "the copy shows {seen:?}, not {expected:?}");
    Ok(())
}

/// The copy changes its files and ends.
fn end(copy: &Ctr<'_>) -> Result<()> {
    copy.exec("cd /dev/shm; echo changed and longer >open; echo changed >closed; rm dir/deep")?;
    copy.stop(0)?;
    copy.remove()
}

/// Another container of the copy's pod has files of the same names.
fn find_in_use(cri: Cri<'_>, special: &Value, expected: &str) -> Result<()> {
    let pod = pod(cri, "used")?;
    let make = "cd /dev/shm; echo own >closed; echo used >open; exec 8<open; >/made; exec sleep 1000";
    let other = pod.start("other", make)?;
    has_made(&other, "/made")?;
    let copy = pod.start_with("c", special)?;
    shows(&copy, expected)?;
    let still = other.output("cat /proc/1/fd/8; [ /proc/1/fd/8 -ef /dev/shm/open ] && echo same")?;
    ensure!(still == "used\nsame\n", "the other container has {still:?}");
    pod.remove(&[&copy, &other])
}

/// Returns the code with which a copy is refused for whose files there is no room. Nothing of it is left.
fn without_room(cri: Cri<'_>, special: &Value) -> Result<String> {
    let pod = pod(cri, "full")?;
    let other = pod.start(
        "other",
        "dd if=/dev/zero of=/dev/shm/full bs=64k 2>/dev/null; >/made; exec sleep 1000",
    )?;
    has_made(&other, "/made")?;
    let copy = pod.create("c", special)?;
    let output = firn_lab::failure(copy.start())?;
    ensure!(
        output.contains("FIRN-POD-SHM") && output.contains("No space left"),
        "{output}"
    );
    let left = other.output("ls -A /dev/shm")?;
    ensure!(left == "full\n", "in /dev/shm are {left:?}");
    pod.remove(&[&copy, &other])?;
    Ok("FIRN-POD-SHM".to_owned())
}
