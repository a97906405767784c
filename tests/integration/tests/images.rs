//! A checkpoint image that is not as it was made, or was made to do harm: refused with a code before runc is called, at
//! once, and nothing is left. The image as it was made restores afterwards.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{
    CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse, Mount, StartRequest, StartResponse,
};
use firn_lab::{
    Archive, BUNDLES, Container, FIRN, GpuHost, SHARES_NOTHING, SimGpu, Task, failure, nothing_left, on, told,
};
use firn_node::{Cgroup, Suite};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// How long a refusal may take: far less than anything that waits.
const AT_ONCE: Duration = Duration::from_secs(10);

/// The most that the shim may ever have had in memory, in KiB: several times what it needs to sum up an image.
const MEMORY: u64 = 128 << 10;

const BUNDLE: &str = "/run/raw/job";

/// The container "job", created by the calls that containerd makes, from image directories of the node.
struct Job<'h> {
    host: &'h GpuHost,
    task: Task,
    spec: String,
}

impl<'h> Job<'h> {
    fn new(host: &'h GpuHost, spec: String) -> Result<Self> {
        let task = Task::of(host, "anchor")?.with_id("job");
        host.watch_runc()?;
        Ok(Self { host, task, spec })
    }

    fn make_bundle(&self) -> Result<()> {
        fs::create_dir_all(self.host.node().path(BUNDLE))?;
        self.host
            .node()
            .write(format!("{BUNDLE}/config.json"), &self.spec)
    }

    /// Removes the bundle, in which nothing may be mounted any more.
    fn remove_bundle(&self) -> Result<()> {
        nothing_left(self.host, "job")?;
        let bundle = self.host.node().path(BUNDLE);
        fs::remove_dir(bundle.join("rootfs"))?;
        Ok(fs::remove_dir_all(bundle)?)
    }

    fn create(&self, image: &str) -> Result<ttrpc::Result<CreateTaskResponse>> {
        self.make_bundle()?;
        let request = CreateTaskRequest {
            id: "job".to_owned(),
            bundle: BUNDLE.to_owned(),
            checkpoint: image.to_owned(),
            rootfs: vec![Mount {
                type_: "bind".to_owned(),
                source: format!("{BUNDLES}/anchor/rootfs"),
                options: vec!["rbind".to_owned(), "rw".to_owned()],
                ..Mount::default()
            }],
            ..CreateTaskRequest::default()
        };
        Ok(self.task.call("Create", &request))
    }

    /// Refused with one of these codes, at once, and nothing is left. Gives what the client is told.
    fn refused(&self, image: &str, codes: &[&str]) -> Result<String> {
        let begun = Instant::now();
        let said = told(&self.create(image)?, |_| "accepted".to_owned());
        ensure!(begun.elapsed() < AT_ONCE, "after {:?}: {said}", begun.elapsed());
        ensure!(
            codes.iter().any(|code| said.contains(&format!(": {code}: "))),
            "none of {codes:?} but: {said}"
        );
        ensure!(said.contains("hint: "), "no hint: {said}");
        ensure!(!said.contains(char::is_control), "shown as it is: {said:?}");
        ensure!(
            !self.host.runc_has("create")? && !self.host.runc_has("restore")?,
            "runc was called"
        );
        let spec = self.host.node().read(format!("{BUNDLE}/config.json"))?;
        ensure!(spec == self.spec, "the spec was changed: {spec}");
        self.remove_bundle()?;
        Ok(said)
    }

    fn delete(&self) -> Result<()> {
        let mut request = DeleteRequest::new();
        request.id = "job".to_owned();
        self.task
            .call::<DeleteResponse>("Delete", &request)
            .context("Delete")?;
        self.remove_bundle()
    }

    /// Accepted: the refusals are not for another reason.
    fn accepted(&self, image: &str) -> Result<()> {
        self.create(image)?
            .with_context(|| format!("create from {image}"))?;
        self.delete()
    }
}

