use super::super::memory::testing::{huge_vma, vma, write_vmas};
use super::super::tests::{Out, write_file};
use super::*;

const MIB: u64 = 1 << 20;

fn pages<const N: usize>(sizes: [(u64, u64); N]) -> HugePages {
    HugePages(BTreeMap::from(sizes))
}

#[test]
fn an_image_needs_what_its_mappings_have_and_shared_memory_once() {
    let dir = tempfile::tempdir().unwrap();
    let at = |start: u64, length: u64| start << 30..(start << 30) + length;
    let small = vma(at(1, MIB), 1 << 9, 0);
    let private = huge_vma(at(2, 4 * MIB));
    write_vmas(dir.path(), 1, &[small.clone(), private.clone(), private.clone()]);
    write_vmas(dir.path(), 2, std::slice::from_ref(&private));
    write_vmas(dir.path(), 3, &[small]);
    let file = |inode: u64, bytes: u64, flags: u64| {
        let file = Out::new().text(1, "/anon_hugepage").number(4, bytes);
        file.number(7, inode).number(8, flags)
    };
    let files = [
        file(1, 6 * MIB, 0x5400_0004),
        file(2, MIB, 0),
        // Of another pool, by a second number of the first, and of an earlier dump.
        file(3, 1 << 30, 0x7800_0004),
        file(1, 6 * MIB, 0x5400_0004),
        file(4, 1 << 40, 0x5400_0004),
    ];
    write_file(&dir.path().join(FILES), FILES_MAGIC, &files);
    let open = |id: u64, inode: u64| {
        let memory = Out::new().number(1, id).number(5, inode);
        Out::new().number(1, 16).number(2, id).message(20, &memory)
    };
    let open = [open(11, 1), open(12, 1), open(13, 2), open(14, 3)];
    write_file(&dir.path().join(OPEN_FILES), OPEN_FILES_MAGIC, &open);
    let process = |pid: u64| Out::new().number(1, pid).number(2, 0).number(5, pid);
    let tree = dir.path().join(PSTREE);
    write_file(&tree, PSTREE_MAGIC, &[1, 2, 3, 1].map(process));
    // Of an earlier dump.
    write_vmas(dir.path(), 9, &[huge_vma(at(2, 1 << 40))]);
    let expected = pages([(2048, 18 * MIB), (1 << 20, 1 << 30)]);
    assert_eq!(HugePages::of_image(dir.path()).unwrap(), expected);
    write_file(&tree, PSTREE_MAGIC, &[1, 2, 3, 4].map(process));
    assert_eq!(HugePages::of_image(dir.path()).unwrap(), expected);
    std::fs::write(dir.path().join("mm-4.img"), "no list").unwrap();
    assert!(HugePages::of_image(dir.path()).is_err());
}

#[test]
fn a_pool_gives_what_is_neither_used_nor_reserved_and_what_it_may_grow_by() {
    let pools = tempfile::tempdir().unwrap();
    let pool = pools.path().join("hugepages-2048kB");
    std::fs::create_dir(&pool).unwrap();
    let set = |numbers: [u64; 4]| {
        let names = [
            "free_hugepages",
            "resv_hugepages",
            "nr_overcommit_hugepages",
            "surplus_hugepages",
        ];
        for (name, number) in names.into_iter().zip(numbers) {
            std::fs::write(pool.join(name), format!("{number}\n")).unwrap();
        }
    };
    for (numbers, free) in [
        ([5, 2, 0, 0], 3),
        ([5, 5, 0, 0], 0),
        ([0, 0, 4, 1], 3),
        ([2, 0, 1, 1], 2),
    ] {
        set(numbers);
        let of = |count: u64| pages([(2048, count * 2 * MIB)]).expect_in(pools.path());
        assert_eq!(of(free), Ok(()), "{numbers:?}");
        let needed = free + 1;
        let size = 2048;
        assert_eq!(of(needed), Err(ImageFault::HugePages { size, needed, free }));
    }
    let (size, needed, free) = (1 << 20, 1, 0);
    let gibi = pages([(size, 1 << 30)]).expect_in(pools.path());
    assert_eq!(gibi, Err(ImageFault::HugePages { size, needed, free }));
    assert_eq!(HugePages::default().expect_in(pools.path()), Ok(()));
}

#[test]
fn the_head_of_a_mapping_has_its_length_and_what_it_shares() {
    let private = "7f0000000000-7f0000400000 rw-p 00200000 00:10 77   /anon_hugepage (deleted)";
    let expected = Head {
        bytes: 4 * MIB,
        shared: None,
    };
    assert_eq!(Head::of(private), Some(expected));
    let shared = private.replace("rw-p", "rw-s");
    let expected = Head {
        bytes: 6 * MIB,
        shared: Some((0x10, 77)),
    };
    assert_eq!(Head::of(&shared), Some(expected));
    assert_eq!(Head::of("Size: 4 kB"), None);
    assert_eq!(
        Head::of(&shared.replace("/anon_hugepage", "/dev/hugepages/x")),
        None
    );
}

#[test]
fn a_process_without_huge_pages_needs_none() {
    let me = i32::try_from(std::process::id()).unwrap();
    assert_eq!(HugePages::of_processes(&[me, i32::MAX]), HugePages::default());
}
