//! A small container image made of files of the host, written as an OCI layout.
//!
//! It has busybox, the dynamic loader and C library of the host (a workload opens the GPU driver at run time,
//! so it is linked dynamically and needs the libraries it was built against), and whatever programs are
//! added.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::host;
use crate::node::Node;

/// Libraries that programs and the GPU driver's libraries need.
const LIBRARIES: &[&str] = &[
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libgcc_s.so.1",
];
/// Where programs expect the dynamic loader.
#[cfg(target_arch = "x86_64")]
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
#[cfg(target_arch = "aarch64")]
const LOADER: &str = "/lib/ld-linux-aarch64.so.1";
/// How `ldconfig` marks libraries of this architecture, and what images call it.
#[cfg(target_arch = "x86_64")]
const ARCH: (&str, &str) = ("x86-64", "amd64");
#[cfg(target_arch = "aarch64")]
const ARCH: (&str, &str) = ("AArch64", "arm64");

const DIRECTORIES: &[&str] = &[
    "bin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "usr/bin", "usr/lib",
];
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// What goes into an image.
#[derive(Clone, Debug)]
pub struct Image {
    name: String,
    entrypoint: Vec<String>,
    command: Vec<String>,
    labels: Vec<(String, String)>,
    files: Vec<(PathBuf, PathBuf)>,
}

impl Image {
    /// An image with busybox and the host's C library, to be called `name`: `localhost/firn-test:latest`.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            entrypoint: Vec::new(),
            command: vec!["sh".into()],
            labels: Vec::new(),
            files: Vec::new(),
        }
    }

    /// Adds an executable file of the host.
    pub fn program(mut self, host_file: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        self.files.push((host_file.into(), inside.into()));
        self
    }

    /// What runs when nothing else is asked for; a shell by default.
    pub fn command(mut self, command: &[&str]) -> Self {
        self.command = command.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// What runs before all commands and arguments; nothing by default.
    pub fn entrypoint(mut self, program: &str) -> Self {
        self.entrypoint = vec![program.to_owned()];
        self
    }

    /// Adds a label, which clients give to the image's containers.
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.labels.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Its name, to run it by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Makes the image and imports it into the node's containerd.
    pub fn import(&self, node: &Node) -> Result<()> {
        self.import_into(node, "default")
    }

    /// As [`Image::import`], into another namespace of containerd.
    pub fn import_into(&self, node: &Node, namespace: &str) -> Result<()> {
        let importing = || format!("import image {} into node {}", self.name, node.name());
        let work = tempfile::tempdir().with_context(importing)?;
        let tar = self
            .build(&node.path("/usr/bin/busybox"), work.path())
            .with_context(importing)?;
        let inside = "/tmp/firn-image.tar";
        node.install(tar, inside, 0o600)?;
        let import = ["ctr", "--namespace", namespace, "image", "import", inside];
        node.run(&import)?;
        fs::remove_file(node.path(inside)).with_context(importing)
    }

    /// Writes the image as a tar archive of an OCI layout below `work`.
    fn build(&self, busybox: &Path, work: &Path) -> Result<PathBuf> {
        let rootfs = work.join("rootfs");
        self.fill(busybox, &rootfs)?;
        self.archive(&rootfs, work)
    }

    /// Writes an image that has nothing but this directory as a tar archive of an OCI layout below `work`. It
    /// is the same for the same files.
    pub fn archive(&self, rootfs: &Path, work: &Path) -> Result<PathBuf> {
        let layout = work.join("layout");
        let layer = work.join("layer.tar");
        tar(rootfs, &layer)?;
        write_layout(&layout, self, &fs::read(&layer)?)?;
        let image = work.join("image.tar");
        tar(&layout, &image)?;
        Ok(image)
    }

    fn fill(&self, busybox: &Path, rootfs: &Path) -> Result<()> {
        for dir in DIRECTORIES {
            fs::create_dir_all(rootfs.join(dir))?;
        }
        fs::set_permissions(rootfs.join("tmp"), fs::Permissions::from_mode(0o1777))?;
        fs::write(rootfs.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
        fs::write(rootfs.join("etc/group"), "root:x:0:\n")?;
        add(rootfs, busybox, Path::new("/bin/busybox"))?;
        for applet in host::output(Command::new(busybox).arg("--list"))?
            .lines()
            .filter(|a| *a != "busybox")
        {
            symlink("busybox", rootfs.join("bin").join(applet))?;
        }
        add(rootfs, Path::new(LOADER), Path::new(LOADER))?;
        let cache = host::output(Command::new("/sbin/ldconfig").arg("-p"))?;
        for name in LIBRARIES {
            let library = find_library(&cache, name)?;
            add(rootfs, library, library)?;
        }
        for (from, inside) in &self.files {
            add(rootfs, from, inside)?;
        }
        Ok(())
    }
}

/// Copies a file of the host, through links, as an executable.
fn add(rootfs: &Path, from: &Path, inside: &Path) -> Result<()> {
    let to = rootfs.join(inside.strip_prefix("/").unwrap_or(inside));
    let copy = || {
        fs::create_dir_all(to.parent().unwrap_or(rootfs))?;
        fs::copy(from, &to)?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755))
    };
    copy().with_context(|| format!("copy {} to {}", from.display(), to.display()))
}

