use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_host::Problem;
use tempfile::TempDir;

use super::*;
use crate::checksums;
use crate::criu::memory::testing::{write_mm, write_pagemap};
use crate::fixtures;
use crate::manifest::StoredMemory;
use firn_store::Packing;

const PID: i32 = 7;
const BEGIN: u64 = 0x7000_0000_0000;
/// Bytes of an extent, and of what is stored: two extents and a short one.
const WHOLE: u64 = EXTENT as u64;
const STORED: u64 = 2 * WHOLE + 3 * PAGE;

/// An image of a process with a page before what the store has, and two behind it. The second extent is zero.
struct Image {
    dir: TempDir,
    store: Store,
}

fn index(image: &Path, piece: Piece) -> Index {
    Index {
        checkpoint: String::new(),
        made: 0,
        container: String::new(),
        host: String::new(),
        machine: None,
        image: image.to_owned(),
        owner: None,
        mount: None,
        pieces: vec![piece],
    }
}

impl Image {
    fn new() -> Self {
        Self::with(|_| {})
    }

    /// `change` changes the range in the index.
    fn with(change: impl Fn(&mut Piece)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(&dir.path().join("store"), &Packing::default()).unwrap();
        let image = dir.path().join("image");
        fs::create_dir(&image).unwrap();
        for (name, content) in [
            ("inventory.img", &b"inventory"[..]),
            ("pstree.img", b"tree"),
            ("pages-1.img", &pages(&[1, 2, 3])),
            ("pages-2.img", b"of another one"),
        ] {
            fs::write(image.join(name), content).unwrap();
        }
        let end = BEGIN + PAGE + STORED;
        write_mm(
            &image,
            PID,
            &[
                (BEGIN..BEGIN + WHOLE, true),
                (BEGIN + WHOLE..end, true),
                (end..end + 2 * PAGE, false),
            ],
        );
        let (before, behind) = (BEGIN..BEGIN + PAGE, end..end + 2 * PAGE);
        // Made by a dump: both runs in one file.
        write_pagemap(&image, PID, 1, &before);
        let mut map = Pagemap::read(&image, PID).unwrap().unwrap();
        map.runs.push(Run::present(behind));
        map.write(&image, &Pagemap::name(PID)).unwrap();

        let writer = store.writer(None).unwrap();
        let put = |content: &[u8]| writer.put(content).unwrap();
        let mut piece = Piece {
            pid: PID,
            address: BEGIN + PAGE,
            length: STORED,
            extents: vec![put(&[4; EXTENT]), None, put(&pages(&[5, 0, 6]))],
        };
        change(&mut piece);
        let index = writer.finish(&index(&image, piece)).unwrap();
        let manifest = Manifest {
            bulk: Some(StoredMemory {
                store: store.id().to_owned(),
                index,
                written: 0,
                reused: 0,
                bytes: STORED,
            }),
            images: checksums::describe(&image, &AtomicBool::new(false)).unwrap(),
            ..fixtures::manifest(&[0])
        };
        manifest.write(&image).unwrap();
        Self { dir, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn export(&self) -> Result<u64, ImageCopyError> {
        let store = Some(self.store.root().to_owned());
        export(&self.path("image"), store, None, &self.path("out"), |_| |_| {})
    }

    /// It fails with this code, and nothing is left.
    fn fails(&self, code: &str) {
        let error = self.export().unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        let left = fs::read_dir(self.path("out")).map(Iterator::count);
        assert_eq!(left.unwrap_or(0), 0);
    }
}

/// Pages with these bytes.
fn pages(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [*byte; 4096]).collect()
}

/// The memory that a pagemap describes, by page: its first byte.
fn memory(dir: &Path) -> BTreeMap<u64, u8> {
    let map = Pagemap::read(dir, PID).unwrap().unwrap();
    let content = fs::read(dir.join(map.pages_name())).unwrap();
    let addresses = map.runs.into_iter().flat_map(|run| run.at.step_by(4096));
    let pages: Vec<_> = content.chunks(4096).map(|page| page[0]).collect();
    let addresses: Vec<_> = addresses.collect();
    assert_eq!(addresses.len(), pages.len());
    addresses.into_iter().zip(pages).collect()
}

#[test]
fn the_memory_is_in_the_pages_files() {
    let image = Image::new();
    let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let (from, to) = (image.path("image"), image.path("out"));
    let exported = export(&from, Some(image.store.root().to_owned()), None, &to, |total| {
        begun.store(total, Ordering::Relaxed);
        |bytes| {
            done.fetch_add(bytes, Ordering::Relaxed);
        }
    });
    assert_eq!(exported.unwrap(), STORED);
    let copied = STORED - WHOLE;
    assert_eq!((begun.into_inner(), done.into_inner()), (copied, copied));

    let found = memory(&to);
    let mut expected = BTreeMap::from([(BEGIN, 1)]);
    let first = BEGIN + PAGE;
    expected.extend((first..first + WHOLE).step_by(4096).map(|at| (at, 4)));
    let last = first + 2 * WHOLE;
    expected.extend(
        [5, 0, 6, 2, 3]
            .into_iter()
            .zip(0..)
            .map(|(byte, page)| (last + page * PAGE, byte)),
    );
    assert!(found == expected, "{} pages, not {}", found.len(), expected.len());
    // Two runs: before the zeros and behind them.
    let map = Pagemap::read(&to, PID).unwrap().unwrap();
    assert_eq!(map.runs.len(), 2, "{:?}", map.runs);

    let manifest = Manifest::read(&to).unwrap().unwrap();
    assert_eq!(manifest.bulk, None);
    manifest.verify_images(&to).unwrap();
    let text = fs::read_to_string(to.join("firn.json")).unwrap();
    assert!(!text.contains("stored-memory"), "{text}");
    assert_eq!(fs::read(to.join("pages-2.img")).unwrap(), b"of another one");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&to), mode(&to.join("pages-1.img"))), (0o700, 0o600));
}

