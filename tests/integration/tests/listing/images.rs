//! `firn images`, with checkpoints in containerd and below the operator's directory.

use anyhow::{Context, Result, ensure};
use firn_lab::{GpuHost, IMAGE, failure, on};
use firn_node::Platform;
use serde_json::Value;

use super::{MIB, counter, host};

const CONFIG: &str = "[restore]\nfrom-dir = \"/srv/named\"\n";

fn listed(host: &GpuHost) -> Result<Vec<Value>> {
    let found = host.firn(&["images", "ls"])?;
    Ok(found["checkpoints"].as_array().context("no list")?.clone())
}

fn names(host: &GpuHost) -> Result<Vec<String>> {
    let mut names: Vec<String> = listed(host)?
        .iter()
        .filter_map(|one| one["name"].as_str().map(str::to_owned))
        .filter(|name| !name.starts_with("/tmp/"))
        .collect();
    names.sort();
    Ok(names)
}

/// `firn images prune` with these words fails with this code, and removes nothing.
fn expect_refused(host: &GpuHost, words: &[&str], code: &str) -> Result<()> {
    let before = names(host)?;
    let output = failure(host.node().run(&[&["firn", "images", "prune"], words].concat()))?;
    ensure!(output.contains(code), "{words:?}: {output}");
    ensure!(names(host)? == before, "{words:?} removed something");
    Ok(())
}

fn only_what_is_named_is_removed(host: &GpuHost) -> Result<()> {
    expect_refused(host, &["checkpoint/none"], "FIRN-PRUNE-UNKNOWN")?;
    expect_refused(host, &["checkpoint/one"], "FIRN-PRUNE-UNKNOWN: there are several")?;
    expect_refused(host, &[IMAGE], "FIRN-PRUNE-UNKNOWN")?;
    let dry = host.firn(&["images", "prune", "checkpoint/two", "--dry-run"])?;
    ensure!(dry["removed"][0]["name"] == "checkpoint/two", "{dry}");
    ensure!(names(host)?.contains(&"checkpoint/two".to_owned()));
    let young = host.firn(&["images", "prune", "--older-than", "1h"])?;
    ensure!(young["removed"].as_array().is_some_and(Vec::is_empty), "{young}");
    host.firn(&["images", "prune", "checkpoint/two", "/srv/named/ml/warm"])?;
    ensure!(!host.node().path("/srv/named/ml/warm").exists());
    host.firn(&["images", "prune", "checkpoint/one", "-n", "other"])?;
    ensure!(names(host)? == ["checkpoint/one"], "{:?}", names(host)?);
    Ok(())
}

pub fn checkpoints_are_listed_measured_and_removed(platform: Platform) -> Result<()> {
    on([host(platform, "li-images")?], |[host]| {
        let node = host.node();
        host.configure(CONFIG)?;
        ensure!(names(host)?.is_empty());
        let job = counter(host, "job", "0")?;
        node.run(&["mkdir", "-p", "/srv/named/ml"])?;
        host.firn(&["checkpoint", "job", "/srv/named/ml/warm"])?;
        for image in ["checkpoint/one", "checkpoint/two"] {
            host.firn(&["checkpoint", "job", image])?;
        }
        // Under another name in another namespace: the same blobs.
        let copy = "ctr images export --local --skip-manifest-json /srv/one.tar checkpoint/one \
                    && ctr -n other images import --local --no-unpack --base-name x /srv/one.tar";
        node.run(&["sh", "-c", copy])?;
        let all = listed(host)?;
        let of = |name: &str, namespace: &str| {
            let mut found = all
                .iter()
                .filter(|one| one["name"] == name && one["namespace"] == namespace);
            found
                .next()
                .with_context(|| format!("{name} in {namespace} is missing"))
        };
        for (name, namespace, kind) in [
            ("checkpoint/one", "default", "image"),
            ("checkpoint/two", "default", "image"),
            ("checkpoint/one", "other", "image"),
            ("/srv/named/ml/warm", "ml", "directory"),
        ] {
            let one = of(name, namespace)?;
            ensure!(one["kind"] == kind && one["container"] == "job", "{one}");
            ensure!(one["gpus"].as_array().map(Vec::len) == Some(1), "{one}");
            ensure!(one["sizes"]["gpu"].as_u64() >= Some(MIB << 20), "{one}");
        }
        ensure!(
            !names(host)?.contains(&IMAGE.to_owned()),
            "the image of the container is no checkpoint"
        );
        let used = host.firn(&["images", "du"])?;
        let shared = |name: &str| {
            let all = used["checkpoints"].as_array();
            let one = all.and_then(|all| all.iter().find(|one| one["name"] == name));
            one.and_then(|one| one["shared"].as_u64())
        };
        // Two has only the spec and the options in common with others, one is there twice.
        ensure!(shared("checkpoint/one") > Some(MIB << 20), "{used}");
        ensure!(shared("checkpoint/two") < Some(1 << 20), "{used}");
        ensure!(used["counted_twice"].as_u64() > Some(MIB << 20), "{used}");

        only_what_is_named_is_removed(host)?;
        // The container and its image are as before.
        job.goes_on(3)?;
        host.remove_image("checkpoint/one")?;
        ensure!(host.has_image(IMAGE)?);
        job.remove()?;
        host.idle()
    })
}

