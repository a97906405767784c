//! Where other processes of the container get memory of this one by its tokens: a socket without a path, in
//! the network that they have in common, and a thread that begins with the first token.

use core::ffi::c_void;
use core::mem::size_of;
use core::ptr;

use firn_interposer::token::Words;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use rustix::io::{Errno, close};
use rustix::net::listen;
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::thread::{nanosleep, set_name};

use crate::area;
use crate::memory::shared;
use crate::message::{self, Descriptors};
use crate::{arch, calls, service};

/// It is looked so often whether the other side is there and has answered. Only time in which this process
/// runs counts: both may be frozen for long.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Looks for an answer: longer than a gate is shut of which firn asks nothing.
const LOOKS: usize = 200;

/// Looks for what the other side has sent before it was accepted.
const FIRST_LOOKS: usize = 2;

/// Of a descriptor: there is no other number.
const NUMBERS: u32 = u32::MAX >> 1;

/// Processes that wait to be served.
const WAITING: i32 = 64;

/// A name that is not 0, or a part of a secret.
fn random() -> Option<u64> {
    let mut bytes = [0; 8];
    let got = getrandom(&mut bytes, GetRandomFlags::empty());
    (got == Ok(8)).then(|| u64::from_ne_bytes(bytes) | 1)
}

pub fn secret() -> Option<[u64; 2]> {
    Some([random()?, random()?])
}

/// AF_UNIX, SOCK_SEQPACKET, SOCK_CLOEXEC and SOCK_NONBLOCK
const FAMILY: u16 = 1;
const MESSAGES: usize = 5;
const FLAGS: usize = 0o2_000_000 | 0o4_000;

/// A socket of this process. What is safe elsewhere for descriptors looks, and may panic.
struct Socket(u32);

impl Socket {
    /// The kernel's answer that should be one.
    fn of(answer: isize) -> Result<Self, isize> {
        match u32::try_from(answer) {
            Ok(number) => Ok(Self(number & NUMBERS)),
            Err(_) => Err(answer),
        }
    }

    fn make() -> Option<Self> {
        // SAFETY: socket has these arguments, which are numbers.
        let answer = unsafe { arch::system_call(arch::SOCKET, [FAMILY.into(), MESSAGES | FLAGS, 0, 0]) };
        Self::of(answer).ok()
    }

    fn accept(listener: u32) -> Result<Self, isize> {
        // SAFETY: accept4 has these arguments, and there is no place for an address.
        Self::of(unsafe { arch::system_call(arch::ACCEPT, [listener as usize, 0, 0, FLAGS]) })
    }

    fn borrowed(&self) -> BorrowedFd<'_> {
        // SAFETY: it is this one's.
        unsafe { borrowed(self.0) }
    }

    /// It is its user's from now on.
    fn leave(self) -> u32 {
        let number = self.0;
        core::mem::forget(self);
        number
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // SAFETY: it is this one's.
        unsafe { close((self.0 & NUMBERS).cast_signed()) };
    }
}

/// # Safety
/// It is open as long as this lives.
unsafe fn borrowed<'a>(number: u32) -> BorrowedFd<'a> {
    // SAFETY: as the caller promises, and it is not -1.
    unsafe { BorrowedFd::borrow_raw((number & NUMBERS).cast_signed()) }
}

/// `struct sockaddr_un` of a socket without a path.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Address {
    family: u16,
    zero: u8,
    text: [u8; 26],
}

/// Its bytes: the structure has one more.
const LENGTH: usize = 2 + 1 + 26;
const _: () = assert!(size_of::<Address>() == LENGTH + 1);

impl Address {
    fn of(name: u64) -> Self {
        let mut text = *b"firn-cuda-0000000000000000";
        for (place, digit) in text.iter_mut().rev().take(16).zip(0..) {
            let half = (name >> (4 * digit)) as u8 & 0xf;
            *place = if half < 10 { b'0' + half } else { b'a' + half - 10 };
        }
        Self {
            family: FAMILY,
            zero: 0,
            text,
        }
    }

