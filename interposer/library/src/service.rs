//! The library's own threads in a process: one answers firn, the other one does what takes time.
//!
//! They begin when the process makes its first context, and are reached by a socket pair that the process has
//! with itself: firn takes the far end out of the process, which only those can do who may trace it.

use core::ffi::{c_int, c_void};
use core::mem::transmute;
use core::{ptr, time::Duration};

use firn_interposer::abi::{self, Answer, Reach, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
use rustix::thread::{gettid, nanosleep, set_name};

use crate::area::{self, Area};
use crate::message::{self, Descriptors};
use crate::{calls, elf};

type Body = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type PthreadCreate = unsafe extern "C" fn(*mut usize, *const c_void, Body, *mut c_void) -> c_int;
type PthreadSigmask = unsafe extern "C" fn(c_int, *const u64, *mut u64) -> c_int;

/// Of `pthread_sigmask`.
const SETMASK: c_int = 2;
/// Every signal but those that C libraries have for themselves, from 32 on.
const SIGNALS: u64 = !(0b111 << 31);

/// Of a descriptor: there is no other number.
const ENDS: u32 = u32::MAX >> 1;

/// One of the threads inside is looked for so often.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000,
};

const SECOND: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Starts the threads, unless this process has them.
pub fn start() {
    if area::get().is_some_and(Area::is_first) {
        // Without them the process cannot be reached, and is as without the library.
        let _ = begin();
    }
}

fn begin() -> Option<()> {
    let (near, far) = make_pair()?;
    let ends = pack(&near, &far);
    start_thread(work, ptr::null_mut())?;
    start_thread(serve, ends)?;
    // They are the thread's from now on.
    let _ = (near.into_raw_fd(), far.into_raw_fd());
    Some(())
}

fn make_pair() -> Option<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()
}

/// Starts a thread of the library's own, which gets no signals. None: there is none.
pub fn start_thread(body: Body, argument: *mut c_void) -> Option<()> {
    let create = elf::of_libc(b"pthread_create")?;
    let mask = elf::of_libc(b"pthread_sigmask")?;
    let (mut thread, mut before) = (0, 0);
    // SAFETY: the C library's functions, called as documented. The thread has its maker's mask.
    let made = unsafe {
        let create = transmute::<usize, PthreadCreate>(create);
        let mask = transmute::<usize, PthreadSigmask>(mask);
        mask(SETMASK, &SIGNALS, &mut before);
        let made = create(&mut thread, ptr::null(), body, argument);
        mask(SETMASK, &before, ptr::null_mut());
        made
    };
    (made == 0).then_some(())
}

/// Both ends in the word that a thread gets.
fn pack(near: &OwnedFd, far: &OwnedFd) -> *mut c_void {
    let [near, far] = [near, far].map(|end| end.as_raw_fd().unsigned_abs() as usize);
    ptr::without_provenance_mut(near | far << 32)
}

unsafe extern "C" fn work(_: *mut c_void) -> *mut c_void {
    let _ = set_name(c"firn-cuda-w");
    if let Some(area) = area::get() {
        loop {
            area.job.work();
        }
    }
    ptr::null_mut()
}

unsafe extern "C" fn serve(ends: *mut c_void) -> *mut c_void {
    let mut ends = ends.addr();
    let _ = set_name(c"firn-cuda");
    if let Some(area) = area::get() {
        loop {
            let (near, far) = ((ends as u32 & ENDS).cast_signed(), (ends >> 32) as u32);
            area.beacon.show(Reach {
                version: abi::VERSION,
                end: far,
                thread: gettid().as_raw_nonzero().get().unsigned_abs(),
            });
            let mut lease = Lease { area, seconds: 0 };
            while lease.serve_next(near).is_some() {}
            area.beacon.hide();
            // The program has closed its end. While memory is out it has to be reached all the same.
            match reopened(area) {
                Some(new) => ends = new,
                None => break,
            }
        }
    }
    ptr::null_mut()
}

/// A new pair, once there is one, as long as memory is out of the process. None: it is in it, and the gate
/// open.
fn reopened(area: &Area) -> Option<usize> {
    while !area.open() {
        if let Some((near, far)) = make_pair() {
            let ends = pack(&near, &far).addr();
            let _ = (near.into_raw_fd(), far.into_raw_fd());
            return Some(ends);
        }
        let _ = nanosleep(&SECOND);
    }
    None
}

