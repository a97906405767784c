//! What the library does with the driver for firn, in a thread of its own: the driver may take its time, and
//! the thread that answers firn must not wait for it.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use firn_interposer::abi::{Answer, PIECES, Request};
use rustix::event::Timespec;
use rustix::fd::{FromRawFd, IntoRawFd, OwnedFd};
use rustix::thread::futex;

use crate::area;
use crate::driver::{SUCCESS, Status};
use crate::memory::moving;
use crate::message::{Descriptors, NONE};

const IDLE: u32 = 0;
const GIVEN: u32 = 1;
const DONE: u32 = 2;

/// It is looked for the end so often.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
const LOOK_MILLISECONDS: u32 = 10;

/// One piece of work at a time. Of zero bytes there is none.
#[repr(C)]
pub struct Job {
    state: AtomicU32,
    kind: AtomicU32,
    from: AtomicU32,
    count: AtomicU32,
    status: AtomicI32,
    /// Nobody waits for its end any more.
    is_unawaited: AtomicBool,
    /// One more than each descriptor that goes with it; 0: none.
    descriptors: [AtomicI32; PIECES as usize],
}

impl Job {
    /// Has a request done, and waits for its end as long as it may take. Descriptors that come with it are
    /// the job's; those that it has made are there when it is done.
    pub fn does(&self, request: Request, descriptors: &mut Descriptors) -> Answer {
        let (kind, from, count) = match request {
            Request::Rehearse { .. } => (0, 0, 0),
            Request::Lend { from, count, .. } => (1, from, count),
            Request::Detach { .. } => (2, 0, 0),
            Request::Attach { from, count, .. } => (3, from, count),
            Request::Hello | Request::Open | Request::Shut { .. } => return Answer::Unknown,
        };
        let is_moving = matches!(request, Request::Detach { .. } | Request::Attach { .. });
        self.clear();
        if self.state.load(Ordering::Acquire) != IDLE {
            return Answer::Working;
        }
        // Before it begins: the gate is not to open in between. It is looked at when it is done.
        if let Some(area) = area::get().filter(|_| is_moving) {
            area.is_away.store(true, Ordering::SeqCst);
        }
        self.kind.store(kind, Ordering::Relaxed);
        self.from.store(from, Ordering::Relaxed);
        self.count.store(count.min(PIECES), Ordering::Relaxed);
        self.give(descriptors);
        self.is_unawaited.store(false, Ordering::Relaxed);
        self.state.store(GIVEN, Ordering::Release);
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, 1);
        for _ in 0..request.wait().div_ceil(LOOK_MILLISECONDS) {
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, GIVEN, Some(&LOOK));
            if self.state.load(Ordering::Acquire) == DONE {
                break;
            }
        }
        if self.state.load(Ordering::Acquire) != DONE {
            self.is_unawaited.store(true, Ordering::SeqCst);
            // It may have ended just now, without having seen this.
            self.clear();
            return Answer::Working;
        }
        let status = self.status.load(Ordering::Relaxed);
        *descriptors = self.taken();
        self.state.store(IDLE, Ordering::Release);
        if status == SUCCESS {
            Answer::Done
        } else {
            let status = status.cast_unsigned();
            Answer::Refused { status }
        }
    }

    fn give(&self, descriptors: &mut Descriptors) {
        for (place, descriptor) in self.descriptors.iter().zip(descriptors) {
            let number = descriptor
                .take()
                .map_or(0, |descriptor| descriptor.into_raw_fd() + 1);
            place.store(number, Ordering::Relaxed);
        }
    }

    fn taken(&self) -> Descriptors {
        let mut taken = NONE;
        for (place, taken) in self.descriptors.iter().zip(&mut taken) {
            let number = place.swap(0, Ordering::Relaxed);
            // SAFETY: it was put there as one of its own.
            *taken = (number > 0).then(|| unsafe { OwnedFd::from_raw_fd(number - 1) });
        }
        taken
    }

    /// Waits for the next piece of work, and does it.
    pub fn work(&self) {
        while self.state.load(Ordering::Acquire) != GIVEN {
            let state = self.state.load(Ordering::Acquire);
            if state != GIVEN {
                let _ = futex::wait(&self.state, futex::Flags::PRIVATE, state, None);
            }
        }
        let from = self.from.load(Ordering::Relaxed) as usize;
        let count = self.count.load(Ordering::Relaxed) as usize;
        let mut descriptors = self.taken();
        let status = match self.kind.load(Ordering::Relaxed) {
            0 => moving::rehearse(),
            1 => moving::lend(from, count, &mut descriptors),
            2 => moving::detach(),
            _ => moving::attach(from, count, &mut descriptors),
        };
        self.finish(status, &mut descriptors);
    }

    fn finish(&self, status: Status, descriptors: &mut Descriptors) {
        if !self.is_unawaited.load(Ordering::SeqCst) {
            self.give(descriptors);
        }
        if let Some(area) = area::get() {
            area.look();
        }
        self.status.store(status, Ordering::Relaxed);
        self.state.store(DONE, Ordering::SeqCst);
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, 1);
    }

    /// Closes what a job has made for whom nobody waits.
    pub fn clear(&self) {
        if self.state.load(Ordering::SeqCst) == DONE {
            drop(self.taken());
            self.state.store(IDLE, Ordering::Release);
        }
    }
}
