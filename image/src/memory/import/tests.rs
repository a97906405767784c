use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_host::Problem;
use tempfile::TempDir;

use super::*;
use crate::checksums;
use crate::criu::memory::testing::{vma, write_vmas};
use crate::criu::memory::{PAGE, testing};
use crate::fixtures;
use crate::memory::export;
use firn_store::Packing;

const BEGIN: u64 = 0x7000_0000_0000;
/// Where a mapping of a file begins.
const BEHIND: u64 = BEGIN + (1 << 30);
const WHOLE: u64 = EXTENT as u64;
/// Five extents, the last of which is short.
const LARGE: u64 = 4 * WHOLE + 3 * PAGE;
/// Ordinary private anonymous memory.
const ANONYMOUS: u64 = 0x201;
/// The first process, and its child.
const PID: i32 = 7;
const CHILD: i32 = 8;

/// An inline image of a process with large memory between small mappings.
struct Inline {
    dir: TempDir,
    store: Store,
}

impl Inline {
    fn new() -> Self {
        Self::with(&[vma(large(), ANONYMOUS, 0)])
    }

    /// The large memory is in these mappings.
    fn with(middle: &[Vec<u8>]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::create(&dir.path().join("store"), &Packing::default()).unwrap();
        let inline = Self { dir, store };
        fs::create_dir(inline.path("image")).unwrap();
        for name in ["inventory.img", "pstree.img"] {
            fs::write(inline.path("image").join(name), name).unwrap();
        }
        let (before, behind) = (BEGIN..BEGIN + 2 * PAGE, BEHIND..BEHIND + 2 * PAGE);
        let first = vma(before.clone(), ANONYMOUS, 0);
        let last = vma(behind.clone(), 0x41, 0);
        let vmas = [&[first][..], middle, &[last]].concat();
        // The third extent has no page, the fourth begins with one that is missing, and the last page of the
        // first run is zero.
        let gap = large().start + 2 * WHOLE..large().start + 3 * WHOLE + PAGE;
        let runs = [BEGIN + PAGE..gap.start, gap.end..large().end, behind];
        inline.process(PID, 1, &vmas, &runs);
        inline.seal();
        inline
    }

    fn process(&self, pid: i32, pages_id: u8, vmas: &[Vec<u8>], runs: &[Range<u64>]) {
        let image = self.path("image");
        write_vmas(&image, pid, vmas);
        testing::write_pagemap(&image, pid, pages_id, &runs[0]);
        let mut map = Pagemap::read(&image, pid).unwrap().unwrap();
        map.runs = runs.iter().cloned().map(Run::present).collect();
        map.write(&image, &Pagemap::name(pid)).unwrap();
        let mut content = Vec::new();
        for at in runs {
            for page in (at.start..at.end).step_by(4096) {
                let zero = page + PAGE == runs[0].end;
                let number = if zero {
                    0
                } else {
                    page / PAGE + u64::from(pages_id)
                };
                content.extend(number.to_le_bytes().repeat(512));
            }
        }
        fs::write(image.join(map.pages_name()), content).unwrap();
    }

