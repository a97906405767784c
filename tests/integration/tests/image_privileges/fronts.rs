//! The same images through each front end: what containerd's shim refuses ([`super::refused`]), the others
//! refuse.
//!
//! `firn restore` takes the spec from the image. firn-runc gets a bundle as CRI-O writes it: with CRI-O's
//! annotations, and with those of a pod's author who wants more.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use firn_lab::{Archive, BUNDLES, GpuHost, failure, nothing_left, on};
use firn_node::Platform;
use serde_json::{Value, json};

use crate::image_privileges::cases::{CASES, HOST_FILE};
use crate::image_privileges::{GPU, HOSTILE, PLAIN, make, sign, testbed};

/// Where firn-runc gets its bundles and its image.
const DIR: &str = "/srv/fronts";
const IMAGE_DIR: &str = "/srv/fronts/image";

/// What CRI-O puts on a container, and what a pod's author adds.
const OF_PODS: [(&str, &str); 6] = [
    ("io.kubernetes.cri-o.ContainerType", "container"),
    ("io.kubernetes.cri-o.Metadata", "{}"),
    ("io.container.manager", "libpod"),
    ("firn.dev/criu-config", "/srv/evil/criu.conf"),
    ("firn.dev/parked", "x"),
    ("firn.dev/remap-policy", "subset"),
];

/// The bundle in which firn-runc restores an image.
pub fn bundle_of(image: &str) -> String {
    format!("{DIR}/{}", image.replace('/', "-"))
}

/// Keeps the spec and the root file system of the running container `job` for firn-runc.
pub fn keep_bundle(host: &GpuHost, image: &str) -> Result<()> {
    let (from, to) = (format!("{BUNDLES}/job"), bundle_of(image));
    host.node().run(&["mkdir", "-p", &to])?;
    let (root, own) = (format!("{from}/rootfs"), format!("{to}/rootfs"));
    host.node().run(&["cp", "--archive", &root, &own])?;
    let mut spec: Value = serde_json::from_str(&host.node().read(format!("{from}/config.json"))?)?;
    spec["root"]["path"] = json!(own);
    host.node().write(format!("{to}/given.json"), spec.to_string())
}

/// Calls firn-runc for a restore in a new bundle, whose spec has these annotations.
pub fn firn_runc(host: &GpuHost, image: &str, annotations: &[(&str, &str)]) -> Result<()> {
    let (bundle, node) = (bundle_of(image), host.node());
    let mut spec: Value = serde_json::from_str(&node.read(format!("{bundle}/given.json"))?)?;
    spec["annotations"] = annotations.iter().copied().collect();
    node.run(&["sh", "-c", &format!("rm -rf {bundle}/firn-* {bundle}/pid")])?;
    node.write(format!("{bundle}/config.json"), spec.to_string())?;
    runc(
        host,
        &bundle,
        &format!("restore --image-path {IMAGE_DIR} --detach --pid-file pid"),
    )
}

/// Calls firn-runc for the container in a bundle, and returns what it printed as the error.
fn runc(host: &GpuHost, bundle: &str, words: &str) -> Result<()> {
    let call = format!("timeout 60 firn-runc {words} job </dev/null >out 2>&1");
    let line = format!("cd {bundle}; {call} || {{ cat out >&2; exit 1; }}");
    host.node().run(&["sh", "-uc", &line]).map(drop)
}

/// Puts an image into firn-runc's directory, as this leaves it.
pub fn lay(host: &GpuHost, image: &str, edit: fn(&Path) -> Result<()>) -> Result<()> {
    let mut archive = Archive::export(host, image)?;
    host.node().run(&["rm", "-rf", IMAGE_DIR])?;
    let to = host.node().path(IMAGE_DIR);
    archive.edit(|dir| {
        edit(dir)?;
        sign(dir)?;
        let copied = Command::new("cp").arg("--archive").arg(dir).arg(&to).status()?;
        ensure!(copied.success(), "cp");
        Ok(())
    })
}

/// A front end has refused it by this code before runc was called, and nothing is there afterwards.
pub fn is_refused(host: &GpuHost, code: &str, done: Result<()>) -> Result<()> {
    let output = failure(done)?;
    ensure!(output.contains(&format!("{code}:")), "not {code} but:\n{output}");
    ensure!(output.contains("hint: "), "no hint in:\n{output}");
    ensure!(
        !host.runc_has("restore")? && !host.runc_has("create")?,
        "runc was called"
    );
    nothing_left(host, "job")?;
    ensure!(host.node().read(HOST_FILE)? == "the host's", "a file of the host");
    Ok(())
}

