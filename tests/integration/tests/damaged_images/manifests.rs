//! Manifests with a checksum that fits, whose content is impossible or too large.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use firn_lab::SimGpu;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::damaged_images::job::Job;
use crate::damaged_images::{MEMORY, TRUNCATED, UNREADABLE, shim_memory};

/// The manifest of the image with another body, and a checksum that fits. Its needs are those of an image
/// with GPUs and large memory.
pub fn forge(dir: &Path, body: &str) -> Result<()> {
    let digest = Sha256::digest(body.as_bytes());
    let sum: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let head = r#"{"format":"firn-checkpoint","major":1,"minor":0,"needs":["nvidia","blake3"]"#;
    let text = format!(r#"{head},"sha256":"{sum}","body":{body}}}"#);
    Ok(fs::write(dir.join("firn.json"), text)?)
}

/// A change of a manifest, and the code with which it is refused.
pub type Lie = (&'static str, &'static str, Change);

pub type Change = fn(&mut Value);

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
            .for_each(|images| images.push(json!({"name": "zero.img", "size": 0, "sha256": "0".repeat(64)})));
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
        body["mounts"] = json!([{"destination": "/etc", "source_name": "shadow", "in_use": true}]);
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

pub fn lies(job: &Job<'_>, image: &str, dir: &Path) -> Result<()> {
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
        job.expect_accepted(image)?;
    }
    forge(dir, &"x".repeat(LONG))?;
    job.refused(image, &["FIRN-MANIFEST-TOO-LARGE"])?;
    fs::File::create(&file)?.set_len(1 << 30)?;
    job.refused(image, &["FIRN-MANIFEST-TOO-LARGE"])?;

    // A file of the list that is a link out of the image, to a file that is as listed.
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
    job.expect_accepted(image)
}