#[test]
fn what_cannot_be_exported_leaves_nothing() {
    let image = Image::new();
    fs::create_dir_all(image.path("out")).unwrap();
    fs::write(image.path("out/mine"), "").unwrap();
    let error = image.export().unwrap_err();
    assert_eq!(error.code(), "FIRN-IMAGE-COPY");
    assert!(image.path("out/mine").exists());
    fs::remove_file(image.path("out/mine")).unwrap();

    let store = export(&image.path("image"), None, None, &image.path("out"), |_| |_| {});
    assert_eq!(store.unwrap_err().code(), "FIRN-STORE-MISSING");
    image.export().unwrap();
    let again = export(&image.path("out"), None, None, &image.path("other"), |_| |_| {});
    assert_eq!(again.unwrap_err().code(), "FIRN-IMAGE-COPY", "it is inline");
    fs::remove_dir_all(image.path("out")).unwrap();

    // An extent that is damaged shows while the files are written.
    let (extent, _) = image.store.extents().unwrap().pop_first().unwrap();
    let path = image.path("store").join(extent.extent_path());
    let good = fs::read(&path).unwrap();
    fs::write(&path, vec![9; good.len()]).unwrap();
    image.fails("FIRN-STORE-DAMAGED");
    fs::remove_file(&path).unwrap();
    image.fails("FIRN-STORE-MISSING");
    fs::write(&path, good).unwrap();
    fs::write(image.path("image/pages-1.img"), pages(&[1, 2, 7])).unwrap();
    image.fails("FIRN-IMAGE-CORRUPT");
}

#[test]
fn an_index_that_does_not_fit_is_refused() {
    type Change = fn(&mut Piece);
    let changes: [Change; 5] = [
        |piece| piece.pid = 8,
        // It overlaps what the image has.
        |piece| piece.address -= PAGE,
        // Behind it is a file.
        |piece| piece.address += PAGE,
        |piece| piece.address += 1,
        |piece| piece.address = u64::MAX - STORED,
    ];
    for change in changes {
        Image::with(change).fails("FIRN-IMAGE-CORRUPT");
    }
}
