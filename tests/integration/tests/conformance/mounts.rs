//! 1.8: mounts, user namespaces and unmounting.

use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{DeleteRequest, DeleteResponse};
use firn_lab::describe;

use crate::conformance::manual::STEP;
use crate::conformance::mount_lab::{HERE, ID, Lab, bind, brief, mount};
use crate::conformance::{On, Place, Point};

pub const POINTS: &[Point] = &[
    Point::same(
        "1.8 mounts: flags of binds",
        "/ ro,nosuid,relatime",
        flags_of_binds,
    ),
    Point::same(
        "1.8 mounts: propagation of binds",
        "/ ro,relatime -",
        propagation_of_binds,
    )
    .better("/ ro,relatime shared"),
    Point::same(
        "1.8 mounts: an overlay with more layers than a page names",
        "100 files",
        many_layers,
    ),
    Point::same(
        "1.8 mounts: targets are found inside of the root file system",
        "inner/file: there",
        targets,
    ),
    Point::same(
        "1.8 mounts: a file through a loop device",
        "Ok\n/ ro,relatime",
        loop_device,
    ),
    Point::same(
        "1.8 mounts: programs mount FUSE",
        "mount.fuse3 SOURCE TARGET -o bind -o x=y -t kind",
        fuse_helpers,
    ),
    Point::same(
        "1.8 mounts: mapped owners of a bind",
        "0 as 1000:2000, 7 as 1007:2007, 99 as 65534:65534",
        mapped_bind,
    )
    .on(On::Forky),
    Point::same("1.8 mounts: a map of users alone", "Ok", half_mapped)
        .better("uidmap and gidmap go together only")
        .on(On::Forky),
    Point::same("1.8 mounts: options for containerd itself", "Ok", reserved)
        .better("mount option X-containerd.x=y is reserved for containerd"),
    Point::same(
        "1.8 mounts: mapped owners of an overlay",
        "7 as 1007:2007",
        mapped_overlay,
    )
    .on(On::Forky),
    Point::same("1.8 mounts: what fails leaves nothing", "then Ok", failures),
    Point::same(
        "1.8 unmount: nested and stacked mounts",
        "Ok, 0 mounts",
        unmount_nested,
    ),
    Point::same(
        "1.8 unmount: a busy mount is waited for",
        "Ok, 0 mounts",
        unmount_busy,
    ),
    Point::same(
        "1.8 user namespaces: a container of mapped users",
        "0 10000 1000",
        user_namespace,
    )
    .on(On::Forky),
];

fn flags_of_binds(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    let mut seen = String::new();
    for options in [
        &["rbind", "rw"][..],
        &["rbind", "ro"],
        &["rbind", "ro", "nosuid"],
        &["bind"],
        &["rbind", "nosuid", "noatime"],
        &["rbind", "ro", "rw"],
        &["rbind", "defaults", "async"],
    ] {
        let shown = lab.shows(&[bind("source", "", options)], || Ok(String::new()))?;
        writeln!(seen, "{options:?}: {shown}")?;
    }
    lab.end()?;
    Ok(seen)
}

fn propagation_of_binds(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    let seen = lab.shows(&[bind("source", "", &["rbind", "ro", "rshared"])], || {
        Ok(String::new())
    })?;
    lab.end()?;
    Ok(seen)
}

fn many_layers(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    let base = "d".repeat(80);
    lab.sh(&format!(
        "mkdir -p {base} upper work; n=0; while [ $n -lt 100 ]; do mkdir -p {base}/$n/fs/layers; \
         touch {base}/$n/fs/layers/$n; n=$((n + 1)); done; cp -a source/. {base}/0/fs"
    ))?;
    let layers: Vec<String> = (0..100)
        .map(|layer| format!("{HERE}/{base}/{layer}/fs"))
        .collect();
    let options = [
        format!("upperdir={HERE}/upper"),
        format!("workdir={HERE}/work"),
        format!("lowerdir={}", layers.join(":")),
    ];
    ensure!(options[2].len() > 8192);
    let options = options.each_ref().map(String::as_str);
    let seen = lab.shows(&[mount("overlay", "overlay", "", &options)], || {
        Ok(format!(
            "{} files",
            std::fs::read_dir(lab.path("bundle/rootfs/layers"))?.count()
        ))
    })?;
    lab.end()?;
    Ok(seen)
}

