//! Messages with descriptors. What takes them apart elsewhere may panic.

use core::mem::size_of;
use core::ptr;

use firn_interposer::abi::{Bytes, PIECES};
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::arch;

/// The descriptors of a message.
pub type Descriptors = [Option<OwnedFd>; PIECES as usize];

/// Of a message that has none.
pub const NONE: Descriptors = [const { None }; PIECES as usize];

/// SOL_SOCKET and SCM_RIGHTS
const SOCKET: i32 = 1;
const RIGHTS: i32 = 1;
/// MSG_DONTWAIT, MSG_NOSIGNAL and MSG_CMSG_CLOEXEC
const AT_ONCE: usize = 0x40;
const WITHOUT_SIGNAL: usize = 0x4000;
const CLOSED_ON_EXEC: usize = 0x4000_0000;

/// `struct iovec`
#[repr(C)]
struct Vector {
    base: *mut u8,
    bytes: usize,
}

/// `struct cmsghdr`, and what it has
#[repr(C)]
struct Control {
    bytes: usize,
    level: i32,
    kind: i32,
    descriptors: [i32; PIECES as usize],
}

/// Of a control message: what comes before the descriptors.
const HEAD: usize = size_of::<usize>() + 2 * size_of::<i32>();

/// `struct msghdr`
#[repr(C)]
struct Header {
    name: *mut u8,
    name_bytes: u32,
    vectors: *mut Vector,
    count: usize,
    control: *mut Control,
    control_bytes: usize,
    flags: i32,
}

/// Sends a message with the descriptors that there are. False: it does not arrive.
pub fn send(to: BorrowedFd<'_>, bytes: &mut [u8], descriptors: &Descriptors) -> bool {
    let mut control = Control {
        bytes: HEAD,
        level: SOCKET,
        kind: RIGHTS,
        descriptors: [0; PIECES as usize],
    };
    for (place, descriptor) in control.descriptors.iter_mut().zip(descriptors.iter().flatten()) {
        *place = descriptor.as_raw_fd();
        control.bytes += size_of::<i32>();
    }
    let length = if control.bytes == HEAD { 0 } else { control.bytes };
    let flags = AT_ONCE | WITHOUT_SIGNAL;
    call(arch::SENDMSG, to, bytes, &mut control, length, flags) == bytes.len().cast_signed()
}

/// Takes a message that is there, and its descriptors. None: there is none of this size.
pub fn take(from: BorrowedFd<'_>, bytes: &mut Bytes) -> Option<Descriptors> {
    let mut control = Control {
        bytes: 0,
        level: 0,
        kind: 0,
        descriptors: [0; PIECES as usize],
    };
    let (room, flags) = (size_of::<Control>(), AT_ONCE | CLOSED_ON_EXEC);
    let taken = call(arch::RECVMSG, from, bytes, &mut control, room, flags);
    let mut descriptors = NONE;
    if (control.level, control.kind) == (SOCKET, RIGHTS) {
        let count = control.bytes.saturating_sub(HEAD) / size_of::<i32>();
        for (place, number) in descriptors.iter_mut().zip(control.descriptors.iter().take(count)) {
            // SAFETY: the kernel has made it for this message.
            *place = (*number >= 0).then(|| unsafe { OwnedFd::from_raw_fd(*number) });
        }
    }
    (taken == bytes.len().cast_signed()).then_some(descriptors)
}

fn call(
    number: usize,
    end: BorrowedFd<'_>,
    bytes: &mut [u8],
    control: &mut Control,
    room: usize,
    flags: usize,
) -> isize {
    let mut vector = Vector {
        base: bytes.as_mut_ptr(),
        bytes: bytes.len(),
    };
    let mut header = Header {
        name: ptr::null_mut(),
        name_bytes: 0,
        vectors: &raw mut vector,
        count: 1,
        control,
        control_bytes: room,
        flags: 0,
    };
    let end = end.as_raw_fd().unsigned_abs() as usize;
    let header = (&raw mut header).expose_provenance();
    // SAFETY: sendmsg and recvmsg have these arguments, and all that the header names is there.
    unsafe { arch::system_call(number, [end, header, flags, 0]) }
}