/// Path of a library in what `ldconfig -p` printed.
fn find_library<'a>(cache: &'a str, name: &str) -> Result<&'a Path> {
    let found = cache.lines().find_map(|line| {
        let (what, path) = line.split_once(" => ")?;
        let (library, flags) = what.trim().split_once(' ')?;
        (library == name && flags.contains(ARCH.0)).then(|| Path::new(path))
    });
    match found {
        Some(path) => Ok(path),
        None => bail!("`ldconfig -p` lists no {name} on the host"),
    }
}

fn tar(dir: &Path, archive: &Path) -> Result<()> {
    let mut command = Command::new("tar");
    command.args([
        "--sort=name",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--mtime=@0",
        "--directory",
    ]);
    host::run(
        command
            .arg(dir)
            .arg("--create")
            .arg("--file")
            .arg(archive)
            .arg("."),
    )
}

fn write_layout(layout: &Path, image: &Image, layer: &[u8]) -> Result<()> {
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let put = |media_type: &str, content: &[u8]| -> Result<serde_json::Value> {
        let digest: String = Sha256::digest(content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        fs::write(blobs.join(&digest), content)?;
        Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len() }))
    };
    let layer = put("application/vnd.oci.image.layer.v1.tar", layer)?;
    let labels: BTreeMap<&String, &String> = image.labels.iter().map(|(name, value)| (name, value)).collect();
    let config = json!({
        "architecture": ARCH.1,
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/bin:/bin"],
            "Entrypoint": image.entrypoint,
            "Cmd": image.command,
            "Labels": labels,
        },
        // The layer is not compressed, so its digest is that of its content too.
        "rootfs": { "type": "layers", "diff_ids": [layer["digest"]] },
    });
    let config = put(
        "application/vnd.oci.image.config.v1+json",
        config.to_string().as_bytes(),
    )?;
    let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer] });
    let mut manifest = put(MANIFEST, manifest.to_string().as_bytes())?;
    manifest["annotations"] = json!({ "io.containerd.image.name": image.name });
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(layout.join("index.json"), index.to_string())?;
    fs::write(
        layout.join("oci-layout"),
        json!({ "imageLayoutVersion": "1.0.0" }).to_string(),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_taken_of_this_architecture() {
        let cache = format!(
            "3 libs found in cache `/etc/ld.so.cache'\n\
             \tlibc.so.6 (libc6, hwcap: 0x2) => /lib32/libc.so.6\n\
             \tlibc.so.6 (libc6,{}, OS ABI: Linux 3.2.0) => /lib/right/libc.so.6\n\
             \tlibc.so (libc6,{}) => /lib/libc.so\n",
            ARCH.0, ARCH.0
        );
        assert_eq!(
            find_library(&cache, "libc.so.6").unwrap(),
            Path::new("/lib/right/libc.so.6")
        );
        assert!(find_library(&cache, "libm.so.6").is_err());
    }

    #[test]
    fn layout_names_blobs_by_their_digest_all_the_way_down() {
        let dir = tempfile::tempdir().unwrap();
        write_layout(dir.path(), &Image::new("localhost/x:latest"), b"layer").unwrap();
        let blob = |descriptor: &serde_json::Value| {
            let digest = descriptor["digest"]
                .as_str()
                .unwrap()
                .strip_prefix("sha256:")
                .unwrap()
                .to_string();
            let content = fs::read(dir.path().join("blobs/sha256").join(&digest)).unwrap();
            let actual: String = Sha256::digest(&content)
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            assert_eq!(
                (actual, descriptor["size"].as_u64().unwrap()),
                (digest, content.len() as u64)
            );
            content
        };
        let index: serde_json::Value =
            serde_json::from_slice(&fs::read(dir.path().join("index.json")).unwrap()).unwrap();
        assert_eq!(
            index["manifests"][0]["annotations"]["io.containerd.image.name"],
            "localhost/x:latest"
        );
        let manifest: serde_json::Value = serde_json::from_slice(&blob(&index["manifests"][0])).unwrap();
        assert_eq!(blob(&manifest["layers"][0]), b"layer");
        let config: serde_json::Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
    }
}
