//! The event thread: answers the restore thread's handshake and takes connections to the process's UVM
//! socket.

use std::ffi::CString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::thread;

use crate::wire;

/// The restore thread's end of the handshake.
pub(crate) struct Handshake {
    socket: OwnedFd,
    tid: i32,
    sent: u64,
}

impl Handshake {
    /// Starts the event thread.
    pub(crate) fn start() -> io::Result<Self> {
        let (near, far) = wire::socket_pair()?;
        let (sender, tid) = std::sync::mpsc::channel();
        thread::Builder::new().spawn(move || run(&far, &sender))?;
        let tid = tid.recv().map_err(io::Error::other)?;
        Ok(Self {
            socket: near,
            tid,
            sent: 0,
        })
    }

    /// Names the event thread after the process's owner token.
    pub(crate) fn show(&self, token: u64) {
        let path = format!("/proc/self/task/{}/comm", self.tid);
        if let Err(error) = fs::write(&path, simgpu_model::token_comm(token)) {
            eprintln!("simgpu: cannot write {path}: {error}");
        }
    }

    /// Waits until the event thread has run. False when the caller behind `connection` went away first.
    pub(crate) fn wait(&mut self, connection: &OwnedFd) -> io::Result<bool> {
        self.sent += 1;
        wire::send(&self.socket, &self.sent.to_le_bytes())?;
        loop {
            let events = wire::wait_any(&[connection, &self.socket], -1)?;
            if events[1] != 0 {
                let seen = wire::receive::<8>(&self.socket)?.ok_or(io::ErrorKind::UnexpectedEof)?;
                // Answers to handshakes given up before may still come.
                if u64::from_le_bytes(seen) == self.sent {
                    return Ok(true);
                }
            } else if events[0] & libc::POLLHUP != 0 {
                return Ok(false);
            }
        }
    }
}

fn run(handshake: &OwnedFd, sender: &Sender<i32>) {
    // SAFETY: no arguments, cannot fail.
    let tid = unsafe { libc::gettid() };
    if sender.send(tid).is_err() {
        return;
    }
    let listener = listen()
        .inspect_err(|error| eprintln!("simgpu: no UVM socket: {error}"))
        .ok();
    let sockets: Vec<&OwnedFd> = std::iter::once(handshake).chain(listener.as_ref()).collect();
    while let Ok(events) = wire::wait_any(&sockets, -1) {
        if events[0] != 0 {
            match wire::receive::<8>(handshake) {
                Ok(Some(seen)) if wire::send(handshake, &seen).is_ok() => {}
                _ => return,
            }
        }
        if let (Some(listener), Some(1..)) = (&listener, events.get(1)) {
            // SAFETY: no address is asked for.
            let fd = unsafe {
                libc::accept4(
                    listener.as_raw_fd(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    libc::SOCK_CLOEXEC,
                )
            };
            if fd >= 0 {
                // SAFETY: accept4 has just made this descriptor; nothing is sent on it, so it is closed at
                // once.
                drop(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
    }
}

/// Listens on `@cuda-uvmfd-<pid namespace>-<pid>`, as every CUDA process does.
fn listen() -> io::Result<OwnedFd> {
    let link = fs::read_link("/proc/self/ns/pid")?;
    let namespace: String = link
        .to_string_lossy()
        .chars()
        .filter(char::is_ascii_digit)
        .collect();
    let name = CString::new(format!("cuda-uvmfd-{namespace}-{}", std::process::id()))?;
    // SAFETY: no pointers are involved.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: socket has just made this descriptor.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: a sockaddr_un of zeroes is valid.
    let mut address: libc::sockaddr_un = unsafe { MaybeUninit::zeroed().assume_init() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).map_err(io::Error::other)?;
    // The first byte stays zero: an abstract name.
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.as_bytes()) {
        *to = from.cast_signed();
    }
    let len = size_of::<libc::sa_family_t>() + 1 + name.as_bytes().len();
    let len = libc::socklen_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: the address lives through the call and is longer than `len`.
    if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no pointers are involved.
    match unsafe { libc::listen(socket.as_raw_fd(), 8) } {
        0 => Ok(socket),
        _ => Err(io::Error::last_os_error()),
    }
}
