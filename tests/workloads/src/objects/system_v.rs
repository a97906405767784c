//! Objects of System V.
#![allow(unsafe_code)]

use std::io;
use std::ptr;

use nix::libc::{self, c_int};

use super::{BYTE, Look};

fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// A page.
pub(super) fn shared_memory() -> io::Result<Look> {
    // SAFETY: it takes numbers.
    let id = checked(unsafe { libc::shmget(libc::IPC_PRIVATE, 4096, 0o600) })?;
    // SAFETY: the kernel chooses the address, where nothing is.
    let memory = unsafe { libc::shmat(id, ptr::null(), 0) };
    if memory.addr() == usize::MAX {
        return Err(io::Error::last_os_error());
    }
    let byte = memory.cast::<u8>();
    // SAFETY: it is attached for good, and nobody else has it.
    unsafe { byte.write_volatile(BYTE) };
    Ok(Box::new(move || {
        let mut state = std::mem::MaybeUninit::<libc::shmid_ds>::uninit();
        // SAFETY: it fills in what `state` has the room for.
        checked(unsafe { libc::shmctl(id, libc::IPC_STAT, state.as_mut_ptr()) })?;
        // SAFETY: as above.
        let now = unsafe { byte.read_volatile() };
        // SAFETY: the kernel has filled it in.
        let users = unsafe { state.assume_init() }.shm_nattch;
        Ok(now == BYTE && users == 1)
    }))
}

pub(super) fn semaphore() -> io::Result<Look> {
    // SAFETY: it takes numbers.
    let id = checked(unsafe { libc::semget(libc::IPC_PRIVATE, 1, 0o600) })?;
    // SAFETY: the fourth argument of SETVAL is a number.
    checked(unsafe { libc::semctl(id, 0, libc::SETVAL, 7) })?;
    Ok(Box::new(move || {
        // SAFETY: GETVAL has no fourth argument.
        let value = unsafe { libc::semctl(id, 0, libc::GETVAL) };
        Ok(value == 7)
    }))
}

/// As the kernel has it.
#[repr(C)]
struct Message {
    kind: libc::c_long,
    text: u8,
}

pub(super) fn message_queue() -> io::Result<Look> {
    // SAFETY: it takes numbers.
    let id = checked(unsafe { libc::msgget(libc::IPC_PRIVATE, 0o600) })?;
    let send = move || {
        let message = Message { kind: 1, text: BYTE };
        // SAFETY: it reads the kind and one byte, which `message` has.
        checked(unsafe { libc::msgsnd(id, ptr::from_ref(&message).cast(), 1, libc::IPC_NOWAIT) })
    };
    send()?;
    Ok(Box::new(move || {
        let mut message = Message { kind: 0, text: 0 };
        let into = ptr::from_mut(&mut message).cast();
        // SAFETY: it writes the kind and one byte at most.
        let read = unsafe { libc::msgrcv(id, into, 1, 0, libc::IPC_NOWAIT) };
        send()?;
        Ok(read == 1 && message.text == BYTE)
    }))
}
