//! The restore thread: serves callers in other processes, one at a time.
//!
//! ```text
//!            lock                checkpoint
//!  running ───────▶ locked ─────────────────▶ checkpointed
//!     ▲    unlock     │ ▲        restore           │
//!     └───────────────┘ └──────────────────────────┘
//! ```
//! Every failure leaves the process in the state that it was in. A request whose caller is gone when its turn
//! comes is dropped; a lock that waits for the GPU stays, and one that has begun to move memory is finished.

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use simgpu_model::Uuid;

use crate::driver::{self, Driver};
use crate::error::{Error, answer};
use crate::event::Handshake;
use crate::process::State;
use crate::transfer;
use crate::wire::{self, Request};

/// See the module head.
pub(crate) struct Service {
    near: OwnedFd,
    /// What callers take a copy of; named by this thread's name.
    far: OwnedFd,
    handshake: Handshake,
}

impl Service {
    /// Makes the channel and starts the event thread.
    pub(crate) fn new(token: u64) -> io::Result<Self> {
        let (near, far) = wire::socket_pair()?;
        let handshake = Handshake::start()?;
        handshake.show(token);
        let service = Self { near, far, handshake };
        service.show(State::Running);
        Ok(service)
    }

    /// What callers send requests to.
    pub(crate) fn channel(&self) -> io::Result<OwnedFd> {
        self.far.try_clone()
    }

    /// Serves callers for the life of the process.
    pub(crate) fn serve(mut self, driver: &Driver) {
        loop {
            let (bytes, connection) = match wire::receive_with(&self.near) {
                Ok(message) => message,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    eprintln!("simgpu: the restore thread ends: {error}");
                    return;
                }
            };
            let Some(connection) = connection.filter(|connection| !wire::hung_up(connection)) else {
                continue;
            };
            let code = answer(|| match Request::decode(&bytes).ok_or(Error::INVALID_VALUE)? {
                Request::Lock { timeout_ms } => self.lock(driver, &connection, timeout_ms),
                Request::Checkpoint { slow_ms } => checkpoint(driver, slow_ms),
                Request::Restore { slow_ms, pairs } => self.restore(driver, slow_ms, &pairs),
                Request::Unlock => unlock(driver),
                // The answer is in this thread's name; that it comes shows that the thread can run.
                Request::State => Ok(()),
                Request::Init => self.init(driver),
            });
            self.show(driver.process().state);
            // A caller that is gone by now reads the state back some other time.
            let _ = wire::send(&connection, &code.to_le_bytes());
        }
    }

    /// The wait for the application's threads ignores the timeout, as the driver does; the wait for calls
    /// and work of the GPU under way keeps it. Whoever asks for the state waits meanwhile.
    fn lock(&mut self, driver: &Driver, connection: &OwnedFd, timeout_ms: u32) -> Result<(), Error> {
        require(driver, State::Running)?;
        if !self.handshake.wait(connection).map_err(|_| Error::UNKNOWN)? {
            return Err(Error::NOT_READY);
        }
        let timeout = Duration::from_millis(timeout_ms.into());
        let deadline = (timeout_ms > 0).then(|| Instant::now() + timeout);
        // From here on it stays, also when its caller is killed, until it succeeds or its time is over: so
        // seen on an H100.
        let give_up = || {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                Err(Error::NOT_READY)
            } else {
                Ok(())
            }
        };
        driver.gate.close(|| driver.waits.is_empty(), give_up)?;
        driver.process().state = State::Locked;
        Ok(())
    }

    /// By the process itself, which waits.
    fn init(&self, driver: &Driver) -> Result<(), Error> {
        let token = driver::initialise(&mut driver.process())?;
        self.handshake.show(token);
        Ok(())
    }

    fn restore(&self, driver: &Driver, slow_ms: u32, pairs: &[(Uuid, Uuid)]) -> Result<(), Error> {
        require(driver, State::Checkpointed)?;
        thread::sleep(Duration::from_millis(slow_ms.into()));
        // Two processes restored from one image must not own memory under one token.
        let token = fresh_token().map_err(|_| Error::UNKNOWN)?;
        transfer::restore(&mut driver.process(), pairs, token)?;
        self.handshake.show(token);
        Ok(())
    }

    /// Shows the channel and the state in this thread's name.
    fn show(&self, state: State) {
        let comm = simgpu_model::service_comm(self.far.as_raw_fd(), state as i32);
        if let Err(error) = std::fs::write("/proc/thread-self/comm", comm) {
            eprintln!("simgpu: cannot name the restore thread: {error}");
        }
    }
}

/// A copy that takes its time is ended whatever becomes of its caller, and whoever asks for the state waits
/// for that: so seen on an H100 and an H200.
fn checkpoint(driver: &Driver, slow_ms: u32) -> Result<(), Error> {
    require(driver, State::Locked)?;
    thread::sleep(Duration::from_millis(slow_ms.into()));
    transfer::checkpoint(&mut driver.process())
}

fn unlock(driver: &Driver) -> Result<(), Error> {
    require(driver, State::Locked)?;
    driver.process().state = State::Running;
    driver.gate.open();
    Ok(())
}

/// The documentation asks for the state; the answer in another state was not measured.
fn require(driver: &Driver, state: State) -> Result<(), Error> {
    if driver.process().state == state {
        Ok(())
    } else {
        Err(Error::ILLEGAL_STATE)
    }
}

/// An owner token: 44 random bits, not zero.
pub(crate) fn fresh_token() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok((u64::from_le_bytes(bytes) >> 20) | 1)
}

/// While it lives, threads that are started take no signal of the application.
pub(crate) struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    pub(crate) fn new() -> Self {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the set is memory of the right type, given to be filled.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: both sets live through the call; `all` is filled.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: zeroed is a valid set, and the call has put the former mask there.
        Self(unsafe { before.assume_init() })
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set lives through the call.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}