/// What is done to a file of an image; the other path is that of its namesake in another image. False: this file is
/// as good as it was.
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
        let beside = file.with_extension("moved");
        fs::rename(file, &beside)?;
        symlink(beside.file_name().context("no name")?, file)?;
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

/// Every file of an image, damaged in every way.
fn every_damage(job: &Job<'_>, image: &str, dir: &Path, other: &Path) -> Result<usize> {
    let names = listed(dir)?;
    ensure!(names.iter().any(|name| name.starts_with("pages-")), "{names:?}");
    job.accepted(image).context("as it was made")?;
    let mut cases = 0;
    for name in &names {
        let file = dir.join(name);
        let kept = dir.join("kept");
        fs::copy(&file, &kept)?;
        for (what, codes, damage) in DAMAGES {
            let damaged = damage(&file, &other.join(name))?;
            if damaged {
                cases += 1;
                job.refused(image, codes)
                    .with_context(|| format!("{name}: {what}"))?;
            }
            let _ = fs::remove_dir(&file).or_else(|_| fs::remove_file(&file));
            fs::copy(&kept, &file)?;
        }
        fs::remove_file(&kept)?;
    }
    job.accepted(image).context("as it was made again")?;
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
    let said = job.refused(image, &[CORRUPT])?;
    ensure!(said.contains("core-9999.img"), "{said}");
    fs::remove_file(dir.join("core-9999.img"))?;
    // CRIU would look for memory there.
    symlink("/etc", dir.join("parent"))?;
    job.refused(image, &[CORRUPT])?;
    fs::remove_file(dir.join("parent"))?;
    // Nobody reads it.
    fs::write(dir.join("notes"), "x")?;
    job.accepted(image)?;
    Ok(fs::remove_file(dir.join("notes"))?)
}

/// An image that changes between Create and Start.
fn changed_later(job: &Job<'_>, image: &str, dir: &Path) -> Result<()> {
    job.create(image)??;
    let file = dir.join("pstree.img");
    fs::write(&file, fs::read(&file)?)?;
    let mut start = StartRequest::new();
    start.id = "job".to_owned();
    let said = told(&job.task.call::<StartResponse>("Start", &start), |_| {
        "started".to_owned()
    });
    ensure!(
        said.contains(": FIRN-IMAGE-CHANGED: ") && said.contains("pstree.img"),
        "{said}"
    );
    ensure!(!job.host.runc_has("restore")?, "runc was called");
    job.delete()
}

