//! Images that were changed to give a container more than its spec allows: each is refused, nothing is gained
//! by it and nothing is left, and the image that it was made from restores afterwards.
//!
//! The images are real ones, of containers without any privilege; firn's manifest is made to fit again, as an
//! attacker would. The same images are given to containerd's own shim, and what came of it is printed as a
//! table.

mod cases;
mod fronts;
mod made;
mod specs;
mod wire;

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_lab::{
    Archive, Container, FIRN, GpuHost, IMAGE, STOCK, SimGpu, cases, failure, matrix, nothing_left, on,
};
use firn_node::{Platform, wait_for};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::image_privileges::cases::{BELOW, CASES, Case, HOST_FILE, VICTIM, cgroup_below};

/// What ctr gives a container by default.
const CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

const PLAIN: &str = "checkpoint/plain";
const GPU: &str = "checkpoint/gpu";
const HOSTILE: &str = "checkpoint/hostile";
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i >>/log; sleep 0.1; done";
const LIMIT: Duration = Duration::from_secs(60);

/// No capability, a seccomp filter; no_new_privs and the namespaces are ctr's own.
fn restrictions() -> Vec<String> {
    let dropped = CAPABILITIES
        .iter()
        .flat_map(|name| ["--cap-drop".to_owned(), format!("CAP_{name}")]);
    dropped.chain(["--seccomp".to_owned()]).collect()
}

/// Images of a container without and one with a GPU.
fn images(host: &GpuHost) -> Result<()> {
    let restrictions = restrictions();
    let restrictions: Vec<&str> = restrictions.iter().map(String::as_str).collect();
    let options = [&["--runtime", FIRN], &restrictions[..]].concat();
    let plain = Container::run(host, "job", &options, &["sh", "-c", COUNT])?;
    counts(host)?;
    fronts::keep_bundle(host, PLAIN)?;
    plain.checkpoint(PLAIN)?;
    plain.remove()?;
    let gpu = Container::count_with(host, "job", &["0"], 1, &restrictions, &[])?;
    gpu.goes_on(3)?;
    fronts::keep_bundle(host, GPU)?;
    gpu.checkpoint(GPU)?;
    gpu.remove()
}

/// Waits until the container without GPU writes on.
fn counts(host: &GpuHost) -> Result<()> {
    let log = host.node().path(format!("{}/job/rootfs/log", firn_lab::BUNDLES));
    let length = || fs::metadata(&log).map_or(0, |log| log.len());
    let before = length();
    wait_for(
        "more numbers",
        LIMIT,
        || Ok((length() > before + 4).then_some(())),
    )
}

fn restores(host: &GpuHost, image: &str) -> Result<()> {
    let (job, _) = Container::restore(host, "job", image, usize::from(image == GPU))?;
    match image {
        GPU => job.goes_on(3).map(drop)?,
        _ => counts(host)?,
    }
    job.remove()?;
    host.idle()
}

