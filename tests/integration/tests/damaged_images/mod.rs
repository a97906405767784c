//! A checkpoint image that is not as it was made, or was made to do harm: refused with a code before runc is
//! called, at once, and nothing is left. Memory alone is compared while CRIU restores it. The image as it was
//! made restores afterwards.

mod job;
mod manifests;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use firn_lab::{
    Archive, BUNDLES, Container, FIRN, GpuHost, SHARES_NOTHING, SimGpu, cases, failure, matrix, on,
};
use firn_node::{Platform, Suite};
use serde_json::{Value, json};

use crate::damaged_images::job::Job;
use crate::damaged_images::manifests::{Change, forge, lies};

/// The most that the shim may ever have had in memory, in KiB: several times what it needs to sum up an
/// image.
const MEMORY: u64 = 128 << 10;

/// What is done to a file of an image; the other path is that of its namesake in another image. False: this
/// file is as good as it was.
type Damage = fn(&Path, &Path) -> Result<bool>;

const TRUNCATED: &str = "FIRN-IMAGE-TRUNCATED";
const CORRUPT: &str = "FIRN-IMAGE-CORRUPT";
const UNREADABLE: &str = "FIRN-IMAGE-UNREADABLE";

const DAMAGES: &[(&str, &[&str], Damage)] = &[
    ("empty", &[TRUNCATED], |file, _| cut(file, |_| 0)),
    ("half", &[TRUNCATED], |file, _| cut(file, |size| size / 2)),
    ("a byte less", &[TRUNCATED], |file, _| {
        cut(file, |size| size.saturating_sub(1))
    }),
    ("first bit", &[CORRUPT], |file, _| flip(file, |_| 0)),
    ("middle bit", &[CORRUPT], |file, _| flip(file, |size| size / 2)),
    ("last bit", &[CORRUPT], |file, _| flip(file, |size| size - 1)),
    ("removed", &[TRUNCATED], |file, _| {
        fs::remove_file(file)?;
        Ok(true)
    }),
    ("swapped", &[CORRUPT, TRUNCATED], |file, other| {
        let Ok(other) = fs::read(other) else {
            return Ok(false);
        };
        let differs = other != fs::read(file)?;
        fs::write(file, other)?;
        Ok(differs)
    }),
    ("a link", &[UNREADABLE], |file, _| {
        // To its own content.
        let moved = file.with_extension("moved");
        fs::rename(file, &moved)?;
        symlink(moved.file_name().context("no name")?, file)?;
        Ok(true)
    }),
    ("a directory", &[UNREADABLE], |file, _| {
        fs::remove_file(file)?;
        fs::create_dir(file)?;
        Ok(true)
    }),
    ("a fifo", &[UNREADABLE], |file, _| special(file, &["p"])),
    ("a device", &[UNREADABLE], |file, _| {
        special(file, &["c", "1", "5"])
    }),
];

fn cut(file: &Path, to: fn(u64) -> u64) -> Result<bool> {
    let file = fs::OpenOptions::new().write(true).open(file)?;
    let size = file.metadata()?.len();
    file.set_len(to(size))?;
    Ok(to(size) != size)
}

fn flip(file: &Path, at: fn(usize) -> usize) -> Result<bool> {
    let mut content = fs::read(file)?;
    if content.is_empty() {
        return Ok(false);
    }
    let at = at(content.len());
    content[at] ^= 1;
    fs::write(file, content)?;
    Ok(true)
}

fn special(file: &Path, kind: &[&str]) -> Result<bool> {
    fs::remove_file(file)?;
    let made = Command::new("mknod").arg(file).args(kind).status()?;
    ensure!(made.success(), "mknod {}", file.display());
    Ok(true)
}

/// Takes CRIU's files of an image into a directory of the node.
fn unpack(host: &GpuHost, image: &str, to: &str) -> Result<PathBuf> {
    let target = host.node().root().join(to.trim_start_matches('/'));
    Archive::export(host, image)?.edit(|dir| {
        fs::create_dir_all(&target)?;
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            fs::copy(entry.path(), target.join(entry.file_name()))?;
        }
        Ok(())
    })?;
    Ok(target)
}

/// Names of the files that the manifest describes.
fn listed(dir: &Path) -> Result<Vec<String>> {
    let manifest: Value = serde_json::from_slice(&fs::read(dir.join("firn.json"))?)?;
    let images = manifest["body"]["images"].as_array().context("no images")?;
    Ok(images
        .iter()
        .filter_map(|image| image["name"].as_str().map(str::to_owned))
        .collect())
}

/// Whether this is large memory of the size that it should have: only its content is wrong.
fn is_memory(file: &Path, kept: &Path) -> Result<bool> {
    let Ok(found) = fs::symlink_metadata(file) else {
        return Ok(false);
    };
    let is_pages = file
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("pages-"));
    let size = fs::metadata(kept)?.len();
    Ok(is_pages && found.is_file() && found.len() == size && size >= 1 << 20)
}

