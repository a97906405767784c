//! What differs between processors.

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
mod this;

use core::arch::global_asm;

use crate::elf::Debug;

pub use this::{ACCEPT, BIND, CONNECT, GETSOCKNAME, RECVMSG, SENDMSG, SOCKET};
pub use this::{cell, dlsym, set_cell, system_call};

// A word of each thread, in the static block of thread-local memory: a preloaded library is there when the
// program begins.
global_asm!(
    ".section .tbss,\"awT\",@nobits",
    ".balign 8",
    ".globl firn_cell",
    ".hidden firn_cell",
    ".type firn_cell,%object",
    ".size firn_cell, 8",
    "firn_cell: .zero 8",
    ".text",
);

/// What the loader keeps for debuggers. None: it is one that keeps nothing.
pub fn debug() -> Option<&'static Debug> {
    let (gnu, musl) = this::debuggers();
    // SAFETY: glibc's is the structure itself, musl's a pointer to it. The loader has made both.
    unsafe { gnu.as_ref().or_else(|| musl.as_ref()?.as_ref()) }
}
