//! Children that a program with CUDA forks, as PyTorch's data loaders are forked. They have what they
//! inherit, use none of it, and end with their parents.

use std::fs::File;
use std::io::{self, Read, Write};
use std::thread;

use clap::ValueEnum;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork as fork_process, getpid, pause, pipe};

use crate::driver::Driver;
use crate::habits::end_with;

/// What a child does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Nothing
    Idle,
    /// Opens a node of the driver itself
    Opens,
    /// Forks a child of its own
    Grandchild,
    /// Forks a child of its own and ends
    Orphan,
    /// Ends, and is not reaped
    Zombie,
    /// Has two threads of its own
    Threads,
    /// Calls cuInit, which fails after a fork; ends if it does not
    Init,
    /// Has its parent's memory, as between vfork and exec
    Vfork,
}

/// Forks a child of this kind.
pub fn fork(kind: Kind, driver: &Driver) -> io::Result<()> {
    if kind == Kind::Vfork {
        thread::spawn(vfork);
        return Ok(());
    }
    let parent = getpid();
    // SAFETY: the threads of this program hold no lock that the child takes: the driver's wait for calls, and
    // the C library takes its own over the fork.
    match unsafe { fork_process() }? {
        ForkResult::Parent { child } if kind == Kind::Orphan => waitpid(child, None).map(drop)?,
        ForkResult::Parent { .. } => {}
        ForkResult::Child => {
            if kind != Kind::Orphan {
                end_with(parent);
            }
            live(kind, driver);
            // SAFETY: ends the process without running destructors, which are the parent's.
            unsafe { libc::_exit(0) }
        }
    }
    Ok(())
}

/// What a child does. It ends when this returns.
fn live(kind: Kind, driver: &Driver) {
    match kind {
        Kind::Idle | Kind::Vfork => {}
        Kind::Opens => {
            std::mem::forget(open(c"/dev/nvidiactl", OFlag::O_RDWR, Mode::empty()));
        }
        Kind::Grandchild => drop(fork(Kind::Idle, driver)),
        Kind::Orphan => {
            // Not bound to its parent, which ends.
            // SAFETY: this process has one thread.
            if let Ok(ForkResult::Parent { .. }) = unsafe { fork_process() } {
                return;
            }
        }
        Kind::Zombie => return,
        Kind::Threads => (0..2).for_each(|_| drop(thread::spawn(idle))),
        Kind::Init => {
            if driver.init().is_ok() {
                return;
            }
        }
    }
    idle()
}

fn idle() {
    loop {
        pause();
    }
}

/// Starts a process with this one's memory. This thread waits until it ends.
fn vfork() {
    extern "C" fn child(_: *mut libc::c_void) -> libc::c_int {
        let _ = prctl::set_pdeathsig(Signal::SIGKILL);
        idle();
        0
    }
    let mut stack = vec![0_u128; 4096];
    let end = stack.as_mut_ptr_range().end;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack lives as long as the child, for whose end the call waits; the child makes system
    // calls alone.
    unsafe { libc::clone(child, end.cast(), flags, std::ptr::null_mut()) };
}

/// Forks so many children that do nothing, and waits for ever. For a program that uses no CUDA.
pub fn serve(count: usize) -> io::Result<()> {
    let parent = getpid();
    for _ in 0..count {
        // SAFETY: this process has one thread.
        if let ForkResult::Child = unsafe { fork_process() }? {
            end_with(parent);
            break;
        }
    }
    idle();
    Ok(())
}

/// Children that answer over pipes.
pub struct Pool(Vec<(File, File)>);

impl Pool {
    /// Forks so many. Each inherits the pipes of those before it, too.
    pub fn fork(count: usize) -> io::Result<Self> {
        let mut pool = Self(Vec::new());
        let parent = getpid();
        for _ in 0..count {
            let ((requests, to), (from, answers)) = (pipe()?, pipe()?);
            // SAFETY: as in `fork`.
            match unsafe { fork_process() }? {
                ForkResult::Parent { .. } => pool.0.push((to.into(), from.into())),
                ForkResult::Child => {
                    end_with(parent);
                    let (mut requests, mut answers) = (File::from(requests), File::from(answers));
                    let mut request = [0; 4];
                    while requests.read_exact(&mut request).is_ok() && answers.write_all(&request).is_ok() {}
                    // SAFETY: as in `fork`.
                    unsafe { libc::_exit(1) }
                }
            }
        }
        Ok(pool)
    }

    /// Sends all the number of an iteration, and waits until each has sent it back.
    pub fn answer(&mut self, iteration: u32) -> io::Result<()> {
        let request = iteration.to_le_bytes();
        for (to, _) in &mut self.0 {
            to.write_all(&request)?;
        }
        for (_, from) in &mut self.0 {
            let mut answer = [0; 4];
            from.read_exact(&mut answer)?;
            if answer != request {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
        Ok(())
    }
}