fn targets(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    lab.sh(&format!(
        "mkdir outside more; touch more/file; mkdir -p source{HERE}/outside; cd source; \
         ln -s /inner absolute; \
         ln -s ../../../../inner climb; ln -s {HERE}/outside escape"
    ))?;
    let mut seen = String::new();
    for target in [
        "inner",
        "/inner",
        "absolute",
        "climb",
        "../../inner",
        "escape",
        "missing",
    ] {
        let mounts = [
            bind("source", "", &["rbind"]),
            bind("more", target, &["bind", "ro"]),
        ];
        let shown = lab.shows(&mounts, || {
            let there = |name: &str| {
                if lab.path(name).exists() {
                    "there"
                } else {
                    "not there"
                }
            };
            Ok(format!(
                "inner/file: {}, outside/file: {}",
                there("bundle/rootfs/inner/file"),
                there("outside/file")
            ))
        })?;
        writeln!(seen, "{target}: {shown}")?;
    }
    lab.end()?;
    Ok(seen)
}

fn loop_device(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    // Loop devices are the machine's, and shown to all nodes.
    let name = format!("image-{}", place.node().name());
    let image = lab.path(&name);
    let backed = || backed_by_loop(&name);
    std::fs::File::create(&image)?.set_len(8 << 20)?;
    let made = Command::new("mkfs.ext4")
        .args(["-q", "-O", "^has_journal", "-d"])
        .args([lab.path("source"), image.clone()])
        .status();
    ensure!(made.context("mkfs.ext4")?.success(), "mkfs.ext4 failed");
    let mut seen = String::new();
    for options in [&["loop"][..], &["loop", "ro"], &["loop", "direct-io", "ro"]] {
        let shown = lab.shows(&[mount("ext4", &format!("{HERE}/{name}"), "", options)], || {
            Ok(format!("backing {}", backed()?))
        })?;
        writeln!(seen, "{options:?}: {shown}")?;
        firn_node::wait_for("the end of the loop device", STEP, || {
            Ok((backed()? == 0).then_some(()))
        })?;
    }
    lab.end()?;
    Ok(seen)
}

/// How many loop devices show the file of this name.
fn backed_by_loop(name: &str) -> Result<usize> {
    let files = std::fs::read_dir("/sys/block")?.flatten().filter_map(|device| {
        let file = std::fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        file.trim_end().ends_with(name).then_some(())
    });
    Ok(files.count())
}

/// Notes its arguments and binds what it is to mount; fails on request.
const FUSE: &str = r#"#!/bin/sh
case "$*" in *fail*) echo "no such host"; exit 7;; esac
echo "${0##*/} $*" >>/run/mount-points/helper
mount --bind "$1" "$2"
"#;

fn fuse_helpers(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    let programs = ["mount.fuse", "mount.fuse3"].map(|name| format!("/usr/local/sbin/{name}"));
    for program in &programs {
        place.node().write(program, FUSE)?;
        place.node().run(&["chmod", "+x", program])?;
    }
    let mut seen = String::new();
    for (fs_type, options) in [
        ("fuse.kind", &["bind", "ro"][..]),
        ("fuse3.kind", &["bind", "x=y"]),
        ("fuse3.kind", &["fail"]),
    ] {
        let source = format!("{HERE}/source");
        let created = lab.create(&[mount(fs_type, &source, "", options)]);
        let text = describe(&created, |_| "Ok".to_owned());
        let has_cause = text.contains("no such host");
        writeln!(
            seen,
            "{fs_type}: {} {has_cause} {:?}",
            created.is_ok(),
            lab.mounts()?
        )?;
        if created.is_ok() {
            writeln!(seen, "deleted: {}", brief(&lab.delete()))?;
        }
        ensure!(lab.mounts()?.is_empty(), "still mounted: {:?}", lab.mounts()?);
    }
    let called = place.node().read(format!("{HERE}/helper"))?;
    seen += &called
        .replace(&format!("{HERE}/source"), "SOURCE")
        .replace(&format!("{HERE}/bundle/rootfs"), "TARGET");
    for program in &programs {
        place.node().run(&["rm", program])?;
    }
    lab.end()?;
    Ok(seen)
}

