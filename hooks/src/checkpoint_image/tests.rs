use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::*;

const FILE: EntryType = EntryType::Regular;
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A content store, and where an image is unpacked.
struct Scratch {
    dir: TempDir,
    store: Store,
}

impl Scratch {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        fs::create_dir(dir.path().join("target")).unwrap();
        let store = Store::new(dir.path());
        Self { dir, store }
    }

    fn blob(&self, digest: &str) -> PathBuf {
        let name = digest.strip_prefix("sha256:").unwrap();
        self.dir.path().join("blobs/sha256").join(name)
    }

    fn add(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        let digest = format!("sha256:{digest}");
        fs::write(self.blob(&digest), bytes).unwrap();
        json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() })
    }

    fn list(&self, list: &Value) -> String {
        let added = self.add("list", &serde_json::to_vec(list).unwrap());
        added["digest"].as_str().unwrap().to_owned()
    }

    fn archive(&self, layers: &[Value]) -> String {
        let annotations = json!({ "org.criu.checkpoint.container.name": "c" });
        self.list(&json!({ "layers": layers, "annotations": annotations }))
    }

    /// Unpacks an image into `target`, at most so many bytes.
    fn unpack(&self, digest: &str, left: u64) -> Result<()> {
        let root = self.target("");
        fs::remove_dir_all(&root).unwrap();
        fs::create_dir(&root).unwrap();
        let cap = Cap::new(left);
        let target = Target { root, cap };
        match parts(&self.store, digest)? {
            Parts::Archive(archive) => target.archive(self.store.open(&archive)?),
            Parts::Apart(image, layer) => {
                let layer = layer.map(|layer| self.store.open(&layer)).transpose()?;
                target.apart(self.store.open(&image)?, layer)
            }
        }
    }

    fn refused(&self, digest: &str) -> String {
        format!("{:#}", self.unpack(digest, 1 << 20).unwrap_err())
    }

    fn target(&self, path: &str) -> PathBuf {
        self.dir.path().join("target").join(path)
    }
}

/// As hostile as it can be: no check of the path.
fn tar(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (path, kind, text) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o6777);
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        let is_link = [EntryType::Symlink, EntryType::Link].contains(kind);
        if is_link {
            header.as_gnu_mut().unwrap().linkname[..text.len()].copy_from_slice(text.as_bytes());
        }
        let text = if is_link { "" } else { text };
        header.set_size(text.len() as u64);
        header.set_cksum();
        builder.append(&header, text.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut compressed = GzEncoder::new(Vec::new(), Compression::fast());
    compressed.write_all(bytes).unwrap();
    compressed.finish().unwrap()
}

#[test]
fn an_image_of_ctr_becomes_an_image_directory_and_a_layer() {
    let scratch = Scratch::new();
    let image = scratch.add(
        CRIU,
        &tar(&[("inventory.img", FILE, "processes"), ("firn.json", FILE, "{}")]),
    );
    let layer = gzip(&tar(&[("etc/written", FILE, "text")]));
    let (rw, config) = (scratch.add(GZIP, &layer), scratch.add("config", b"spec"));
    let digest = scratch.list(&json!({ "manifests": [config, image, rw] }));
    scratch.unpack(&digest, 1 << 20).unwrap();
    let read = |path| fs::read(scratch.target(path)).unwrap();
    assert_eq!(read("checkpoint/inventory.img"), b"processes");
    assert_eq!(read("rootfs-diff.tar"), layer);
    let mode = |path| fs::metadata(scratch.target(path)).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode("checkpoint"), mode("checkpoint/firn.json")), (0o700, 0o600));
    let twice = scratch.list(&json!({ "manifests": [image, image] }));
    assert!(scratch.refused(&twice).contains("several checkpoints"));
}

#[test]
fn an_archive_of_the_kubelet_is_unpacked_without_its_reports() {
    let scratch = Scratch::new();
    let archive = tar(&[
        ("checkpoint/", EntryType::Directory, ""),
        ("./checkpoint/inventory.img", FILE, "processes"),
        ("rootfs-diff.tar", FILE, "files"),
        ("config.dump", FILE, "{}"),
        ("spec.dump", EntryType::Symlink, "/etc/shadow"),
    ]);
    for bytes in [archive.clone(), gzip(&archive)] {
        let digest = scratch.archive(&[scratch.add(GZIP, &bytes)]);
        let only = json!({ "mediaType": "manifest", "digest": digest, "size": 1 });
        let index = scratch.list(&json!({ "manifests": [only] }));
        for digest in [digest, index] {
            scratch.unpack(&digest, 1 << 20).unwrap();
            let mut names: Vec<_> = fs::read_dir(scratch.target("")).unwrap().collect();
            names.sort_by_key(|entry| entry.as_ref().unwrap().file_name());
            let names: Vec<_> = names
                .into_iter()
                .map(|entry| entry.unwrap().file_name())
                .collect();
            assert_eq!(names, ["checkpoint", "rootfs-diff.tar"]);
            let processes = fs::read(scratch.target("checkpoint/inventory.img")).unwrap();
            assert_eq!(processes, b"processes");
        }
    }
}

