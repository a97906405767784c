//! Shared memory of a process in which SysV segments, files and memory files have the same numbers: each of
//! CRIU's files gets the memory that CRIU means by its number, or none.
//!
//! Needs root: the numbers are equal because the namespace of the segments and the file system are new.
#![allow(clippy::unwrap_used, reason = "a failed invariant fails the test")]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;

use firn_host::FileId;
use firn_image::memory::progress::Counter;
use firn_image::memory::{MemoryError, Process, rest};
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

const PAGE: usize = 4096;
/// Pages of each memory.
const PAGES: usize = 4;
const SIZE: usize = PAGE * PAGES;

/// Words of a memory that no other has.
fn words(name: &str) -> Vec<u8> {
    let word = |at: usize| format!("{name:<12}{at:>4}").into_bytes();
    (0..SIZE / 16).flat_map(word).collect()
}

/// Maps memory, which stays mapped until the test ends, and fills it with the words of this name.
fn fill(address: *mut libc::c_void, name: &str) {
    assert_ne!(
        address.addr(),
        usize::MAX,
        "{name}: {}",
        std::io::Error::last_os_error()
    );
    let words = words(name);
    // SAFETY: the kernel has just mapped SIZE bytes there, which nothing else uses.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), address.cast(), SIZE) };
}

/// A SysV segment with words; its id. It stays attached if that is asked for.
fn segment(name: &str, stays: bool) -> u64 {
    // SAFETY: the call takes numbers alone.
    let id = unsafe { libc::shmget(libc::IPC_PRIVATE, SIZE, 0o600) };
    assert!(id >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: without an address the kernel maps the segment where nothing else is.
    let address = unsafe { libc::shmat(id, std::ptr::null(), 0) };
    fill(address, name);
    if !stays {
        // SAFETY: nothing refers to the mapping.
        assert_eq!(unsafe { libc::shmdt(address) }, 0);
    }
    u64::try_from(id).unwrap()
}

/// Maps a file with words.
fn map(file: &File, name: &str) {
    use std::os::fd::AsRawFd;
    file.set_len(SIZE as u64).unwrap();
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: without an address the kernel maps the file where nothing else is.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, protection, flags, file.as_raw_fd(), 0) };
    fill(address, name);
}

/// A new tmpfs, which is mounted nowhere.
fn tmpfs() -> OwnedFd {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    fsconfig_create(&context).unwrap();
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap()
}

/// Maps files of a new tmpfs with words until one has this number.
fn files_up_to(number: u64) {
    let dir = tmpfs();
    let root = FileId::of(&File::from(dir.try_clone().unwrap()).metadata().unwrap());
    for at in 0..100 {
        let name = format!("file {at}");
        let flags = OFlags::RDWR | OFlags::CREATE;
        let file = File::from(openat(&dir, name.as_str(), flags, Mode::RUSR | Mode::WUSR).unwrap());
        map(&file, &name);
        if FileId::of(&file.metadata().unwrap()) == root.on_same_device(number) {
            return;
        }
    }
    panic!("no file has the number {number}");
}

/// A message of CRIU's: fields of numbers.
fn message(fields: &[(u8, u64)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (field, number) in fields {
        bytes.push(field << 3);
        let mut left = *number;
        while left > 0x7f {
            bytes.push(u8::try_from(left & 0x7f).unwrap() | 0x80);
            left >>= 7;
        }
        bytes.push(u8::try_from(left).unwrap());
    }
    bytes
}

fn write(dir: &Path, name: &str, magic: u32, messages: &[Vec<u8>]) {
    let mut bytes = [0x5456_4319_u32.to_le_bytes(), magic.to_le_bytes()].concat();
    for message in messages {
        bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
        bytes.extend(message);
    }
    std::fs::write(dir.join(name), bytes).unwrap();
}

/// What is kept of shared memory with this number in an image that lists these segments.
fn kept(number: u64, segments: &[u64]) -> Result<Vec<u8>, MemoryError> {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let pages = [message(&[(1, 1)]), message(&[(1, 0), (2, PAGES as u64), (4, 4)])];
    write(dir, &format!("pagemap-shmem-{number}.img"), 0x5608_4025, &pages);
    symlink("/dev/null", dir.join("pages-1.img")).unwrap();
    let segment = |id: &u64| {
        let description = message(&[(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0o600), (7, *id)]);
        let length = u8::try_from(description.len()).unwrap();
        [&[10, length][..], &description, &message(&[(2, SIZE as u64)])].concat()
    };
    let segments: Vec<_> = segments.iter().map(segment).collect();
    write(dir, "ipcns-shm-9.img", 0x4628_3044, &segments);
    let me = Process {
        pid: std::process::id().cast_signed(),
        inside: 1,
    };
    rest(dir, &[me], &[], &Counter::default())?;
    Ok(std::fs::read(dir.join("pages-1.img")).unwrap())
}

#[test]
fn a_number_names_no_memory_without_its_device_and_kind() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: a new IPC namespace needs root");
        return;
    }
    unshare(CloneFlags::CLONE_NEWIPC).unwrap();
    let ids: Vec<u64> = (0..6)
        .map(|at| segment(&format!("segment {at}"), at < 4))
        .collect();
    assert_eq!(ids, [0, 1, 2, 3, 4, 5], "the namespace is new");
    // Mapped later, and therefore found first.
    files_up_to(5);

    for id in [2, 3] {
        let expected = words(&format!("segment {id}"));
        assert!(kept(id, &ids).unwrap() == expected, "not segment {id}");
    }
    // Attached nowhere: nothing else is taken for it.
    for id in [4, 5] {
        let nowhere = kept(id, &ids);
        assert!(
            matches!(nowhere, Err(MemoryError::Unexpected { .. })),
            "{nowhere:?}"
        );
    }
    // No segment is meant, and files of file systems are none of CRIU's shared memory.
    let no_segment = kept(3, &[]);
    assert!(
        matches!(no_segment, Err(MemoryError::Unexpected { .. })),
        "{no_segment:?}"
    );
}

#[test]
fn a_memory_file_is_read_and_never_guessed() {
    let file = File::from(memfd_create(c"mine", MFdFlags::MFD_CLOEXEC).unwrap());
    map(&file, "memory file");
    #[expect(clippy::disallowed_methods, reason = "CRIU's files have the number alone")]
    let number = std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    assert!(kept(number, &[0, 1]).unwrap() == words("memory file"));
    // CRIU has written a segment into the same file, before or after.
    let both = kept(number, &[number]);
    assert!(matches!(both, Err(MemoryError::SameNumber { .. })), "{both:?}");
}