    /// The address of a socket, as far as it is as long as these. None: it is no socket.
    fn of_socket(socket: u32) -> Option<Self> {
        let mut address = Self {
            family: 0,
            zero: 0,
            text: [0; 26],
        };
        let mut length = LENGTH as u32;
        let place = (&raw mut address).expose_provenance();
        let length = (&raw mut length).expose_provenance();
        let arguments = [socket as usize, place, length, 0];
        // SAFETY: getsockname has these arguments, and writes no more than so many bytes.
        let answer = unsafe { arch::system_call(arch::GETSOCKNAME, arguments) };
        (answer == 0).then_some(address)
    }

    /// bind or connect. The kernel's answer.
    fn call(&self, call: usize, socket: &Socket) -> isize {
        let place = ptr::from_ref(self).expose_provenance();
        // SAFETY: both have these arguments, and read no more than so many bytes.
        unsafe { arch::system_call(call, [socket.0 as usize, place, LENGTH, 0]) }
    }
}

/// Begins to serve other processes. Returns the name by which they reach this one.
pub fn begin() -> Option<u64> {
    let name = random()?;
    let listener = Socket::make()?;
    if Address::of(name).call(arch::BIND, &listener) != 0 {
        return None;
    }
    listen(listener.borrowed(), WAITING).ok()?;
    service::start_thread(serve, ptr::without_provenance_mut(listener.0 as usize))?;
    // It is the thread's from now on.
    listener.leave();
    Some(name)
}

unsafe extern "C" fn serve(listener: *mut c_void) -> *mut c_void {
    let _ = set_name(c"firn-cuda-i");
    let number = listener.addr() as u32 & NUMBERS;
    let own = Address::of_socket(number);
    while let Some(area) = area::get() {
        // SAFETY: whether it is still the socket is looked at before anything is taken from it.
        let listener = unsafe { borrowed(number) };
        let mut ends = [PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut ends, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break,
        }
        // The program may have closed it and have something else by this number.
        if own.is_none() || Address::of_socket(number) != own {
            break;
        }
        match Socket::accept(number) {
            Ok(socket) => {
                let _ = shared::give(area, &Peer { socket, pid: 0 });
            }
            Err(error) if error == answer_of(Errno::AGAIN) => {}
            // As where the process has too many descriptors.
            Err(_) => {
                let _ = nanosleep(&LOOK);
            }
        }
    }
    ptr::null_mut()
}

/// The other side.
pub struct Peer {
    socket: Socket,
    /// Its process; 0: that does not matter.
    pid: u32,
}

impl Peer {
    /// The process of this name and number.
    pub fn reach(name: u64, pid: u64) -> Option<Self> {
        let (socket, address) = (Socket::make()?, Address::of(name));
        let pid = u32::try_from(pid).ok()?;
        for _ in 0..LOOKS {
            match address.call(arch::CONNECT, &socket) {
                0 => return Some(Self { socket, pid }),
                // It has others to serve.
                error if error == answer_of(Errno::AGAIN) => {
                    let _ = nanosleep(&LOOK);
                }
                _ => return None,
            }
        }
        None
    }

    pub fn send(&self, words: &Words, descriptors: &Descriptors) -> Option<()> {
        let mut bytes = [0; 64];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        message::send(self.socket.borrowed(), &mut bytes, descriptors).then_some(())
    }

    /// What the other side has sent at once.
    pub fn take_first(&self) -> Option<(Words, Descriptors)> {
        self.take_within(FIRST_LOOKS)
    }

    /// The next message, if it comes in time.
    pub fn take(&self) -> Option<(Words, Descriptors)> {
        self.take_within(LOOKS)
    }

    fn take_within(&self, looks: usize) -> Option<(Words, Descriptors)> {
        for _ in 0..looks {
            let socket = self.socket.borrowed();
            let mut ends = [PollFd::new(&socket, PollFlags::IN)];
            match poll(&mut ends, Some(&LOOK)) {
                // A child of it may have the socket as well.
                Ok(0) if self.pid != 0 && calls::is_gone(self.pid) => return None,
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return self.received(),
                Err(_) => return None,
            }
        }
        None
    }

    fn received(&self) -> Option<(Words, Descriptors)> {
        let mut bytes = [0; 64];
        let descriptors = message::take(self.socket.borrowed(), &mut bytes)?;
        let mut words = [0; 8];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*chunk);
        }
        Some((words, descriptors))
    }
}

/// The kernel's answer that is this error.
fn answer_of(error: Errno) -> isize {
    -(error.raw_os_error() as isize)
}