/// Every file of an image, damaged in every way.
fn every_damage(job: &Job<'_>, image: &str, dir: &Path, other: &Path) -> Result<usize> {
    let names = listed(dir)?;
    ensure!(names.iter().any(|name| name.starts_with("pages-")), "{names:?}");
    job.expect_accepted(image).context("as it was made")?;
    let mut cases = 0;
    for name in &names {
        let file = dir.join(name);
        let kept = dir.join("kept");
        fs::copy(&file, &kept)?;
        for (what, codes, damage) in DAMAGES {
            let damaged = damage(&file, &other.join(name))?;
            if damaged {
                cases += 1;
                if is_memory(&file, &kept)? {
                    job.refused_at_start(image, codes)
                } else {
                    job.refused(image, codes).map(drop)
                }
                .with_context(|| format!("{name}: {what}"))?;
            }
            let _ = fs::remove_dir(&file).or_else(|_| fs::remove_file(&file));
            fs::copy(&kept, &file)?;
        }
        fs::remove_file(&kept)?;
    }
    job.expect_accepted(image).context("as it was made again")?;
    Ok(cases)
}

/// The manifest, damaged in every way.
fn manifest_damages(job: &Job<'_>, image: &str, dir: &Path, other: &Path) -> Result<()> {
    let (file, kept) = (dir.join("firn.json"), fs::read(dir.join("firn.json"))?);
    for (what, _, damage) in DAMAGES {
        ensure!(damage(&file, &other.join("firn.json"))?, "{what} is no damage");
        let codes: &[&str] = match *what {
            "removed" => &["FIRN-MANIFEST-MISSING"],
            // Of another dump.
            "swapped" => &[CORRUPT, TRUNCATED],
            "a link" | "a directory" | "a fifo" | "a device" => &["FIRN-MANIFEST-UNREADABLE"],
            _ => &["FIRN-MANIFEST-CORRUPT"],
        };
        job.refused(image, codes)
            .with_context(|| format!("firn.json: {what}"))?;
        let _ = fs::remove_dir(&file).or_else(|_| fs::remove_file(&file));
        fs::write(&file, &kept)?;
    }
    Ok(())
}

/// What is added to an image.
fn additions(job: &Job<'_>, image: &str, dir: &Path) -> Result<()> {
    fs::write(dir.join("core-9999.img"), "x")?;
    let output = job.refused(image, &[CORRUPT])?;
    ensure!(output.contains("core-9999.img"), "{output}");
    fs::remove_file(dir.join("core-9999.img"))?;
    // CRIU would look for memory there.
    symlink("/etc", dir.join("parent"))?;
    job.refused(image, &[CORRUPT])?;
    fs::remove_file(dir.join("parent"))?;
    // Nobody reads it.
    fs::write(dir.join("notes"), "x")?;
    job.expect_accepted(image)?;
    Ok(fs::remove_file(dir.join("notes"))?)
}

/// An image that changes between Create and Start.
fn changed_later(job: &Job<'_>, image: &str, dir: &Path) -> Result<()> {
    job.create(image)??;
    let file = dir.join("pstree.img");
    fs::write(&file, fs::read(&file)?)?;
    let output = job.start();
    ensure!(
        output.contains(": FIRN-IMAGE-CHANGED: ") && output.contains("pstree.img"),
        "{output}"
    );
    ensure!(!job.host.runc_has("restore")?, "runc was called");
    job.delete()
}

/// The most that the shim of "anchor" has had in memory, in KiB.
fn shim_memory(host: &GpuHost) -> Result<u64> {
    let pid = host.shim_of("anchor")?.pid;
    let status = host.node().read(format!("/proc/{pid}/status"))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.and_then(|peak| peak.split_whitespace().next());
    Ok(peak.context("no VmHWM")?.parse()?)
}

/// A manifest that names the wrong thread or leaves a process out shows only when the processes are there:
/// they are not continued.
fn wrong_processes(host: &GpuHost, image: &str) -> Result<()> {
    let lies: [(&str, Change); 3] = [
        ("a thread of another process", |body| {
            body["processes"][0]["restore_tid"] = body["processes"][1]["restore_tid"].clone();
        }),
        ("a process left out", |body| {
            let processes = body["processes"].as_array_mut();
            processes.into_iter().for_each(|processes| drop(processes.pop()));
        }),
        ("a process that is not there", |body| {
            body["processes"][0]["pid"] = json!(4_000_000)
        }),
    ];
    for (what, lie) in lies {
        let mut archive = Archive::export(host, image)?;
        archive.edit(|dir| {
            let manifest: Value = serde_json::from_slice(&fs::read(dir.join("firn.json"))?)?;
            let mut body = manifest["body"].clone();
            lie(&mut body);
            forge(dir, &body.to_string())
        })?;
        archive.import(host, "checkpoint/lie")?;
        let output = failure(Container::restore(host, "job", "checkpoint/lie", 4).map(drop))?;
        ensure!(output.contains("FIRN-MANIFEST-CORRUPT: "), "{what}: {output}");
        host.node().run(&["ctr", "tasks", "delete", "job"])?;
        Container::known(host, "job").forget().context(what)?;
        host.remove_image("checkpoint/lie")?;
    }
    Ok(())
}

