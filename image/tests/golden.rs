//! Golden images: `golden/MAJOR.MINOR` holds images as the firn that introduced this version wrote them, the
//! other directories hold manifests of versions to come.
//!
//! The files of a released version are never changed. A new minor version adds a directory
//! (`cargo test -p firn-image --test golden -- --ignored`) and what its manifests are to be read as, below.

#![expect(clippy::unwrap_used, reason = "a failed test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use firn_gpu::{Backend, CudaState, DeviceNode, GpuUuid, Link, NodeType, PciePath, SourceGpu, Topology};
use firn_host::Problem;
use firn_image::manifest::{
    CheckpointedProcess, DriverVersion, DumpFlags, ImageFile, Manifest, RequiredMount, Versions,
    describe_images,
};
use serde_json::Value;

/// The version that this firn writes.
const CURRENT: &str = "1.0-blake3";
/// Large files have the SHA-256 of the SHA-256s of their blocks.
const OLD: &str = "1.0";
const IMAGES: [(&str, Expected); 2] = [("gpu", gpu), ("plain", plain)];

type Expected = fn() -> Manifest;

/// Not committed for its size: two blocks, the second of which is short.
const PAGES: (&str, usize) = ("pages-1.img", (5 << 20) + 3);

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(path)
}

fn uuid(n: u8) -> GpuUuid {
    GpuUuid::from_bytes([n; 16])
}

fn file(name: &str, size: u64, sha256: &str) -> ImageFile {
    ImageFile {
        name: name.to_owned(),
        size,
        sha256: Some(sha256.to_owned()),
        blake3: None,
        sha256_of_blocks: None,
    }
}

/// The files of an image whose large one has this BLAKE3, or the checksum of [`OLD`] images.
fn files(blake3: Option<&str>, sha256_of_blocks: Option<&str>) -> Vec<ImageFile> {
    vec![
        file(
            "inventory.img",
            10,
            "01adaa40bf3775a40204c1e2cec2d366ac37b17b860c024d6cfccfebaf28370e",
        ),
        ImageFile {
            name: PAGES.0.to_owned(),
            size: PAGES.1 as u64,
            sha256: None,
            blake3: blake3.map(str::to_owned),
            sha256_of_blocks: sha256_of_blocks.map(str::to_owned),
        },
        file(
            "pstree.img",
            7,
            "ea848539042a637416f2109b035986a0078189a76c6683e420c5a2cd24d70e96",
        ),
    ]
}

fn current_files() -> Vec<ImageFile> {
    files(
        Some("d7b0c8bf65e5c4d83045f23509a2af505c29af408a404c3f363f75a7a49a5040"),
        None,
    )
}

fn old(manifest: Manifest) -> Manifest {
    let sum = "673c8f204f3a3202574588ca0b3b8cce83f2df55caba48f8b2dbff265b0fb16a";
    Manifest {
        images: files(None, Some(sum)),
        ..manifest
    }
}

fn source(n: u8) -> SourceGpu {
    SourceGpu {
        uuid: uuid(n),
        name: "NVIDIA H200".to_owned(),
        pci_device_id: 0x2335_10de,
        pci_address: format!("00000000:0{n}:00.0"),
        memory_total: 150_754_820_096,
        memory_used: 0,
        minor: n.into(),
        node: (n == 1).then(|| DeviceNode {
            path: "/dev/nvidia1".into(),
            kind: NodeType::Char,
            major: 195,
            minor: 1,
        }),
        mig: false,
    }
}

fn gpu() -> Manifest {
    Manifest {
        checkpoint: String::new(),
        backend: Backend::Nvidia,
        dump: DumpFlags {
            open_tcp: true,
            external_unix_sockets: false,
            terminal: false,
            file_locks: true,
        },
        driver: Some(DriverVersion {
            driver: "580.95.05".to_owned(),
            cuda: 13000,
        }),
        gpus: vec![source(1), source(2)],
        topology: Topology {
            links: vec![Link {
                nvlinks: Some(18),
                path: Some(PciePath::Node),
                ..Link::between(uuid(1), uuid(2))
            }],
            numa: [(uuid(1), 0), (uuid(2), 1)].into(),
        },
        processes: vec![CheckpointedProcess {
            pid: 7,
            restore_tid: 12,
            state: CudaState::Running,
        }],
        inherited_gpus: Vec::new(),
        released_gpus: None,
        origin: None,
        bulk: None,
        hooks: Default::default(),
        mounts: vec![
            RequiredMount {
                destination: "/data".into(),
                source_name: "data".to_owned(),
                in_use: true,
            },
            RequiredMount {
                destination: "/usr/bin/nvidia-smi".into(),
                source_name: "nvidia-smi".to_owned(),
                in_use: false,
            },
        ],
        cpu: Default::default(),
        versions: Versions {
            firn: "0.1.0".to_owned(),
            criu: "4.2".to_owned(),
            runc: "1.3.6".to_owned(),
            kernel: "6.18.2".to_owned(),
        },
        images: current_files(),
    }
}