/// Owners of files named after those that they have below the mapping.
fn owners(dir: &Path) -> Result<String> {
    let owners: Result<Vec<String>> = ["0", "7", "99"]
        .iter()
        .map(|name| {
            let file = std::fs::metadata(dir.join(name))?;
            Ok(format!("{name} as {}:{}", file.uid(), file.gid()))
        })
        .collect();
    Ok(owners?.join(", "))
}

const OWNED: &str = "for id in 0 7 99; do touch source/$id; chown $id:$id source/$id; done";

const MAPS: [&str; 2] = ["uidmap=0:1000:10", "gidmap=0:2000:10"];

fn mapped_bind(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    lab.sh(OWNED)?;
    let options = [&["rbind"][..], &MAPS].concat();
    let created = lab.create(&[bind("source", "", &options)]);
    let mut seen = format!("{}\n{}\n", brief(&created), owners(&lab.path("bundle/rootfs"))?);
    writeln!(seen, "below: {}", owners(&lab.path("source"))?)?;
    writeln!(seen, "deleted: {}, {:?}", brief(&lab.delete()), lab.mounts()?)?;
    for wrong in [
        ["uidmap=0:1000", MAPS[1]],
        ["uidmap=0:-1:10", MAPS[1]],
        ["uidmap=x", MAPS[1]],
    ] {
        let options = [&["rbind"][..], &wrong].concat();
        let created = lab.create(&[bind("source", "", &options)]);
        let code = describe(&created, |_| "Ok".to_owned());
        let code = code.split(':').next().unwrap_or_default();
        writeln!(seen, "{wrong:?}: {code}, {:?}", lab.mounts()?)?;
    }
    lab.end()?;
    Ok(seen)
}

/// What a Create with one bind with these options returns, and what it leaves mounted when it fails.
fn answer_to(place: &Place<'_>, options: &[&str]) -> Result<String> {
    let lab = Lab::new(place)?;
    let created = lab.create(&[bind("source", "", options)]);
    let seen = describe(&created, |_| "Ok".to_owned());
    if created.is_ok() {
        lab.delete().map_err(|error| anyhow::anyhow!("delete: {error}"))?;
    }
    ensure!(lab.mounts()?.is_empty(), "still mounted: {:?}", lab.mounts()?);
    lab.end()?;
    Ok(seen)
}

fn half_mapped(place: &Place<'_>) -> Result<String> {
    answer_to(place, &["rbind", MAPS[0]])
}

fn reserved(place: &Place<'_>) -> Result<String> {
    answer_to(place, &["rbind", "X-containerd.x=y"])
}

fn mapped_overlay(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    lab.sh(OWNED)?;
    lab.sh("mkdir -p lower/1/fs lower/2/fs upper work; cp -a source/. lower/1/fs; touch lower/2/fs/more")?;
    let layers = [
        format!("lowerdir={HERE}/lower/2/fs:{HERE}/lower/1/fs"),
        format!("upperdir={HERE}/upper"),
        format!("workdir={HERE}/work"),
    ];
    let layers = layers.each_ref().map(String::as_str);
    let options = [&layers[..], &MAPS].concat();
    let seen = lab.shows(&[mount("overlay", "overlay", "", &options)], || {
        std::fs::write(lab.path("bundle/rootfs/7"), "copied up")?;
        let above = std::fs::metadata(lab.path("upper/7"))?;
        let table = std::fs::read_to_string(format!("/proc/{}/mountinfo", place.node().pid()))?;
        let mut points = table.lines().filter_map(|line| line.split(' ').nth(4));
        Ok(format!(
            "{}, copied up {}:{}, layers are mounted: {}",
            owners(&lab.path("bundle/rootfs"))?,
            above.uid(),
            above.gid(),
            points.any(|point| point.contains("ovl-idmapped") || point.contains("/lower/"))
        ))
    })?;
    lab.end()?;
    Ok(seen)
}

