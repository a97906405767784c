//! Containers that are restored because an annotation of their pod names an image in containerd's store.

use std::fs;

use anyhow::{Context, Result, ensure};
use firn_lab::Outcome;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::cri::Point;
use crate::cri::checkpoints::{ARCHIVE, checkpoint, computes};
use crate::cri::client::{Cri, annotated};
use crate::cri::named::{cold, counter, is_cold, on_gpu, refused, refused_in};

pub const POINTS: &[Point] = &[
    Point::new(
        "restore by image: what ctr has made of a container",
        "continues on another GPU with the files; unpacked: nothing",
        of_ctr,
    )
    .firn_only(),
    Point::new(
        "restore by image: what firn has made of a container, by the id that crictl shows",
        "by firn restore: FIRN-RESTORE-CLIENT, by the kubelet: continues on another GPU with the files",
        of_firn,
    )
    .claims("`firn checkpoint`, restored by annotation", Outcome::Works)
    .firn_only(),
    Point::new(
        "restore by image: an archive of the kubelet as an image",
        "continues on another GPU with the files; unpacked: nothing",
        of_archive,
    )
    .firn_only()
    .on(|suite| suite.has_cri_checkpoint()),
    Point::new(
        "restore by image: what is not allowed, not there, too large, damaged or no checkpoint",
        "FIRN-RESTORE-FROM, FIRN-RESTORE-FROM, FIRN-IMAGE-UNPACK, FIRN-IMAGE-UNPACK, FIRN-IMAGE-UNPACK; \
         cold with fallback: true; unpacked: nothing",
        wrong,
    )
    .firn_only(),
    Point::new(
        "restore by image: memory in the node's store, of the pod's namespace and of another",
        "FIRN-STORE-OWNER; permitted: continues on another GPU with the files; unpacked: nothing; other: \
         FIRN-STORE-OWNER",
        in_store,
    )
    .firn_only(),
];

const NAME: &str = "registry.example/warm:1";
const ALLOWED: &str = "[restore]\nfrom-images = [\"default=registry.example/*\"]\n";
const BLOBS: &str = "/var/lib/containerd/io.containerd.content.v1.content/blobs/sha256";

/// What the counter's GPU 0 becomes.
const OTHER: u32 = 1;

/// Runs the story with images that pods of the namespace `default` may name.
fn allowed<T>(cri: Cri<'_>, story: impl FnOnce() -> Result<T>) -> Result<T> {
    cri.host.configure(ALLOWED)?;
    let done = story();
    cri.host.configure("")?;
    done
}

fn ctr(cri: Cri<'_>, arguments: &[&str]) -> Result<String> {
    let all = [&["ctr", "--namespace", "k8s.io"], arguments].concat();
    Ok(cri.host.node().run(&all)?.stdout)
}

fn by_ctr(cri: Cri<'_>, id: &str) -> Result<()> {
    ctr(cri, &["containers", "checkpoint", "--rw", "--task", id, NAME]).map(drop)
}

/// Makes an image of a counter with this command, and its id. Returns how far it was at least.
fn keep(cri: Cri<'_>, command: impl FnOnce(&str) -> Result<()>) -> Result<u64> {
    let pod = cri.pod_annotated("source", &json!({}))?;
    let container = pod.start_with("c", &on_gpu(0, &counter()))?;
    let before = computes(&container, 3)?;
    command(&container.id)?;
    computes(&container, before + 2)?;
    pod.remove(&[&container])?;
    Ok(before)
}

fn annotations() -> Value {
    json!({ "firn.dev/restore-from": format!("c=image:{NAME}") })
}

/// Checkpoints that are unpacked for containers.
fn unpacked(cri: Cri<'_>) -> Result<String> {
    let find = "find /var/lib/containerd -name firn-checkpoint";
    let found = cri.host.node().run(&["sh", "-ec", find])?.stdout;
    Ok(match found.trim() {
        "" => "nothing".to_owned(),
        found => found.to_owned(),
    })
}