    fn seal(&self) {
        let image = self.path("image");
        let manifest = Manifest {
            checkpoint: "5b0f".to_owned(),
            bulk: None,
            images: checksums::describe(&image, &AtomicBool::new(false)).unwrap(),
            ..fixtures::manifest(&[0])
        };
        manifest.write(&image).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn import(&self) -> Result<StoredMemory, ImageCopyError> {
        import(
            &self.path("image"),
            || Ok(self.store.clone()),
            None,
            &self.path("out"),
            |_| |_| {},
        )
    }

    /// It fails with this code, and nothing is left.
    fn fails(&self, code: &str) {
        let error = self.import().unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        let left = fs::read_dir(self.path("out")).map(Iterator::count);
        assert_eq!(left.unwrap_or(0), 0);
        assert_eq!(fs::read_dir(self.path("store/new")).unwrap().count(), 0);
        assert!(self.store.images().unwrap().is_empty());
    }
}

fn large() -> Range<u64> {
    BEGIN + 2 * PAGE..BEGIN + 2 * PAGE + LARGE
}

/// The pages of a process that are not zero.
fn memory(dir: &Path, pid: i32) -> BTreeMap<u64, Vec<u8>> {
    let map = Pagemap::read(dir, pid).unwrap().unwrap();
    let content = fs::read(dir.join(map.pages_name())).unwrap();
    assert_eq!(content.len() as u64, map.bytes());
    let addresses = map.runs.into_iter().flat_map(|run| run.at.step_by(4096));
    let pages = content.chunks(4096).map(<[u8]>::to_vec);
    let all = addresses.zip(pages);
    all.filter(|(_, page)| page.iter().any(|byte| *byte != 0))
        .collect()
}

#[test]
fn what_is_imported_and_exported_has_the_same_pages() {
    let inline = Inline::new();
    let (image, out) = (inline.path("image"), inline.path("out"));
    let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let memory_of = import(
        &image,
        || Ok(inline.store.clone()),
        None,
        &out,
        |total| {
            begun.store(total, Ordering::Relaxed);
            |bytes| {
                done.fetch_add(bytes, Ordering::Relaxed);
            }
        },
    );
    let stored = memory_of.unwrap();
    assert_eq!((begun.into_inner(), done.into_inner()), (LARGE, LARGE));
    assert_eq!((stored.bytes, stored.written), (LARGE, LARGE - WHOLE));

    let index = inline.store.index(&stored.index).unwrap();
    assert_eq!(
        (index.checkpoint.as_str(), index.container.as_str()),
        ("5b0f", "out")
    );
    assert_eq!(index.image, out.canonicalize().unwrap());
    let [piece] = &index.pieces[..] else {
        panic!("{:?}", index.pieces);
    };
    assert_eq!(
        (piece.pid, piece.address, piece.length),
        (PID, large().start, LARGE)
    );
    assert!(piece.extents[2].is_none() && piece.extents.iter().flatten().count() == 4);

    let manifest = Manifest::read(&out).unwrap().unwrap();
    assert_eq!(manifest.bulk, Some(stored));
    manifest.verify_images(&out).unwrap();
    let left: Vec<u64> = memory(&out, PID).into_keys().collect();
    assert_eq!(left, [BEGIN + PAGE, BEHIND, BEHIND + PAGE]);

    let again = inline.path("again");
    export(&out, Some(inline.path("store")), None, &again, |_| |_| {}).unwrap();
    assert!(memory(&again, PID) == memory(&image, PID), "other pages");
    Manifest::read(&again)
        .unwrap()
        .unwrap()
        .verify_images(&again)
        .unwrap();
    // And the other way round, to the same index.
    let out = inline.path("twice");
    let twice = import(&again, || Ok(inline.store.clone()), None, &out, |_| |_| {}).unwrap();
    assert_eq!((twice.written, twice.reused), (0, LARGE - WHOLE));
}

#[test]
fn what_a_checkpoint_would_leave_to_criu_stays() {
    const GUARD: u64 = 1 << 16;
    let half = large().start + LARGE / 2;
    let odd = [
        (
            "small",
            vec![
                vma(large().start..half, ANONYMOUS, 0),
                vma(half..large().end, ANONYMOUS, 0),
            ],
        ),
        ("of a file", vec![vma(large(), 0x41, 0)]),
        ("a stack", vec![vma(large(), ANONYMOUS | 2, 0)]),
        ("not inherited", vec![vma(large(), ANONYMOUS, 1 << 10)]),
        (
            "with guards",
            vec![vma(large(), ANONYMOUS, 0), vma(half..half + PAGE, GUARD, 0)],
        ),
        (
            "mostly untouched",
            vec![vma(large().start..large().start + (64 << 20), ANONYMOUS, 0)],
        ),
    ];
    for (what, vmas) in odd {
        let inline = Inline::with(&vmas);
        let error = inline.import().unwrap_err();
        assert!(matches!(error, ImageCopyError::Small { .. }), "{what}: {error:?}");
        inline.fails("FIRN-IMAGE-COPY");
    }
    // Advice about huge pages and core files, and the heap.
    for (status, advice) in [(ANONYMOUS, 7 << 14), (ANONYMOUS | 1 << 5, 0)] {
        Inline::with(&[vma(large(), status, advice)]).import().unwrap();
    }
}

#[test]
fn what_parent_and_child_may_share_stays() {
    let inline = Inline::new();
    let own = BEGIN + (1 << 40)..BEGIN + (1 << 40) + LARGE;
    let vmas = [vma(large(), ANONYMOUS, 0), vma(own.clone(), ANONYMOUS, 0)];
    inline.process(CHILD, 2, &vmas, &[large(), own.clone()]);
    inline.seal();
    let before = [PID, CHILD].map(|pid| memory(&inline.path("image"), pid));
    let stored = inline.import().unwrap();
    let index = inline.store.index(&stored.index).unwrap();
    let pieces: Vec<(i32, u64)> = index
        .pieces
        .iter()
        .map(|piece| (piece.pid, piece.address))
        .collect();
    assert_eq!(pieces, [(CHILD, own.start)]);
    export(
        &inline.path("out"),
        Some(inline.path("store")),
        None,
        &inline.path("again"),
        |_| |_| {},
    )
    .unwrap();
    let after = [PID, CHILD].map(|pid| memory(&inline.path("again"), pid));
    assert!(before == after, "other pages");
}

#[test]
fn what_cannot_be_imported_leaves_nothing() {
    let inline = Inline::new();
    let full = import(
        &inline.path("image"),
        || Ok(inline.store.clone()),
        Some(WHOLE),
        &inline.path("out"),
        |_| |_| {},
    );
    assert_eq!(full.unwrap_err().code(), "FIRN-STORE-FULL");
    let pages = inline.path("image/pages-1.img");
    let good = fs::read(&pages).unwrap();
    let mut bad = good.clone();
    bad[5 << 20] ^= 1;
    fs::write(&pages, bad).unwrap();
    inline.fails("FIRN-IMAGE-CORRUPT");
    // Less than what the page map lists, and more, as its maker has described it.
    fs::write(&pages, &good[4096..]).unwrap();
    inline.seal();
    inline.fails("FIRN-IMAGE-CORRUPT");
    fs::write(&pages, [&good[..], &[1; 4096]].concat()).unwrap();
    inline.seal();
    inline.fails("FIRN-IMAGE-TRUNCATED");
    fs::write(&pages, good).unwrap();
    inline.seal();
    fs::remove_file(inline.path("image/firn.json")).unwrap();
    inline.fails("FIRN-MANIFEST-MISSING");
    inline.seal();
    inline.import().unwrap();
    let again = import(
        &inline.path("out"),
        || Ok(inline.store.clone()),
        None,
        &inline.path("other"),
        |_| |_| {},
    );
    assert_eq!(again.unwrap_err().code(), "FIRN-IMAGE-COPY", "it is in the store");
}

#[test]
fn a_copy_that_fails_leaves_the_files_of_another_one() {
    let inline = Inline::new();
    let (from, out) = (inline.path("image"), inline.path("out"));
    let copy = ImageCopy::begin(&from, &out).unwrap();
    copy.create("mine.img").unwrap();
    fs::write(out.join("other.img"), "").unwrap();
    copy.end::<()>(Err(ImageCopyError::Small { dir: out.clone() }))
        .unwrap_err();
    let left: Vec<_> = fs::read_dir(out)
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    assert_eq!(left, ["other.img"]);
}
