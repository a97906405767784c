//! bpf(2), as far as programs that enforce a cgroup's device rules need it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

/// `enum bpf_cmd` of linux/bpf.h.
#[derive(Clone, Copy)]
enum Command {
    Load = 5,
    Attach = 8,
    ById = 13,
    Info = 15,
    Query = 16,
}

/// `BPF_PROG_TYPE_CGROUP_DEVICE`.
const DEVICE_PROGRAM: u32 = 15;

/// `BPF_CGROUP_DEVICE`, where such programs are attached.
const DEVICE_HOOK: u32 = 6;

/// `BPF_F_ALLOW_MULTI`: every program that is attached in this way has to allow an access.
pub(crate) const ALLOW_MULTI: u32 = 2;

/// `BPF_F_REPLACE`.
const REPLACE: u32 = 4;

/// More programs than this cannot be attached to one cgroup.
const MOST_PROGRAMS: usize = 64;

/// Shown by tools that list programs.
const NAME: &[u8; 16] = b"firn_devices\0\0\0\0";

/// The kernel asks for a licence to decide on helper functions, of which a device program needs none.
const LICENCE: &CStr = c"Apache-2.0";

/// One instruction, `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instruction {
    pub code: u8,
    /// Destination in the low bits, source in the high ones.
    pub registers: u8,
    pub offset: i16,
    pub value: i32,
}

/// `union bpf_attr` of each command, up to the last field that is set; of a query up to the last one that
/// kernels write (6.17 and later do so whatever the size).
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    licence: u64,
    /// log_level, log_size.
    log: [u32; 2],
    log_buffer: u64,
    /// kern_version, prog_flags.
    flags: [u32; 2],
    name: [u8; 16],
}

#[repr(C)]
#[derive(Default)]
struct Attach {
    cgroup: u32,
    program: u32,
    hook: u32,
    flags: u32,
    replaced: u32,
}

#[repr(C)]
#[derive(Default)]
struct Query {
    cgroup: u32,
    hook: u32,
    /// query_flags.
    options: u32,
    flags: u32,
    ids: u64,
    count: u32,
    pad: u32,
    /// prog_attach_flags, link_ids, link_attach_flags, revision.
    rest: [u64; 4],
}

#[repr(C)]
#[derive(Default)]
struct InfoRequest {
    program: u32,
    size: u32,
    info: u64,
}

/// The head of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct Info {
    kind: u32,
    id: u32,
    tag: u64,
    jited_size: u32,
    /// In bytes.
    size: u32,
    jited: u64,
    instructions: u64,
}

/// The kernel's answer to a command.
///
/// # Safety
///
/// `attributes` is what the command takes, by layout, and its addresses are those of memory that outlives the
/// call and has the size that goes with each.
unsafe fn bpf<T>(command: Command, attributes: &mut T) -> io::Result<i32> {
    let attributes = std::ptr::from_mut(attributes);
    // SAFETY: the size is that of what the pointer, a reference, points to; the rest is the caller's.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command as u32, attributes, size_of::<T>()) };
    i32::try_from(Errno::result(rc)?).map_err(io::Error::other)
}