/// What a user has put into /tmp, and what the volume of a container holds that calls its program containerd.
const PLANT: &str = "
set -e
mkdir -p /srv/volume
for dir in /tmp/ctrd-checkpoint9 /tmp/firn-rescue-a /srv/volume/ctrd-checkpoint9 /srv/elsewhere; do
    mkdir -p -m 700 $dir
    for file in inventory.img pages-1.img; do echo x >$dir/$file; done
done
chown -R 1000 /tmp/ctrd-checkpoint9 /tmp/firn-rescue-a
ln -s /srv/elsewhere /tmp/ctrd-checkpoint-link
chown -h 1000 /tmp/ctrd-checkpoint-link
cp /bin/sleep /srv/volume/containerd";

pub fn what_others_plant_is_no_checkpoint(platform: Platform) -> Result<()> {
    on([host(platform, "li-plant")?], |[host]| {
        let node = host.node();
        node.run(&["sh", "-c", PLANT])?;
        let mut other = node.spawn(&["env", "TMPDIR=/srv/volume", "/srv/volume/containerd", "600"])?;
        // It is root's, and left: what containerd itself leaves is seen.
        let left = "cp -r /srv/elsewhere /tmp/ctrd-checkpoint8 && \
                    touch -d '1 hour ago' /tmp/ctrd-checkpoint? /tmp/firn-*";
        node.run(&["sh", "-c", left])?;
        let all = listed(host)?;
        let names: Vec<&str> = all.iter().filter_map(|one| one["name"].as_str()).collect();
        ensure!(names == ["/tmp/ctrd-checkpoint8"], "{names:?}");
        let checks = host.firn_shows(&["doctor"])?.1.to_string();
        ensure!(checks.contains("/tmp/ctrd-checkpoint8: "), "{checks}");
        let planted = ["ctrd-checkpoint9", "firn-rescue-a", "ctrd-checkpoint-link"];
        ensure!(!planted.iter().any(|name| checks.contains(name)), "{checks}");
        let pruned = host.firn(&["images", "prune", "--older-than", "30m"])?;
        ensure!(
            pruned["removed"].as_array().is_some_and(|all| all.len() == 1)
                && pruned["kept"].as_array().is_some_and(Vec::is_empty),
            "{pruned}"
        );
        let count =
            "find /tmp/ctrd-checkpoint9 /tmp/firn-rescue-a /srv/volume /srv/elsewhere -name '*.img' | wc -l";
        let left = node.run(&["sh", "-c", count])?.stdout;
        ensure!(
            left.trim() == "8" && !node.path("/tmp/ctrd-checkpoint8").exists(),
            "{left} files are left"
        );
        other.kill()?;
        other.wait()?;
        host.idle()
    })
}