/// `firn restore`, and nothing is left of the name.
pub fn firn_restore(host: &GpuHost) -> Result<()> {
    let call = ["timeout", "60", "firn", "restore", HOSTILE, "--name", "job"];
    host.node().run(&call).map(drop)
}

/// `firn restore` and firn-runc refuse each image that the shim refuses, with the same code. A pod of CRI-O
/// restores nothing at all unless the operator permits it.
pub fn every_front_end_refuses_the_same_images(platform: Platform) -> Result<()> {
    on([testbed(platform, "fronts")?], |[host]| {
        host.watch_runc()?;
        lay(host, PLAIN, |_| Ok(()))?;
        is_refused(host, "FIRN-RESTORE-CRI", firn_runc(host, PLAIN, &OF_PODS))?;
        host.configure("[restore]\ncri = true\n")?;
        for case in CASES {
            for image in [PLAIN, GPU] {
                let named = |front| format!("{}, {image}, {front}", case.what);
                // It unpacks the archive itself, before it looks at the manifest.
                let code = case.code;
                make(host, image, firn_lab::FIRN, case.edit)?;
                is_refused(host, code, firn_restore(host)).with_context(|| named("firn restore"))?;
                host.remove_image(HOSTILE)?;
                lay(host, image, case.edit)?;
                let code = case.code_of(image);
                is_refused(host, code, firn_runc(host, image, &OF_PODS))
                    .with_context(|| named("firn-runc"))?;
            }
        }
        // What they were made from is restored.
        for image in [PLAIN, GPU] {
            lay(host, image, |_| Ok(()))?;
            firn_runc(host, image, &OF_PODS).with_context(|| format!("{image}, unchanged"))?;
            runc(host, &bundle_of(image), "delete --force")?;
            nothing_left(host, "job")?;
        }
        Ok(())
    })
}

/// The mount of a container's spec lies behind a link of its files, as /var/run is one in Debian's images.
pub fn a_mount_behind_a_link_is_restored_as_restricted(platform: Platform) -> Result<()> {
    on([testbed(platform, "behind")?], |[host]| {
        let (bundle, node) = (bundle_of(PLAIN), host.node());
        let files = "mkdir -p run/secrets var; rm -rf var/run; ln -s /run var/run; touch /srv/token";
        node.run(&["sh", "-euc", &format!("cd {bundle}/rootfs; {files}")])?;
        let mut spec: Value = serde_json::from_str(&node.read(format!("{bundle}/given.json"))?)?;
        spec["annotations"] = json!({});
        let mounts = spec["mounts"].as_array_mut().context("no mounts")?;
        mounts.push(json!({
            "destination": "/var/run/secrets/token",
            "type": "bind",
            "source": "/srv/token",
            "options": ["rbind", "rprivate", "ro", "nosuid", "nodev", "noexec"],
        }));
        node.write(format!("{bundle}/config.json"), spec.to_string())?;
        let mount = || -> Result<String> {
            let pid = node.read(format!("{bundle}/pid"))?;
            let mounts = node.run(&["cat", &format!("/proc/{pid}/mountinfo")])?.stdout;
            let line = mounts.lines().find(|line| line.contains(" /run/secrets/token "));
            Ok(line.with_context(|| mounts.clone())?.to_owned())
        };
        // Its streams are no files of the host, which CRIU could not find.
        let run = "firn-runc run --detach --pid-file pid job </dev/null >/dev/null 2>&1";
        node.run(&["sh", "-uec", &format!("cd {bundle}; timeout 60 {run}")])?;
        let strict = " /run/secrets/token ro,nosuid,nodev,noexec,";
        ensure!(mount()?.contains(strict), "{}", mount()?);
        runc(host, &bundle, "checkpoint --image-path image")?;
        node.run(&["rm", "-f", &format!("{bundle}/pid")])?;
        runc(
            host,
            &bundle,
            "restore --detach --pid-file pid --image-path image",
        )?;
        ensure!(mount()?.contains(strict), "{}", mount()?);
        runc(host, &bundle, "delete --force")?;
        nothing_left(host, "job")
    })
}
