//! Shared memory of every kind with words that no other has, under numbers that others have too: ids of SysV
//! segments, inodes of files in /dev/shm, memory files.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use clap::ValueEnum;
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Segments and files of each kind. Ids begin at 0, and inodes of a new tmpfs at 2.
const COUNT: usize = 6;
/// Bytes of each: an odd number of pages.
const SIZE: usize = 5 * 4096;
const WORD: usize = size_of::<u64>();

/// Which shared memory there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// All is mapped
    Mapped,
    /// In addition a SysV segment and a memory file that are mapped nowhere
    Detached,
}

/// Where the words of a memory are.
enum At {
    Address(usize),
    /// A segment that is attached only to look at it.
    Segment(libc::c_int),
    /// A memory file that is only read.
    File(File),
}

/// All shared memory of this process.
pub struct Shared(Vec<(String, At)>);

impl Shared {
    /// Makes it and writes the words.
    pub fn make(which: Which) -> io::Result<Self> {
        let mut all = Vec::new();
        let detached = if which == Which::Detached { 1 } else { 0 };
        let mut ids = Vec::new();
        for at in 0..COUNT + detached {
            let name = format!("segment {at}");
            // SAFETY: the call takes numbers alone.
            let id = unsafe { libc::shmget(libc::IPC_PRIVATE, SIZE, 0o600) };
            if id < 0 {
                return Err(io::Error::last_os_error());
            }
            let address = attach(id)?;
            write(address, &name);
            all.push(if at < COUNT {
                (name, At::Address(address))
            } else {
                detach(address);
                (name, At::Segment(id))
            });
            ids.push(u64::from(id.unsigned_abs()));
        }
        // Mapped later, and therefore first in /proc/PID/maps.
        let mut collisions = 0;
        for at in 0..COUNT {
            let name = format!("file {at}");
            let mut options = File::options();
            let options = options.read(true).write(true).create(true);
            let file = options.open(format!("/dev/shm/words-{at}"))?;
            #[expect(
                clippy::disallowed_methods,
                reason = "a number of a file that others have too"
            )]
            let inode = MetadataExt::ino(&file.metadata()?);
            collisions += usize::from(ids.contains(&inode));
            all.push((name.clone(), At::Address(map(&file, &name)?)));
        }
        if collisions == 0 {
            return Err(io::Error::other("no file has the number of a segment"));
        }
        for at in 0..COUNT + detached {
            let name = format!("memory file {at}");
            let file = File::from(memfd_create(c"words", MFdFlags::MFD_CLOEXEC)?);
            let address = map(&file, &name)?;
            all.push(if at < COUNT {
                (name, At::Address(address))
            } else {
                // SAFETY: nothing refers to the mapping.
                unsafe { libc::munmap(std::ptr::without_provenance_mut(address), SIZE) };
                (name, At::File(file))
            });
        }
        Ok(Self(all))
    }

    /// Compares every word.
    pub fn look(&self) -> io::Result<()> {
        for (name, at) in &self.0 {
            let is_same = match at {
                At::Address(address) => is_at(*address, name),
                At::Segment(id) => {
                    let address = attach(*id)?;
                    let is_same = is_at(address, name);
                    detach(address);
                    is_same
                }
                At::File(file) => {
                    let (mut file, mut bytes) = (file, Vec::new());
                    file.rewind()?;
                    file.read_to_end(&mut bytes)?;
                    bytes.len() == SIZE
                        && words(name)
                            .zip(bytes.chunks(WORD))
                            .all(|(word, bytes)| word.to_ne_bytes() == bytes)
                }
            };
            if !is_same {
                return Err(io::Error::other(format!("{name} has other words")));
            }
        }
        Ok(())
    }
}

/// The words of a memory.
fn words(name: &str) -> impl Iterator<Item = u64> {
    let start = name
        .bytes()
        .fold(7_u64, |sum, byte| sum.wrapping_mul(1_000_003) ^ u64::from(byte));
    (0..SIZE / WORD).map(move |at| start.wrapping_mul(31).wrapping_add(at as u64))
}

fn word(address: usize, at: usize) -> *mut u64 {
    std::ptr::with_exposed_provenance_mut(address + at * WORD)
}

fn write(address: usize, name: &str) {
    for (at, value) in words(name).enumerate() {
        // SAFETY: SIZE bytes are mapped there for writing, and no reference leads to them.
        unsafe { word(address, at).write_volatile(value) };
    }
}

fn is_at(address: usize, name: &str) -> bool {
    // SAFETY: SIZE bytes are mapped there for reading.
    words(name)
        .enumerate()
        .all(|(at, value)| unsafe { word(address, at).read_volatile() } == value)
}

fn attach(id: libc::c_int) -> io::Result<usize> {
    // SAFETY: without an address the kernel maps the segment where nothing else is.
    mapped(unsafe { libc::shmat(id, std::ptr::null(), 0) })
}

fn detach(address: usize) {
    // SAFETY: nothing refers to the mapping.
    unsafe { libc::shmdt(std::ptr::without_provenance(address)) };
}

/// Maps a file with words.
fn map(file: &File, name: &str) -> io::Result<usize> {
    file.set_len(SIZE as u64)?;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: without an address the kernel maps the file where nothing else is.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, protection, flags, file.as_raw_fd(), 0) };
    let address = mapped(address)?;
    write(address, name);
    Ok(address)
}

fn mapped(address: *mut libc::c_void) -> io::Result<usize> {
    if address == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(address.expose_provenance())
    }
}