/// A descriptor that the kernel has just made.
///
/// # Safety
///
/// As of [`bpf`], and the command is one that returns a new descriptor.
unsafe fn bpf_descriptor<T>(command: Command, attributes: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the kernel has made the descriptor for this call, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn number(fd: &impl AsFd) -> u32 {
    fd.as_fd().as_raw_fd().unsigned_abs()
}

fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

/// Loads a program. The kernel refuses one that is not sound.
pub fn load(instructions: &[Instruction]) -> io::Result<OwnedFd> {
    let mut attributes = Load {
        kind: DEVICE_PROGRAM,
        count: u32::try_from(instructions.len()).map_err(io::Error::other)?,
        instructions: address(instructions.as_ptr()),
        licence: address(LICENCE.as_ptr()),
        name: *NAME,
        ..Load::default()
    };
    loop {
        // SAFETY: the kernel reads `count` instructions and a string that ends with a zero; both outlive the
        // call. Loading makes a descriptor.
        match unsafe { bpf_descriptor(Command::Load, &mut attributes) } {
            // A signal came while the program was checked.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            loaded => return loaded,
        }
    }
}

/// The ids of a cgroup's own device programs, and the flags with which they are attached.
pub fn attached(cgroup: impl AsFd) -> io::Result<(Vec<u32>, u32)> {
    let mut ids = vec![0_u32; MOST_PROGRAMS];
    let mut attributes = Query {
        cgroup: number(&cgroup),
        hook: DEVICE_HOOK,
        ids: address(ids.as_mut_ptr()),
        count: u32::try_from(ids.len()).map_err(io::Error::other)?,
        ..Query::default()
    };
    // SAFETY: the kernel writes up to `count` ids to `ids`, which outlives the call.
    unsafe { bpf(Command::Query, &mut attributes) }?;
    ids.truncate(usize::try_from(attributes.count).map_err(io::Error::other)?);
    Ok((ids, attributes.flags))
}

/// The program with this id.
pub fn by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attributes = [id, 0, 0];
    // SAFETY: the command takes prog_id, next_id and open_flags, and makes a descriptor.
    unsafe { bpf_descriptor(Command::ById, &mut attributes) }
}

/// A program's id, and its instructions as the kernel has kept them.
pub fn instructions(program: impl AsFd) -> io::Result<(u32, Vec<Instruction>)> {
    let mut found = Vec::new();
    loop {
        let size = size_of_val(found.as_slice());
        let mut info = Info {
            size: u32::try_from(size).map_err(io::Error::other)?,
            instructions: if size == 0 { 0 } else { address(found.as_mut_ptr()) },
            ..Info::default()
        };
        let mut attributes = InfoRequest {
            program: number(&program),
            size: u32::try_from(size_of::<Info>()).map_err(io::Error::other)?,
            info: address(&raw mut info),
        };
        // SAFETY: the kernel writes `size` bytes to `info`, and up to `info.size` bytes to `found`; both
        // outlive the call.
        unsafe { bpf(Command::Info, &mut attributes) }?;
        let whole = usize::try_from(info.size).map_err(io::Error::other)?;
        match whole {
            // The kernel shows none to a caller who may not see them.
            0 => return Err(Errno::EPERM.into()),
            _ if whole == size => return Ok((info.id, found)),
            _ => found = vec![Instruction::default(); whole / size_of::<Instruction>()],
        }
    }
}

/// Attaches a program, with the flags that the cgroup's programs have, in the place of one of them.
pub fn attach(
    cgroup: impl AsFd,
    program: impl AsFd,
    flags: u32,
    replaced: Option<&OwnedFd>,
) -> io::Result<()> {
    // Without the flag there is one program at most, and a new one takes its place.
    let by_name = replaced.filter(|_| flags & ALLOW_MULTI != 0);
    let mut attributes = Attach {
        cgroup: number(&cgroup),
        program: number(&program),
        hook: DEVICE_HOOK,
        flags: flags | by_name.map_or(0, |_| REPLACE),
        replaced: by_name.map_or(0, number),
    };
    // SAFETY: the command takes numbers and no memory; descriptors of another kind are refused.
    unsafe { bpf(Command::Attach, &mut attributes) }.map(drop)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn attributes_have_the_kernels_layout() {
        assert_eq!(size_of::<Instruction>(), 8);
        assert_eq!((offset_of!(Load, name), size_of::<Load>()), (48, 64));
        assert_eq!((offset_of!(Attach, replaced), size_of::<Attach>()), (16, 20));
        assert_eq!((offset_of!(Query, count), size_of::<Query>()), (24, 64));
        assert_eq!((offset_of!(Info, size), size_of::<Info>()), (20, 40));
    }
}