/// Makes firn's manifest one of the files as they are now.
fn sign(dir: &Path) -> Result<()> {
    let path = dir.join("firn.json");
    let Ok(text) = fs::read(&path) else {
        return Ok(());
    };
    let mut manifest: Value = serde_json::from_slice(&text)?;
    let images = manifest["body"]["images"].as_array_mut().context("no images")?;
    let names: Vec<String> = fs::read_dir(dir)?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".img") || name == "descriptors.json")
        .collect();
    images.clear();
    for name in names {
        let file = dir.join(&name);
        let is_file = file.metadata()?.is_file();
        let bytes = if is_file { fs::read(file)? } else { Vec::new() };
        images.push(if bytes.len() < 1 << 20 {
            json!({ "name": name, "size": bytes.len(), "sha256": sum(&bytes) })
        } else {
            let sum = blake3::hash(&bytes).to_string();
            json!({ "name": name, "size": bytes.len(), "blake3": sum })
        });
    }
    let body = manifest["body"].take().to_string();
    let (major, minor, needs) = (&manifest["major"], &manifest["minor"], &manifest["needs"]);
    let sha256 = sum(body.as_bytes());
    let envelope = format!(r#""major":{major},"minor":{minor},"needs":{needs},"sha256":"{sha256}""#);
    let text = format!(r#"{{"format":"firn-checkpoint",{envelope},"body":{body}}}"#);
    Ok(fs::write(path, text)?)
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The image as the attacker has changed it, of a container under this runtime.
fn make(host: &GpuHost, image: &str, runtime: &str, edit: fn(&Path) -> Result<()>) -> Result<()> {
    let mut archive = Archive::export(host, image)?;
    archive.describe(IMAGE, runtime);
    archive.edit(|dir| {
        edit(dir)?;
        sign(dir)
    })?;
    archive.import(host, HOSTILE)
}

/// firn refuses it before runc is called, and nothing is there afterwards.
fn expect_refused(host: &GpuHost, image: &str, case: &Case) -> Result<()> {
    make(host, image, FIRN, case.edit)?;
    let output = failure(Container::restore(host, "job", HOSTILE, 1).map(drop))?;
    let code = format!("{}:", case.code_of(image));
    ensure!(output.contains(&code), "not {code} but:\n{output}");
    ensure!(output.contains("hint: "), "no hint in:\n{output}");
    ensure!(
        !host.runc_has("restore")? && !host.runc_has("create")?,
        "runc was called"
    );
    host.node().run(&["ctr", "containers", "delete", "job"])?;
    nothing_left(host, "job")?;
    ensure!(host.node().read(HOST_FILE)? == "the host's", "a file of the host");
    host.remove_image(HOSTILE)
}

/// What the stock shim makes of it; nothing when it does not come to an end.
fn by_stock(host: &GpuHost, case: &Case) -> Result<Option<String>> {
    make(host, PLAIN, STOCK, case.edit)?;
    let restore = [
        "timeout",
        "20",
        "ctr",
        "containers",
        "restore",
        "--rw",
        "--live",
        "job",
        HOSTILE,
    ];
    let output = host.output_of(&restore, "")?;
    let mut seen = match output.code {
        Some(0) => gained(host)?,
        Some(124) => return Ok(None),
        _ => "not restored".to_owned(),
    };
    if host.node().read(HOST_FILE)? != "the host's" {
        seen.push_str(", a file of the host written");
        host.node().write(HOST_FILE, "the host's")?;
    }
    for last in [
        &["ctr", "tasks", "kill", "--signal", "SIGKILL", "job"][..],
        &["sleep", "1"],
        &["ctr", "tasks", "delete", "--force", "job"],
        &["ctr", "containers", "delete", "job"],
        &["ctr", "images", "remove", "--sync", HOSTILE],
    ] {
        let output = host.output_of(&[&["timeout", "10"], last].concat(), "")?;
        if output.code == Some(124) {
            return Ok(None);
        }
    }
    let left = |process: &firn_node::Process| process.args.iter().any(|argument| argument == COUNT);
    if host.node().processes().iter().any(left) {
        Ok(None)
    } else {
        Ok(Some(seen))
    }
}

/// Capabilities, restrictions and user of a process that are not as the spec has them.
fn gained_by_status(status: &str) -> Vec<String> {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim).unwrap_or_default().to_owned()
    };
    let mut seen = Vec::new();
    for set in ["CapInh", "CapEff", "CapBnd", "CapAmb"] {
        let value = field(&format!("{set}:"));
        if value.chars().any(|digit| digit != '0') {
            seen.push(format!("{set} {value}"));
        }
    }
    for (name, expected) in [("NoNewPrivs:", "1"), ("Seccomp:", "2")] {
        if field(name) != expected {
            seen.push(format!("{name} {}", field(name)));
        }
    }
    if !field("Uid:").starts_with('0') {
        seen.push(format!(
            "uid {}",
            field("Uid:").split_whitespace().next().unwrap_or_default()
        ));
    }
    seen
}

/// Mounts of a process that are not as the spec has them.
fn gained_by_mounts(mounts: &str) -> Vec<String> {
    let mut seen = Vec::new();
    let options = |point: &str| {
        let mut lines = mounts
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        lines
            .find(|fields| fields.get(4) == Some(&point))
            .and_then(|fields| Some(fields.get(5)?.to_string()))
    };
    for point in ["/proc/sys", "/sys"] {
        if options(point).is_none_or(|options| options.starts_with("rw")) {
            seen.push(format!("{point} writable"));
        }
    }
    if options("/proc/keys").is_none() {
        seen.push("/proc/keys open".to_owned());
    }
    if options("/mnt").is_some() {
        seen.push("the mount".to_owned());
    }
    seen
}