#[test]
fn archives_that_are_wrong_are_refused_and_write_nothing_outside() {
    let scratch = Scratch::new();
    fs::write(scratch.dir.path().join("outside"), "kept").unwrap();
    let link = ("checkpoint/a", EntryType::Symlink, "../../outside");
    for (entries, expected) in [
        (vec![("checkpoint/../../outside", FILE, "taken")], "leads out"),
        (vec![("/../outside", FILE, "taken")], "leads out"),
        (vec![link], "no regular file"),
        (
            vec![("checkpoint/a", EntryType::Link, "../outside")],
            "no regular file",
        ),
        (vec![("checkpoint/a", EntryType::Char, "")], "no regular file"),
        (vec![("inventory.img", FILE, "another image")], "two images"),
        (vec![("checkpoint/a", EntryType::Fifo, "")], "no regular file"),
        (
            vec![("rootfs-diff.tar", EntryType::Directory, "")],
            "no regular file",
        ),
        (
            vec![("checkpoint/a", FILE, "one"), ("checkpoint/a", FILE, "two")],
            "cannot make",
        ),
    ] {
        let digest = scratch.archive(&[scratch.add(GZIP, &tar(&entries))]);
        let refused = scratch.refused(&digest);
        assert!(refused.contains(expected), "{entries:?}: {refused}");
        let outside = fs::read(scratch.dir.path().join("outside")).unwrap();
        assert_eq!(outside, b"kept", "{entries:?}");
    }
    let cut = &tar(&[("checkpoint/a", FILE, "text")])[..514];
    let digest = scratch.archive(&[scratch.add(GZIP, cut)]);
    assert!(scratch.refused(&digest).contains("bytes instead of"));
    let zstd = scratch.archive(&[scratch.add(GZIP, b"\x28\xb5\x2f\xfd")]);
    assert!(scratch.refused(&zstd).contains("zstd"));
}

#[test]
fn blobs_that_are_not_what_they_are_called_are_refused() {
    let scratch = Scratch::new();
    let layer = scratch.add(GZIP, &tar(&[("checkpoint/inventory.img", FILE, "one")]));
    let path = scratch.blob(layer["digest"].as_str().unwrap());
    let digest = scratch.archive(std::slice::from_ref(&layer));
    scratch.unpack(&digest, 1 << 20).unwrap();
    // Behind the archive's end nothing is unpacked, and still it counts.
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert!(scratch.refused(&digest).contains("is damaged"));
    fs::write(&path, &bytes[1..]).unwrap();
    assert!(scratch.refused(&digest).contains("bytes instead of"));
    fs::remove_file(&path).unwrap();
    assert!(scratch.refused(&digest).contains("does not have"));
    symlink("/etc/passwd", &path).unwrap();
    assert!(scratch.refused(&digest).contains("cannot read"), "a link");
    let mut elsewhere = layer;
    elsewhere["digest"] = json!("sha256:../../../etc/passwd");
    let digest = scratch.archive(&[elsewhere]);
    assert!(scratch.refused(&digest).contains("no digest of SHA-256"));
    let list = scratch.list(&json!({ "layers": [] }));
    fs::write(scratch.blob(&list), "{}").unwrap();
    assert!(scratch.refused(&list).contains("is damaged"));
}

#[test]
fn images_that_are_no_checkpoint_are_refused() {
    let scratch = Scratch::new();
    let layer = scratch.add(GZIP, &tar(&[]));
    let of_a_program = scratch.list(&json!({ "layers": [layer] }));
    assert!(scratch.refused(&of_a_program).contains("not a checkpoint"));
    let several = scratch.archive(&[layer.clone(), layer]);
    assert!(scratch.refused(&several).contains("several checkpoints"));
    assert!(scratch.refused(&scratch.archive(&[])).contains("no layer"));
    let text = scratch.add("list", b"nonsense");
    assert!(
        scratch
            .refused(text["digest"].as_str().unwrap())
            .contains("no manifest")
    );
}

#[test]
fn an_image_takes_no_more_room_than_it_may() {
    let scratch = Scratch::new();
    let zeros = "\0".repeat(100_000);
    let bytes = tar(&[("checkpoint/pages-1.img", FILE, &zeros)]);
    let digest = scratch.archive(&[scratch.add(GZIP, &gzip(&bytes))]);
    scratch.unpack(&digest, bytes.len() as u64 + ENTRY).unwrap();
    let refused = |left| format!("{:#}", scratch.unpack(&digest, left).unwrap_err());
    assert!(refused(100_000 + ENTRY - 1).contains("more bytes than"));
    // What is skipped takes time.
    let skipped = gzip(&tar(&[("report", FILE, &zeros)]));
    let skipped = scratch.archive(&[scratch.add(GZIP, &skipped)]);
    scratch.unpack(&skipped, 200_000).unwrap();
    let error = scratch.unpack(&skipped, 100_000).unwrap_err();
    assert!(format!("{error:#}").contains("more bytes than"));
    // Empty files take room too, and so does the layer of ctr's.
    let many: Vec<String> = (0..20).map(|at| format!("checkpoint/{at}")).collect();
    let many: Vec<_> = many.iter().map(|name| (&**name, FILE, "")).collect();
    let digest = scratch.archive(&[scratch.add(GZIP, &tar(&many))]);
    let error = scratch.unpack(&digest, 10 * ENTRY).unwrap_err();
    assert!(format!("{error:#}").contains("more bytes than"));
    let (image, layer) = (scratch.add(CRIU, &tar(&[])), scratch.add(GZIP, &[7; 5000]));
    let digest = scratch.list(&json!({ "manifests": [image, layer] }));
    let error = scratch.unpack(&digest, 4999).unwrap_err();
    assert!(format!("{error:#}").contains("more bytes than"));
}