/// Restores the image on another GPU.
fn goes_on(cri: Cri<'_>, before: u64) -> Result<String> {
    let pod = cri.pod_annotated("copy", &annotations())?;
    let copy = pod.create("c", &on_gpu(OTHER, &cold()))?;
    copy.start()?;
    computes(&copy, before + 2)?;
    let text = copy.exec("cat /written")?;
    ensure!(text.contains("text"), "the written file has {text:?}");
    let left = unpacked(cri)?;
    let log = cri.host.node().read("/var/log/containerd.log")?;
    let line = format!("is restored from image {NAME} (sha256:");
    ensure!(log.contains(&line), "the log names no image");
    pod.remove(&[&copy])?;
    Ok(format!(
        "continues on another GPU with the files; unpacked: {left}"
    ))
}

fn of_ctr(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let before = keep(cri, |id| by_ctr(cri, id))?;
        let seen = goes_on(cri, before);
        ctr(cri, &["images", "remove", NAME])?;
        seen
    })
}

fn of_firn(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let namespace = ["--namespace", "k8s.io"];
        let by_firn = |id: &str| {
            let words = ["firn", "checkpoint", &id[..13], NAME];
            cri.host.node().run(&[&words[..], &namespace].concat()).map(drop)
        };
        let before = keep(cri, by_firn)?;
        let restore = [&["firn", "restore", NAME][..], &namespace].concat();
        let refused = cri.host.output_of(&restore, "")?.failed()?;
        ensure!(refused.contains("firn.dev/restore-from"), "{refused}");
        let code = refused.split([' ', ':']).find(|word| word.starts_with("FIRN-"));
        let code = code.context(refused.clone())?;
        let seen = goes_on(cri, before);
        ctr(cri, &["images", "remove", NAME])?;
        Ok(format!("by firn restore: {code}, by the kubelet: {}", seen?))
    })
}

fn of_archive(cri: Cri<'_>) -> Result<String> {
    allowed(cri, || {
        let pod = cri.pod_annotated("source", &json!({}))?;
        let container = pod.start_with("c", &on_gpu(0, &counter()))?;
        let before = computes(&container, 3)?;
        checkpoint(&container)?;
        pod.remove(&[&container])?;
        let archive = fs::read(cri.host.node().path(ARCHIVE))?;
        import(
            cri,
            &archive,
            &json!({ "org.criu.checkpoint.container.name": "c" }),
        )?;
        cri.host.node().run(&["rm", ARCHIVE])?;
        let seen = goes_on(cri, before);
        ctr(cri, &["images", "remove", NAME])?;
        seen
    })
}

/// The memory is that of the namespace `default`. Whoever makes an image for another one may name it.
fn in_store(cri: Cri<'_>) -> Result<String> {
    let node = cri.host.node();
    let permitted = |more: &str| {
        let images = "[images]\nstore = \"/srv/of-images\"\nbulk = \"store\"\n";
        let from = "from-images = [\"default=registry.example/*\", \"other=registry.example/*\"]\n";
        cri.host.configure(&format!("{images}[restore]\n{from}{more}"))
    };
    permitted("")?;
    let pod = cri.pod_annotated("source", &json!({}))?;
    let mut command = counter();
    let script = command[2]
        .as_str()
        .context("no script")?
        .replace("--mib 8", "--mib 40");
    command[2] = script.into();
    let container = pod.start_with("c", &on_gpu(0, &command))?;
    let before = computes(&container, 3)?;
    by_ctr(cri, &container.id)?;
    pod.remove(&[&container])?;
    let unsigned = refused(cri, &annotations(), &on_gpu(OTHER, &cold()))?;
    permitted("images-from-store = true\n")?;
    let own = goes_on(cri, before)?;
    let mut config = annotated("other", &annotations());
    config["metadata"]["namespace"] = "other".into();
    let other = refused_in(&cri.pod_of(config)?, &on_gpu(OTHER, &cold()))?;
    let log = node.read("/var/log/containerd.log")?;
    let shown = log
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("store_index="));
    let short = shown.map(str::len).max().context("no index in the log")?;
    ensure!(short == 12, "the log has {short} characters of an index");
    cri.host.configure("")?;
    ctr(cri, &["images", "remove", NAME])?;
    node.run(&["rm", "-r", "/srv/of-images"])?;
    Ok(format!("{unsigned}; permitted: {own}; other: {other}"))
}