/// What a restored container has that its spec does not give it.
fn gained(host: &GpuHost) -> Result<String> {
    let table = host.node().run(&["ctr", "tasks", "list"])?.stdout;
    let pid = table
        .lines()
        .filter_map(|row| row.strip_prefix("job ")?.split_whitespace().next())
        .next()
        .context("no task")?
        .to_owned();
    let read = |file: &str| {
        Ok::<_, anyhow::Error>(host.node().run(&["cat", &format!("/proc/{pid}/{file}")])?.stdout)
    };
    let mut seen = gained_by_status(&read("status")?);
    for kind in ["net", "ipc", "uts", "pid", "mnt"] {
        let link = |of: &str| host.node().run(&["readlink", &format!("/proc/{of}/ns/{kind}")]);
        if link(&pid)?.stdout == link("1")?.stdout {
            seen.push(format!("the host's {kind} namespace"));
        }
    }
    if read("cgroup")?.contains(VICTIM) {
        seen.push("the other's cgroup".to_owned());
    }
    if let Some(limit) = read("limits")?
        .lines()
        .find(|line| line.starts_with("Max open files"))
        && !limit.contains(" 1024 ")
    {
        seen.push(limit.split_whitespace().take(4).collect::<Vec<_>>().join(" "));
    }
    let score = read("oom_score_adj")?;
    if score.starts_with('-') {
        seen.push(format!("oom_score_adj {}", score.trim()));
    }
    let policy = host
        .node()
        .run(&["chrt", "-p", &pid])
        .map(|output| output.stdout)
        .unwrap_or_default();
    if policy.contains("SCHED_FIFO") {
        seen.push("SCHED_FIFO".to_owned());
    }
    seen.extend(gained_by_mounts(&read("mountinfo")?));
    let fds = host.node().run(&["ls", "-l", &format!("/proc/{pid}/fd")])?.stdout;
    let foreign = fds
        .lines()
        .filter(|line| line.contains(" -> /") && !line.contains("/dev/null"))
        .count();
    if foreign > 0 {
        seen.push(format!("{foreign} descriptors of others"));
    }
    Ok(if seen.is_empty() {
        "restored, nothing gained".to_owned()
    } else {
        format!("restored with {}", seen.join(", "))
    })
}

/// Cgroups that an image adds below its container's own are not made, nor are their properties set.
fn no_cgroup_is_made(host: &GpuHost) -> Result<()> {
    make(host, PLAIN, FIRN, |dir| cgroup_below(dir, "pids.max", "7"))?;
    let (job, _) = Container::restore(host, "job", HOSTILE, 0)?;
    counts(host)?;
    let made = host
        .node()
        .run(&["find", "/sys/fs/cgroup", "-name", BELOW])?
        .stdout;
    ensure!(made.is_empty(), "made:\n{made}");
    let pid = job.pid()?;
    let cgroups = host.node().run(&["cat", &format!("/proc/{pid}/cgroup")])?.stdout;
    ensure!(cgroups.contains("/default/job"), "it is in\n{cgroups}");
    job.remove()?;
    host.remove_image(HOSTILE)
}

/// Device nodes that come with the root file system's own layer are there and of no use.
fn no_device_is_opened(host: &GpuHost) -> Result<()> {
    let mut archive = Archive::export(host, PLAIN)?;
    archive.edit_rootfs(|dir| {
        let mut mknod = Command::new("mknod");
        let made = mknod
            .arg("-m666")
            .arg(dir.join("disk"))
            .args(["c", "10", "237"])
            .status()?;
        ensure!(made.success(), "mknod");
        Ok(())
    })?;
    archive.import(host, HOSTILE)?;
    let (job, _) = Container::restore(host, "job", HOSTILE, 0)?;
    counts(host)?;
    let output = failure(job.exec(&["head", "-c1", "/disk"]))?;
    ensure!(output.contains("Operation not permitted"), "{output}");
    job.remove()?;
    host.remove_image(HOSTILE)
}

