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
fn refused(host: &GpuHost, words: &[&str], code: &str) -> Result<()> {
    let before = names(host)?;
    let output = failure(host.node().run(&[&["firn", "images", "prune"], words].concat()))?;
    ensure!(output.contains(code), "{words:?}: {output}");
    ensure!(names(host)? == before, "{words:?} removed something");
    Ok(())
}

fn only_what_is_named_is_removed(host: &GpuHost) -> Result<()> {
    refused(host, &["checkpoint/none"], "FIRN-PRUNE-UNKNOWN")?;
    refused(host, &["checkpoint/one"], "FIRN-PRUNE-UNKNOWN: there are several")?;
    refused(host, &[IMAGE], "FIRN-PRUNE-UNKNOWN")?;
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