/// Gives containerd an image of one layer, as buildah makes it.
fn import(cri: Cri<'_>, layer: &[u8], annotations: &Value) -> Result<()> {
    let node = cri.host.node();
    let layout = "/tmp/layout";
    node.run(&["mkdir", "-p", &format!("{layout}/blobs/sha256")])?;
    let blob = |media_type: &str, bytes: &[u8]| {
        let digest: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        fs::write(node.path(format!("{layout}/blobs/sha256/{digest}")), bytes)?;
        let digest = format!("sha256:{digest}");
        anyhow::Ok(json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() }))
    };
    let config = json!({ "architecture": "amd64", "os": "linux",
        "rootfs": { "type": "layers", "diff_ids": [] } });
    let config = blob(
        "application/vnd.oci.image.config.v1+json",
        config.to_string().as_bytes(),
    )?;
    let layer = blob("application/vnd.oci.image.layer.v1.tar", layer)?;
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({ "schemaVersion": 2, "mediaType": media_type, "config": config,
        "layers": [layer], "annotations": annotations });
    let mut manifest = blob(media_type, manifest.to_string().as_bytes())?;
    manifest["annotations"] = json!({ "io.containerd.image.name": NAME });
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] }).to_string();
    fs::write(node.path(format!("{layout}/index.json")), index)?;
    fs::write(
        node.path(format!("{layout}/oci-layout")),
        r#"{"imageLayoutVersion":"1.0.0"}"#,
    )?;
    node.run(&["sh", "-ec", "tar -C /tmp/layout -cf /tmp/image.tar ."])?;
    ctr(
        cri,
        &["images", "import", "--local", "--no-unpack", "/tmp/image.tar"],
    )?;
    node.run(&["rm", "-rf", layout, "/tmp/image.tar"])?;
    Ok(())
}

/// The digest of the blob with CRIU's files in the image of ctr's.
fn files_of_criu(cri: Cri<'_>) -> Result<String> {
    let list = ctr(cri, &["images", "list", &format!("name=={NAME}")])?;
    let digest = list.split_whitespace().find(|word| word.starts_with("sha256:"));
    let name = digest.context("no image")?.trim_start_matches("sha256:");
    let index: Value = serde_json::from_slice(&fs::read(cri.host.node().path(format!("{BLOBS}/{name}")))?)?;
    let parts = index["manifests"].as_array().context("no parts")?;
    let is_criu = |part: &&Value| {
        part["mediaType"]
            .as_str()
            .is_some_and(|it| it.contains("criu.tar"))
    };
    let part = parts.iter().find(is_criu).context("no files of CRIU")?;
    let digest = part["digest"].as_str().context("no digest")?;
    Ok(digest.trim_start_matches("sha256:").to_owned())
}

fn wrong(cri: Cri<'_>) -> Result<String> {
    let mut codes = Vec::new();
    let mut refused = || {
        codes.push(refused(cri, &annotations(), &on_gpu(OTHER, &cold()))?);
        anyhow::Ok(())
    };
    keep(cri, |id| by_ctr(cri, id))?;
    cri.host
        .configure("[restore]\nfrom-images = [\"other=registry.example/*\"]\n")?;
    refused()?;
    let seen = allowed(cri, || {
        ctr(cri, &["images", "tag", NAME, "registry.example/kept:1"])?;
        ctr(cri, &["images", "remove", NAME])?;
        refused()?;
        ctr(cri, &["images", "tag", "registry.example/kept:1", NAME])?;
        cri.host.configure(&format!("{ALLOWED}image-cap = \"1MiB\"\n"))?;
        refused()?;
        cri.host.configure(ALLOWED)?;
        let damage = format!(
            "printf x | dd of={BLOBS}/{} bs=1 seek=3000 conv=notrunc",
            files_of_criu(cri)?
        );
        cri.host.node().run(&["sh", "-ec", &damage])?;
        refused()?;
        let fallback = json!({ "firn.dev/restore-from": format!("image:{NAME}"),
            "firn.dev/restore-fallback": "cold" });
        let cold = is_cold(cri, &fallback, &on_gpu(OTHER, &cold()))?;
        ctr(
            cri,
            &["images", "remove", "--sync", NAME, "registry.example/kept:1"],
        )?;
        import(cri, &[0; 1024], &json!({}))?;
        refused()?;
        ctr(cri, &["images", "remove", NAME])?;
        Ok(format!(
            "cold with fallback: {cold}; unpacked: {}",
            unpacked(cri)?
        ))
    })?;
    Ok(format!("{}; {seen}", codes.join(", ")))
}