fn plain() -> Manifest {
    Manifest {
        backend: Backend::None,
        driver: None,
        gpus: Vec::new(),
        topology: Topology::default(),
        processes: Vec::new(),
        inherited_gpus: Vec::new(),
        released_gpus: None,
        origin: None,
        bulk: None,
        hooks: Default::default(),
        mounts: Vec::new(),
        ..gpu()
    }
}

/// A copy of a golden image with the file that is not committed.
fn image(path: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(path)).unwrap().flatten() {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    write_pages(dir.path());
    dir
}

fn write_pages(dir: &Path) {
    let pages: Vec<u8> = (0..=250).cycle().take(PAGES.1).collect();
    fs::write(dir.join(PAGES.0), pages).unwrap();
}

fn manifest_of(path: &str) -> Vec<u8> {
    fs::read(golden(path).join("firn.json")).unwrap()
}

#[test]
fn images_of_every_released_version_are_read_as_they_were_written() {
    for version in [OLD, CURRENT] {
        for (name, manifest) in IMAGES {
            let path = format!("{version}/{name}");
            let expected = match version {
                OLD => old(manifest()),
                _ => manifest(),
            };
            let dir = image(&path);
            let read = Manifest::read(dir.path()).unwrap().unwrap();
            assert_eq!(read, expected, "{path}");
            read.verify_images(dir.path()).unwrap();
        }
    }
}

#[test]
fn the_same_images_are_written_to_the_byte() {
    for (name, manifest) in IMAGES {
        let path = format!("{CURRENT}/{name}");
        let dir = image(&path);
        let files = describe_images(dir.path(), &AtomicBool::new(false)).unwrap();
        assert_eq!(files, manifest().images, "{path}");
        let written = manifest().encode(Path::new("firn.json")).unwrap();
        assert_eq!(
            String::from_utf8(written),
            String::from_utf8(manifest_of(&path)),
            "{path}"
        );
    }
}

#[test]
fn a_newer_minor_version_is_read_and_its_unknown_fields_are_skipped() {
    let bytes = manifest_of("newer-minor");
    let value: Value = serde_json::from_slice(&bytes).unwrap();
    assert!(value["minor"].as_u64() > Some(0) && value["body"]["from_a_newer_firn"].is_object());
    let read = Manifest::decode(&bytes, Path::new("firn.json")).unwrap();
    assert_eq!(read, old(gpu()));
}

#[test]
fn a_newer_major_version_and_an_unknown_need_are_refused() {
    for (name, code, text) in [
        ("newer-major", "FIRN-MANIFEST-VERSION", "version 2"),
        ("unknown-need", "FIRN-MANIFEST-NEEDS", "needs from-a-newer-firn"),
    ] {
        let error = Manifest::decode(&manifest_of(name), Path::new("firn.json")).unwrap_err();
        assert_eq!(error.code(), code, "{name}");
        assert!(error.to_string().contains(text), "{name}: {error}");
    }
}

/// Writes the directory of the current version, unless it exists.
#[test]
#[ignore = "adds files to the source tree"]
fn write_a_new_version() {
    for (name, manifest) in IMAGES {
        let dir = golden(&format!("{CURRENT}/{name}"));
        if dir.exists() {
            continue;
        }
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("inventory.img"), "inventory\n").unwrap();
        fs::write(dir.join("pstree.img"), "pstree\n").unwrap();
        write_pages(&dir);
        let images = describe_images(&dir, &AtomicBool::new(false)).unwrap();
        fs::remove_file(dir.join(PAGES.0)).unwrap();
        let manifest = Manifest { images, ..manifest() };
        fs::write(dir.join("firn.json"), manifest.encode(&dir).unwrap()).unwrap();
    }
}