/// Of two mounts of one source CRIU gives the second no flags: it would be writable after a restore.
fn mounts_stay_read_only(host: &GpuHost) -> Result<()> {
    host.node().run(&["mkdir", "-p", "/srv/shared"])?;
    let mount = |point| format!("type=bind,src=/srv/shared,dst={point},options=rbind:ro:nosuid:nodev");
    let (one, other) = (mount("/one"), mount("/other"));
    let options = ["--runtime", FIRN, "--mount", &one, "--mount", &other];
    let job = Container::run(host, "job", &options, &["sh", "-c", COUNT])?;
    counts(host)?;
    job.checkpoint(HOSTILE)?;
    job.remove()?;
    let (job, _) = Container::restore(host, "job", HOSTILE, 0)?;
    counts(host)?;
    let mounts = host
        .node()
        .run(&["cat", &format!("/proc/{}/mountinfo", job.pid()?)])?
        .stdout;
    for point in [" /one ", " /other "] {
        let line = mounts.lines().find(|line| line.contains(point));
        let line = line.with_context(|| format!("no{point}in\n{mounts}"))?;
        ensure!(line.contains(&format!("{point}ro,nosuid,nodev,")), "{line}");
    }
    let output = failure(job.exec(&["touch", "/other/file"]))?;
    ensure!(output.contains("Read-only file system"), "{output}");
    job.remove()?;
    host.remove_image(HOSTILE)
}

/// A node with images of containers without privileges, and another container.
fn testbed(platform: Platform, name: &str) -> Result<GpuHost> {
    let host = GpuHost::for_test(platform, name, &[SimGpu::h200(1), SimGpu::h200(2)])?;
    host.node().write(HOST_FILE, "the host's")?;
    images(&host)?;
    Container::run(&host, VICTIM, &["--runtime", STOCK], &["sleep", "100000"])?;
    Ok(host)
}

fn images_that_ask_for_more_than_the_spec_are_refused(platform: Platform) -> Result<()> {
    on([testbed(platform, "hostile")?], |[host]| {
        host.watch_runc()?;
        for case in CASES {
            for image in [PLAIN, GPU] {
                expect_refused(host, image, case).with_context(|| format!("{}, {image}", case.what))?;
            }
        }
        no_cgroup_is_made(host)?;
        no_device_is_opened(host)?;
        mounts_stay_read_only(host)?;
        for image in [PLAIN, GPU] {
            let (job, _) = Container::restore(host, "job", image, usize::from(image == GPU))?;
            match image {
                GPU => job.goes_on(3).map(drop)?,
                _ => counts(host)?,
            }
            job.remove()?;
        }
        Ok(())
    })
}

/// What containerd's own shim makes of the same images: for people, as nothing of it is promised. A node on
/// which a restore hangs is given up.
fn table_of_the_stock_shim_with_the_same_images(platform: Platform) -> Result<()> {
    let mut host = testbed(platform, "stock-0")?;
    let good = Case {
        what: "unchanged",
        code: "restored",
        by_manifest: None,
        edit: |_| Ok(()),
    };
    let mut table = String::new();
    for (number, case) in [&good].into_iter().chain(CASES).enumerate() {
        let seen = by_stock(&host, case).with_context(|| case.what)?;
        let seen = match seen {
            Some(seen) => seen,
            None => {
                host = testbed(platform, &format!("stock-{}", number + 1))?;
                "it hangs".to_owned()
            }
        };
        writeln!(table, "| {} | {seen} | {} |", case.what, case.code)?;
    }
    println!("| image | stock shim ({platform}) | firn |\n|---|---|---|\n{table}");
    Ok(())
}

pub(crate) fn suite() -> matrix::Suite {
    matrix::Suite::new(&cases! {
        table_of_the_stock_shim_with_the_same_images [FORKY, TRIXIE] ignored;
        made::processes_of_other_containers_are_not_continued [FORKY, TRIXIE];
        made::processes_made_by_criu_are_compared_before_they_run [FORKY, TRIXIE];
        images_that_ask_for_more_than_the_spec_are_refused [FORKY, TRIXIE];
        fronts::every_front_end_refuses_the_same_images [FORKY, TRIXIE];
        fronts::a_mount_behind_a_link_is_restored_as_restricted [FORKY];
        specs::specs_that_ask_for_more_get_nothing [FORKY, TRIXIE];
    })
}