/// How long the gate stays shut without a request.
struct Lease {
    area: &'static Area,
    /// Of waiting. Not by a clock: that is another one after a restore.
    seconds: u32,
}

impl Lease {
    /// Waits for a request, and answers it. None: the program has closed what it comes by.
    fn serve_next(&mut self, near: RawFd) -> Option<()> {
        // SAFETY: whether it is still the socket is looked at before anything is taken from it.
        let near = unsafe { BorrowedFd::borrow_raw(near) };
        let limit = (self.seconds > 0).then_some(&SECOND);
        let mut ends = [PollFd::new(&near, PollFlags::IN)];
        match poll(&mut ends, limit) {
            Ok(0) | Err(Errno::INTR) => self.pass(),
            Ok(_) => return self.answer(near),
            Err(_) => return None,
        }
        Some(())
    }

    /// A second has passed.
    fn pass(&mut self) {
        if self.seconds > 0 {
            self.seconds -= 1;
            if self.seconds == 0 && !self.area.open() {
                self.seconds = 1;
            }
        }
    }

    fn answer(&mut self, near: BorrowedFd<'_>) -> Option<()> {
        let mut bytes = [0; 64];
        // The program may have closed the socket and have something else by this number.
        let looked = recv(near, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        let (_, length) = looked.ok()?;
        let (number, request) = Request::of(&bytes).filter(|_| length == bytes.len())?;
        let mut descriptors = message::take(near, &mut bytes)?;
        let answer = request.map_or(Answer::Unknown, |request| self.act(request, &mut descriptors));
        let answer = match request {
            Some(Request::Attach { from, count, .. }) if answer == Answer::Done => {
                self.attached(from as usize, count as usize)
            }
            _ => answer,
        };
        let lent = match request {
            Some(Request::Lend { from, .. }) if answer == Answer::Done => {
                Some((from as usize, descriptors.iter().flatten().count()))
            }
            _ => None,
        };
        let mut reply = [0; abi::LONGEST];
        let mut length = bytes.len();
        if let Some((head, rest)) = reply.split_first_chunk_mut() {
            *head = answer.to_bytes(number);
            if let Some((from, count)) = lent {
                length += self.area.put_sizes(from, count, rest);
            }
        }
        let is_sent = reply
            .get_mut(..length)
            .is_some_and(|reply| message::send(near, reply, &descriptors));
        if let Some((from, count)) = lent.filter(|_| is_sent) {
            self.area.lend(from, count);
        }
        Some(())
    }

    /// The answer when so many pieces from this index on are mapped again.
    fn attached(&self, from: usize, count: usize) -> Answer {
        match u32::try_from(self.area.imported(from, count)) {
            Ok(0) | Err(_) => Answer::Done,
            Ok(count) => Answer::Imported { count },
        }
    }

    fn act(&mut self, request: Request, descriptors: &mut Descriptors) -> Answer {
        if self.seconds > 0 {
            self.seconds = abi::LEASE_SECONDS;
        }
        match request {
            Request::Hello => Answer::Done,
            Request::Open if self.area.open() => {
                self.area.job.clear();
                self.seconds = 0;
                Answer::Done
            }
            Request::Open => Answer::Away,
            Request::Shut { wait } => self.shut(Duration::from_millis(wait.into())),
            _ if !self.area.gate.is_shut() => Answer::Idle,
            _ => match self.until_nobody(Duration::from_millis(request.wait().into())) {
                Answer::Done => self.area.job.does(request, descriptors),
                busy => busy,
            },
        }
    }

    fn shut(&mut self, wait: Duration) -> Answer {
        if let Err(error) = self.area.gate.shut() {
            let errno = error.raw_os_error().unsigned_abs();
            return Answer::Failed { errno };
        }
        self.seconds = abi::LEASE_SECONDS;
        self.until_nobody(wait)
    }

    /// Waits until nobody is inside. One that arrives at the gate is for a moment, too.
    fn until_nobody(&self, wait: Duration) -> Answer {
        let looks = wait.as_micros() / 100;
        for _ in 0..looks {
            if self.busy() == Answer::Done {
                return Answer::Done;
            }
            let _ = nanosleep(&LOOK);
        }
        self.busy()
    }

    /// Whether a thread is inside. One that has ended inside is not.
    fn busy(&self) -> Answer {
        let mut inside = self.area.gate.busy();
        inside
            .find(|busy| !calls::is_gone(busy.tid))
            .map_or(Answer::Done, |busy| Answer::Busy {
                tid: busy.tid,
                row: busy.row,
            })
    }
}