/// An image of a container without GPU is what runc alone makes of it, and a damaged one is refused.
fn without_gpu(host: &GpuHost) -> Result<()> {
    let work = ["sh", "-c", "while :; do sleep 0.1; done"];
    let plain = Container::run(host, "plain", &["--runtime", FIRN], &work)?;
    plain.checkpoint("checkpoint/plain")?;
    plain.remove()?;
    let dir = unpack(host, "checkpoint/plain", "/srv/plain")?;
    ensure!(!dir.join("firn.json").exists(), "a manifest without GPU");
    let mut archive = Archive::export(host, "checkpoint/plain")?;
    archive.edit(|dir| cut(&dir.join("pstree.img"), |size| size / 2).map(drop))?;
    archive.import(host, "checkpoint/damaged")?;
    let output = failure(Container::restore(host, "plain", "checkpoint/damaged", 0).map(drop))?;
    ensure!(
        output.contains(CORRUPT) && output.contains("pstree.img"),
        "{output}"
    );
    let _ = host.node().run(&["ctr", "tasks", "delete", "--force", "plain"]);
    Container::known(host, "plain").forget()?;
    let (plain, _) = Container::restore(host, "plain", "checkpoint/plain", 0)?;
    plain.becomes("RUNNING")?;
    plain.remove()
}

/// A checkpoint of this many counters, in containerd and as a directory. Gives the container's spec too.
fn image(host: &GpuHost, name: &str, processes: &str) -> Result<(PathBuf, String)> {
    let counters = processes.parse()?;
    let job = Container::count_with(
        host,
        "job",
        &["0"],
        counters,
        &SHARES_NOTHING,
        &["--procs", processes, "--mib", "2"],
    )?;
    job.goes_on(2)?;
    let spec = host.node().read(format!("{BUNDLES}/job/config.json"))?;
    job.checkpoint(&format!("checkpoint/{name}"))?;
    job.remove()?;
    let dir = unpack(host, &format!("checkpoint/{name}"), &format!("/srv/{name}"))?;
    Ok((dir, spec))
}

fn restores(host: &GpuHost, name: &str, counters: usize) -> Result<()> {
    let (job, _) = Container::restore(host, "job", &format!("checkpoint/{name}"), counters)?;
    job.goes_on(3)?;
    job.remove()
}

fn no_damaged_or_hostile_image_gains_privileges(platform: Platform) -> Result<()> {
    let host = GpuHost::for_test(platform, "im", &[SimGpu::h200(1)])?;
    on([host], |[host]| match platform.suite {
        Suite::Forky => all_damages(host),
        Suite::Trixie | Suite::Noble => damages_for_other_programs(host),
    })
}

fn all_damages(host: &GpuHost) -> Result<()> {
    let anchor = Container::run(host, "anchor", &["--runtime", FIRN], &["sleep", "100000"])?;
    let (one, spec) = image(host, "one", "1")?;
    let (other, _) = image(host, "other", "1")?;
    let (four, spec_of_four) = image(host, "four", "4")?;
    let job = Job::new(host, spec)?;
    let cases = every_damage(&job, "/srv/one", &one, &other)?;
    ensure!(cases > 200, "{cases} damages");
    manifest_damages(&job, "/srv/one", &one, &other)?;
    additions(&job, "/srv/one", &one)?;
    lies(&job, "/srv/one", &one)?;
    changed_later(&job, "/srv/one", &one)?;
    let job = Job::new(host, spec_of_four)?;
    let cases = every_damage(&job, "/srv/four", &four, &other)?;
    ensure!(cases > 300, "{cases} damages");
    drop(job);
    anchor.remove()?;
    wrong_processes(host, "checkpoint/four")?;
    without_gpu(host)?;
    restores(host, "one", 1)?;
    restores(host, "four", 4)?;
    host.idle()
}

/// What depends on runc, CRIU and containerd, and on the shim no more.
fn damages_for_other_programs(host: &GpuHost) -> Result<()> {
    let anchor = Container::run(host, "anchor", &["--runtime", FIRN], &["sleep", "100000"])?;
    let (other, _) = image(host, "other", "1")?;
    let (four, spec) = image(host, "four", "4")?;
    let job = Job::new(host, spec)?;
    manifest_damages(&job, "/srv/four", &four, &other)?;
    additions(&job, "/srv/four", &four)?;
    changed_later(&job, "/srv/four", &four)?;
    drop(job);
    anchor.remove()?;
    wrong_processes(host, "checkpoint/four")?;
    without_gpu(host)?;
    restores(host, "four", 4)?;
    host.idle()
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        no_damaged_or_hostile_image_gains_privileges [FORKY, TRIXIE];
    })
    .first()
}