/// The manifest of the image with another body, and a checksum that fits.
fn forge(dir: &Path, body: &str) -> Result<()> {
    let digest = Sha256::digest(body.as_bytes());
    let sum: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let head = r#"{"format":"firn-checkpoint","major":1,"minor":0"#;
    let text = format!(r#"{head},"sha256":"{sum}","body":{body}}}"#);
    Ok(fs::write(dir.join("firn.json"), text)?)
}

/// A change of a manifest, and the code with which it is refused.
type Lie = (&'static str, &'static str, Change);

type Change = fn(&mut Value);

const IMPOSSIBLE: &str = "FIRN-MANIFEST-CORRUPT";

/// Longest manifests that are read.
const LONG: usize = 4 << 20;

const LIES: &[Lie] = &[
    ("a file above the image", IMPOSSIBLE, |body| {
        body["images"][0]["name"] = json!("../../etc/shadow");
    }),
    ("a file elsewhere", IMPOSSIBLE, |body| {
        body["images"][0]["name"] = json!("/dev/zero");
    }),
    ("NUL in a name", IMPOSSIBLE, |body| {
        body["images"][0]["name"] = json!("core-1.img\0");
    }),
    ("escapes in a name", IMPOSSIBLE, |body| {
        body["images"][0]["name"] = json!("\u{1b}[2J.img");
    }),
    ("a file that is not there", TRUNCATED, |body| {
        let images = body["images"].as_array_mut();
        images
            .into_iter()
            .for_each(|images| images.push(json!({"name": "zero.img", "size": 0})));
    }),
    ("a giant size", TRUNCATED, |body| {
        body["images"][0]["size"] = json!(u64::MAX);
    }),
    ("a size below zero", IMPOSSIBLE, |body| {
        body["images"][0]["size"] = json!(-1)
    }),
    ("half a byte", IMPOSSIBLE, |body| {
        body["images"][0]["size"] = json!(0.5)
    }),
    ("a number of 400 digits", IMPOSSIBLE, |body| {
        body["processes"][0]["pid"] = json!(1e300);
    }),
    ("pid 0", IMPOSSIBLE, |body| body["processes"][0]["pid"] = json!(0)),
    ("all processes", IMPOSSIBLE, |body| {
        body["processes"][0]["pid"] = json!(-1)
    }),
    ("a process twice", IMPOSSIBLE, |body| {
        let first = body["processes"][0].clone();
        let processes = body["processes"].as_array_mut();
        processes
            .into_iter()
            .for_each(|processes| processes.push(first.clone()));
    }),
    ("a state with escapes", IMPOSSIBLE, |body| {
        body["processes"][0]["state"] = json!("\u{1b}]0;owned\u{7}\u{202e}");
    }),
    ("10,000 GPUs", IMPOSSIBLE, |body| {
        let gpu = body["gpus"][0].clone();
        body["gpus"] = (0..10_000)
            .map(|number| {
                let mut gpu = gpu.clone();
                gpu["uuid"] = json!(SimGpu::h200(number).uuid);
                gpu
            })
            .collect();
    }),
    ("a GPU with escapes", IMPOSSIBLE, |body| {
        body["gpus"][0]["uuid"] = json!("GPU-\u{1b}[31m");
    }),
    ("a GPU more", "FIRN-GPU-COUNT", |body| {
        let mut gpu = body["gpus"][0].clone();
        gpu["uuid"] = json!(SimGpu::h200(2).uuid);
        let gpus = body["gpus"].as_array_mut();
        gpus.into_iter().for_each(|gpus| gpus.push(gpu.clone()));
    }),
    ("a device of the host", IMPOSSIBLE, |body| {
        body["gpus"][0]["node"] = json!({"path": "/dev/../dev/mem", "type": "c", "major": 1, "minor": 1});
    }),
    ("a mount of the host", "FIRN-MOUNT-NOT-IN-SPEC", |body| {
        body["mounts"] = json!([{"destination": "/etc", "source_name": "shadow"}]);
    }),
    ("a mount above", IMPOSSIBLE, |body| {
        body["mounts"] = json!([{"destination": "/data/../../etc", "source_name": "etc"}]);
    }),
    ("a flag that is no flag", IMPOSSIBLE, |body| {
        body["dump"]["open_tcp"] = json!("--root=/");
    }),
    ("a long text", IMPOSSIBLE, |body| {
        body["versions"]["runc"] = json!("x".repeat(LONG / 2));
    }),
    ("many files", IMPOSSIBLE, |body| {
        body["images"] = json!(vec![json!({"name": "", "size": 0}); LONG / 32]);
    }),
    ("many processes", IMPOSSIBLE, |body| {
        let process = json!({"pid": 1, "restore_tid": 1, "state": "running"});
        body["processes"] = json!(vec![process; LONG / 64]);
    }),
    ("a deep tree", IMPOSSIBLE, |body| {
        body["future"] = (0..100).fold(json!(0), |inner, _| json!([inner, {"x": 1}]));
        body["images"] = json!(null);
    }),
];

fn lies(job: &Job<'_>, image: &str, dir: &Path) -> Result<()> {
    let file = dir.join("firn.json");
    let kept = fs::read(&file)?;
    let honest: Value = serde_json::from_slice(&kept)?;
    for (what, code, lie) in LIES {
        let mut body = honest["body"].clone();
        lie(&mut body);
        forge(dir, &body.to_string())?;
        job.refused(image, &[code]).with_context(|| (*what).to_owned())?;
    }
    // What a JSON value cannot hold.
    let body = honest["body"].to_string();
    let twice = format!("{{\"processes\":[],{}", &body[1..]);
    let bomb = format!("{}1{}", "[".repeat(LONG / 4), "]".repeat(LONG / 4));
    let bombs = format!("{{\"future\":{bomb},{}", &body[1..]);
    let wide = format!("{{\"future\":[{}0],{}", "0,".repeat(LONG / 4), &body[1..]);
    for (what, text) in [("a key twice", &twice), ("a bomb", &bomb)] {
        forge(dir, text)?;
        job.refused(image, &[IMPOSSIBLE])
            .with_context(|| what.to_owned())?;
    }
    // A field of the future is skipped, without one call in another, and does no harm.
    for text in [&bombs, &wide] {
        forge(dir, text)?;
        job.accepted(image)?;
    }
    forge(dir, &"x".repeat(LONG))?;
    job.refused(image, &["FIRN-MANIFEST-TOO-LARGE"])?;
    fs::File::create(&file)?.set_len(1 << 30)?;
    job.refused(image, &["FIRN-MANIFEST-TOO-LARGE"])?;

    // A file of the list that is a link out of the image, to a file that is as the list says.
    let mut body = honest["body"].clone();
    let passwd = fs::read(job.host.node().path("/etc/passwd"))?;
    let sum: String = Sha256::digest(&passwd)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let images = body["images"].as_array_mut().context("no images")?;
    images.push(json!({"name": "zz.img", "size": passwd.len(), "sha256": sum}));
    symlink("/etc/passwd", dir.join("zz.img"))?;
    forge(dir, &body.to_string())?;
    job.refused(image, &[UNREADABLE])?;
    fs::remove_file(dir.join("zz.img"))?;

    fs::write(&file, &kept)?;
    let used = shim_memory(job.host)?;
    ensure!(used < MEMORY, "the shim has had {used} KiB");
    job.accepted(image)
}

/// The most that the shim of "anchor" has had in memory, in KiB.
fn shim_memory(host: &GpuHost) -> Result<u64> {
    let processes = host.node().processes();
    let shim = processes.iter().find(|process| {
        process.command.starts_with("containerd-shim") && process.args.iter().any(|arg| arg == "anchor")
    });
    let pid = shim.context("anchor has no shim")?.pid;
    let status = host.node().read(format!("/proc/{pid}/status"))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.and_then(|peak| peak.split_whitespace().next());
    Ok(peak.context("no VmHWM")?.parse()?)
}

/// A manifest that names the wrong thread or leaves a process out shows only when the processes are there: they are
/// not continued.
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
        let said = failure(Container::restore(host, "job", "checkpoint/lie", 4).map(drop))?;
        ensure!(said.contains("FIRN-MANIFEST-CORRUPT: "), "{what}: {said}");
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
    let said = failure(Container::restore(host, "plain", "checkpoint/damaged", 0).map(drop))?;
    ensure!(said.contains(CORRUPT) && said.contains("pstree.img"), "{said}");
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

#[test]
fn no_damaged_or_hostile_image_gains_anything() -> Result<()> {
    let host = GpuHost::for_test(Suite::Forky, Cgroup::Auto, "im", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
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
    })
}

/// What depends on runc, CRIU and containerd, and on the shim no more.
#[test]
fn no_damaged_or_hostile_image_gains_anything_on_trixie() -> Result<()> {
    let host = GpuHost::for_test(Suite::Trixie, Cgroup::Auto, "im-t", &[SimGpu::h200(1)])?;
    on([host], |[host]| {
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
    })
}