fn failures(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    let first = bind("source", "", &["rbind"]);
    let mut seen = String::new();
    for second in [
        bind("missing", "", &["rbind"]),
        bind("source", "nosuch", &["rbind"]),
        mount("nosuchfs", "none", "inner", &[]),
        mount("tmpfs", "tmpfs", "inner", &["size=rubbish"]),
        mount("ext4", &format!("{HERE}/missing"), "inner", &["loop"]),
        mount("overlay", "overlay", "inner", &["lowerdir=/nosuch"]),
    ] {
        writeln!(
            seen,
            "{}",
            lab.shows(&[first.clone(), second], || Ok(String::new()))?
        )?;
        ensure!(!lab.path("bundle/init.pid").exists(), "runc was called");
    }
    // The runtime refuses: a program that is not there.
    lab.sh("mv source/bin/sh source/bin/no")?;
    let created = lab.create(std::slice::from_ref(&first));
    writeln!(seen, "refused by runc: {}, {:?}", created.is_err(), lab.mounts()?)?;
    lab.sh("mv source/bin/no source/bin/sh")?;
    writeln!(seen, "then {}", lab.shows(&[first], || Ok(String::new()))?)?;
    lab.end()?;
    Ok(seen)
}

fn unmount_nested(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    let created = lab.create(&[bind("source", "", &["rbind"])]);
    lab.sh(
        "mount -t tmpfs t bundle/rootfs/tmp; mkdir -p bundle/rootfs/tmp/a/b; \
         mount -t tmpfs t bundle/rootfs/tmp/a; \
         mkdir 'bundle/rootfs/tmp/a/with space'; mount -t tmpfs t 'bundle/rootfs/tmp/a/with space'; \
         mount -t tmpfs t bundle/rootfs/run; mount -t tmpfs t bundle/rootfs/run; \
         mount --bind source bundle/rootfs/inner",
    )?;
    let mut seen = format!("{}, {} mounts\n", brief(&created), lab.mounts()?.len());
    writeln!(seen, "{}, {} mounts", brief(&lab.delete()), lab.mounts()?.len())?;
    // Nothing of what was bound is gone.
    seen += &lab.sh("ls source; test -x source/bin/sh")?;
    lab.end()?;
    Ok(seen)
}

fn unmount_busy(place: &Place<'_>) -> Result<String> {
    let lab = Lab::new(place)?;
    let created = lab.create(&[bind("source", "", &["rbind"])]);
    let user = format!("cd {HERE}/bundle/rootfs; echo in; exec sleep 1000");
    let mut user = place.node().spawn(&["sh", "-c", &user])?;
    let mut word = [0; 2];
    std::io::Read::read_exact(user.stdout.as_mut().context("no pipe")?, &mut word)?;
    let request = DeleteRequest {
        id: ID.to_owned(),
        ..DeleteRequest::default()
    };
    let delete = lab.task.begin::<DeleteResponse>("Delete", &request, STEP)?;
    // A span, not a condition: a shim that does not wait answers in it.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let waited = !delete.is_there();
    user.kill()?;
    user.wait()?;
    let deleted = lab.task.end(delete);
    let seen = format!(
        "{}\n{}, {} mounts, waited: {waited}",
        brief(&created),
        brief(&deleted),
        lab.mounts()?.len()
    );
    lab.end()?;
    Ok(seen)
}

fn user_namespace(place: &Place<'_>) -> Result<String> {
    let mut seen = String::new();
    for snapshotter in ["native", "overlayfs"] {
        let options = [
            "--snapshotter",
            snapshotter,
            "--uidmap",
            "0:10000:1000",
            "--gidmap",
            "0:20000:1000",
            "--remap-labels",
        ];
        let script = "cat /proc/self/uid_map /proc/self/gid_map; \
                      stat -c '%u:%g' /bin/sh /proc/self /etc/passwd; \
                      touch /new; stat -c '%u:%g' /new";
        let output = place.run("c", &options, &["sh", "-c", script])?;
        let squeezed: Vec<String> = output
            .stdout
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        writeln!(
            seen,
            "{snapshotter}: {:?}\n{}\n{}",
            output.code,
            squeezed.join("\n"),
            output.stderr
        )?;
    }
    Ok(seen)
}
