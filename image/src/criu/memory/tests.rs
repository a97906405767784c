//! Pagemaps and mappings, and forged ones.

use super::testing::{entry, vma};
use super::*;

fn file(dir: &Path, name: &str, magic: u32, messages: &[&[u8]]) {
    write(dir, name, magic, messages).unwrap();
}

fn map(entries: &[Vec<u8>]) -> Result<Pagemap, ImageFault> {
    let dir = tempfile::tempdir().unwrap();
    let head = [8, 3];
    let all: Vec<&[u8]> = std::iter::once(&head[..])
        .chain(entries.iter().map(|e| &e[..]))
        .collect();
    file(dir.path(), "pagemap-7.img", PAGEMAP_MAGIC, &all);
    Ok(Pagemap::read(dir.path(), 7)?.unwrap())
}

#[test]
fn runs_are_read_and_written_as_this_criu_writes_them() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Pagemap::read(dir.path(), 7).unwrap().is_none());
    let mut long = entry(0x9000, 0, 4);
    wire::push_number(&mut long, entry::LONG_COUNT, 1 << 33);
    for (second, is_long) in [(entry(0x9000, 2, 6), false), (long, true)] {
        let first = entry(0x4000, 3, 4);
        file(
            dir.path(),
            "pagemap-7.img",
            PAGEMAP_MAGIC,
            &[&[8, 3], &first, &second],
        );
        let map = Pagemap::read(dir.path(), 7).unwrap().unwrap();
        assert_eq!(
            (map.pages_name().as_str(), map.long_counts),
            ("pages-3.img", is_long)
        );
        assert_eq!(map.runs[0].at, 0x4000..0x7000);
        assert_eq!(map.runs[1].at.start, 0x9000);
        map.write(dir.path(), "pagemap-7.img").unwrap();
        let again = Pagemap::read(dir.path(), 7).unwrap().unwrap();
        assert_eq!((&again.runs, again.long_counts), (&map.runs, is_long));
    }
}

#[test]
fn runs_that_no_dump_writes_are_refused() {
    assert_eq!(map(&[entry(0x4000, 1, 4)]).unwrap().runs.len(), 1);
    for odd in [
        vec![entry(0x4000, 2, 4), entry(0x5000, 1, 4)],
        vec![entry(0x4000, 1, 1)],
        vec![entry(0x4000, 1, 0)],
        vec![entry(0x4001, 1, 4)],
        vec![entry(u64::MAX - 0xfff, 2, 4)],
        vec![vec![0xff]],
    ] {
        assert!(matches!(map(&odd), Err(ImageFault::Malformed { .. })), "{odd:?}");
    }
}

#[test]
fn huge_pages_are_asked_for_in_the_given_ranges_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut mm = Vec::new();
    wire::push_number(&mut mm, 1, 77);
    for one in [
        vma(0x1000..0x3000, 0x201, 0),
        vma(0x3000..0x9000, 0x201, 2),
        vma(0xa000..0xb000, 0x41, 0),
    ] {
        wire::push_bytes(&mut mm, VMAS, &one);
    }
    wire::push_number(&mut mm, 15, 1);
    file(dir.path(), "mm-7.img", MM_MAGIC, &[&mm]);
    let one = |at, is_anonymous, is_plain| Vma {
        at,
        is_anonymous,
        is_plain,
    };
    // The second is read at random.
    let expected = [
        one(0x1000..0x3000, true, true),
        one(0x3000..0x9000, true, false),
        one(0xa000..0xb000, false, false),
    ];
    assert_eq!(vmas(dir.path(), 7).unwrap(), expected);

    let range = 0x3000..0x9000;
    advise_huge_pages(dir.path(), 7, std::slice::from_ref(&range)).unwrap();
    assert_eq!(vmas(dir.path(), 7).unwrap(), expected);
    let bytes = std::fs::read(dir.path().join("mm-7.img")).unwrap();
    let messages = messages("mm-7.img", MM_MAGIC, &bytes).unwrap();
    let mm = Message::parse(messages[0]).unwrap();
    assert_eq!((mm.required_long(1), mm.required_long(15)), (Ok(77), Ok(1)));
    let advice = mm.each(VMAS, |vma| vma.required_long(vma::ADVICE)).unwrap();
    assert_eq!(advice, [0, 2 | HUGE_PAGES, 0]);
}

/// What a hostile image may have: entries without number, and pages that are nowhere.
#[test]
fn the_pages_file_bounds_what_is_read_of_a_pagemap() {
    let dir = tempfile::tempdir().unwrap();
    let pages = |count: u64| {
        let file = std::fs::File::create(dir.path().join("pages-3.img")).unwrap();
        file.set_len(count * PAGE).unwrap();
    };
    let read = |entries: &[Vec<u8>]| {
        let head = [8, 3];
        let all: Vec<&[u8]> = std::iter::once(&head[..])
            .chain(entries.iter().map(|entry| &entry[..]))
            .collect();
        file(dir.path(), "pagemap-7.img", PAGEMAP_MAGIC, &all);
        match Pagemap::of_image(dir.path(), 7) {
            Ok(map) => Ok(map.unwrap().runs.len()),
            Err(fault) => Err(fault.to_string()),
        }
    };
    assert!(Pagemap::of_image(dir.path(), 7).unwrap().is_none());
    let few = [entry(0x4000, 1, 4), entry(0x6000, 2, 4)];
    pages(3);
    assert_eq!(read(&few), Ok(2));
    pages(2);
    assert!(read(&few).unwrap_err().contains("more pages"));
    std::fs::remove_file(dir.path().join("pages-3.img")).unwrap();
    assert!(read(&few).unwrap_err().contains("more pages"));
    pages(3);
    // Each takes memory, and no page.
    let none = vec![entry(0x4000, 0, 4); 3];
    assert!(read(&none).unwrap_err().contains("more pages"));
    // One that is divided into parts of four MiB.
    let endless = [entry(0x4000, u64::from(u32::MAX), 4)];
    assert!(read(&endless).unwrap_err().contains("more pages"));
    // Many MB of entries are not read for three pages.
    let many: Vec<Vec<u8>> = (0..1_000_000).map(|at| entry(0x4000 + at * PAGE, 1, 4)).collect();
    assert!(read(&many).unwrap_err().contains("too large"));
    let named = Pagemap::read(dir.path(), 7).unwrap().unwrap();
    assert_eq!(named.runs.len(), many.len(), "that of a dump is read whole");
}
