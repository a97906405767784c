//! A checkpoint image outside of containerd, to be looked at and changed: an OCI layout whose index holds the
//! CRIU images as a tar archive. What is changed gets its new digest everywhere, so that only firn can
//! notice.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use protobuf::Message;
use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::{GpuHost, reader};

/// Media type of the CRIU images.
const CRIU: &str = "application/vnd.containerd.container.criu.checkpoint.criu.tar";

/// Media type of the spec, in an `Any`.
const SPEC: &str = "application/vnd.containerd.container.checkpoint.config.v1+proto";

/// Where containerd keeps content.
const CONTENT: &str = "/var/lib/containerd/io.containerd.content.v1.content";

/// A checkpoint image.
pub struct Archive {
    layout: TempDir,
    /// The index that containerd reads; its digest is in `index.json`.
    index: Value,
}

impl Archive {
    /// Takes an image out of a node's containerd.
    pub fn export(host: &GpuHost, image: &str) -> Result<Self> {
        let layout = tempfile::tempdir()?;
        let file = "/tmp/export.tar";
        host.export(image, file)?;
        tar(&[
            "-xf".as_ref(),
            host.node().path(file).as_ref(),
            "-C".as_ref(),
            layout.path(),
        ])?;
        fs::remove_file(host.node().path(file))?;
        let outer = read_json(&layout.path().join("index.json"))?;
        let index = read_json(&blob(layout.path(), &outer["manifests"][0])?)?;
        Ok(Self { layout, index })
    }

    /// Checks CRIU's images, and what the node's store has of them, by the documents of the format.
    pub fn check(host: &GpuHost, image: &str) -> Result<()> {
        let listed = format!("name=={image}");
        let printed = host.node().run(&["ctr", "images", "list", &listed])?.stdout;
        let digest = printed
            .split_ascii_whitespace()
            .find_map(|word| word.strip_prefix("sha256:"));
        let content = host.node().path(CONTENT);
        let index = content
            .join("blobs/sha256")
            .join(digest.context("no such image")?);
        let index = read_json(&index)?;
        let manifests = index["manifests"].as_array().context("no manifests")?;
        let Some(part) = manifests.iter().find(|part| part["mediaType"] == CRIU) else {
            return Ok(());
        };
        let dir = tempfile::tempdir()?;
        let packed = blob(&content, part)?;
        tar(&["-xf".as_ref(), &packed, "-C".as_ref(), dir.path()])?;
        reader::check(dir.path(), &host.store()?, host.store_key()?.as_deref()).map(drop)
    }

    /// Adds the annotations that `ctr containers checkpoint` writes and `ctr tasks checkpoint` leaves out:
    /// which image the container was made of, its runtime and its snapshotter. With them `ctr containers
    /// restore` takes it.
    pub fn describe(&mut self, image: &str, runtime: &str) {
        self.index["annotations"] = json!({
            "org.opencontainers.image.ref.name": image,
            "io.containerd.checkpoint.runtime": runtime,
            "io.containerd.checkpoint.snapshotter": "overlayfs",
        });
    }

    /// Changes the CRIU images; `edit` gets their directory.
    pub fn edit(&mut self, edit: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        self.edit_part(|kind| kind == CRIU, edit)
    }

    /// Changes what the container has written to its root file system; `edit` gets a directory with that.
    pub fn edit_rootfs(&mut self, edit: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        self.edit_part(
            |kind| kind.contains("image.layer") || kind.contains("image.rootfs.diff"),
            edit,
        )
    }

    /// Changes the spec with which the container is restored.
    pub fn edit_spec(&mut self, edit: impl FnOnce(&mut Value)) -> Result<()> {
        let manifests = self.index["manifests"].as_array_mut();
        let mut parts = manifests.into_iter().flatten();
        let part = parts.find(|part| part["mediaType"] == SPEC);
        let part = part.context("no spec in the index")?;
        let mut any = Any::parse_from_bytes(&fs::read(blob(self.layout.path(), part)?)?)?;
        let mut spec = serde_json::from_slice(&any.value)?;
        edit(&mut spec);
        any.value = spec.to_string().into_bytes();
        put(self.layout.path(), part, &any.write_to_bytes()?)
    }

    fn edit_part(
        &mut self,
        is_it: impl Fn(&str) -> bool,
        edit: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let manifests = self.index["manifests"]
            .as_array_mut()
            .context("an index without manifests")?;
        let part = manifests
            .iter_mut()
            .find(|manifest| manifest["mediaType"].as_str().is_some_and(&is_it));
        let part = part.context("no such part in the index")?;
        let (dir, packed) = (tempfile::tempdir()?, tempfile::NamedTempFile::new()?);
        tar(&[
            "-xf".as_ref(),
            blob(self.layout.path(), part)?.as_ref(),
            "-C".as_ref(),
            dir.path(),
        ])?;
        edit(dir.path())?;
        let is_packed = part["mediaType"]
            .as_str()
            .is_some_and(|kind| kind.ends_with("gzip"));
        tar(&[
            if is_packed { "-czf" } else { "-cf" }.as_ref(),
            packed.path(),
            "-C".as_ref(),
            dir.path(),
            ".".as_ref(),
        ])?;
        put(self.layout.path(), part, &fs::read(packed.path())?)
    }

    /// Gives it to a node's containerd under this name.
    pub fn import(&self, host: &GpuHost, image: &str) -> Result<()> {
        let path = self.layout.path().join("index.json");
        let mut outer = read_json(&path)?;
        let manifest = &mut outer["manifests"][0];
        put(self.layout.path(), manifest, self.index.to_string().as_bytes())?;
        manifest["annotations"] = json!({ "io.containerd.image.name": image });
        fs::write(&path, outer.to_string())?;
        let packed = tempfile::NamedTempFile::new()?;
        tar(&[
            "-cf".as_ref(),
            packed.path(),
            "-C".as_ref(),
            self.layout.path(),
            ".".as_ref(),
        ])?;
        let file = "/tmp/import.tar";
        host.node().install(packed.path(), file, 0o600)?;
        host.import(file)?;
        Ok(fs::remove_file(host.node().path(file))?)
    }
}

/// Where the blob of a descriptor is.
fn blob(layout: &Path, descriptor: &Value) -> Result<PathBuf> {
    let digest = descriptor["digest"]
        .as_str()
        .and_then(|digest| digest.strip_prefix("sha256:"));
    Ok(layout
        .join("blobs/sha256")
        .join(digest.context("a descriptor without digest")?))
}

/// Makes a descriptor one of this content.
fn put(layout: &Path, descriptor: &mut Value, content: &[u8]) -> Result<()> {
    let digest: String = Sha256::digest(content)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    descriptor["digest"] = json!(format!("sha256:{digest}"));
    descriptor["size"] = json!(content.len());
    Ok(fs::write(blob(layout, descriptor)?, content)?)
}

fn read_json(path: &Path) -> Result<Value> {
    let text = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))
}

fn tar(arguments: &[&Path]) -> Result<()> {
    let output = Command::new("tar").args(arguments).output().context("run tar")?;
    ensure!(
        output.status.success(),
        "tar {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
