//! aarch64.

use core::arch::{asm, global_asm, naked_asm};

use crate::elf::Debug;
use crate::resolve;

// Of the functions that the compiler calls: the program may have others by these names.
global_asm!(
    ".hidden bcmp, memcmp, memcpy, memmove, memset, strlen",
    ".globl bcmp, memcmp, memcpy, memmove, memset, strlen",
    ".type bcmp,%function",
    ".type memcmp,%function",
    ".type memcpy,%function",
    ".type memmove,%function",
    ".type memset,%function",
    ".type strlen,%function",
    "bcmp:",
    "memcmp: mov x3, x0",
    "mov w0, wzr",
    "2: cbz x2, 3f",
    "ldrb w0, [x3], #1",
    "ldrb w4, [x1], #1",
    "sub x2, x2, #1",
    "subs w0, w0, w4",
    "b.eq 2b",
    "3: ret",
    "memmove: sub x3, x0, x1",
    "cmp x3, x2",
    "b.hs memcpy",
    // The end of what is moved lies in what is still to be moved.
    "2: cbz x2, 3f",
    "sub x2, x2, #1",
    "ldrb w3, [x1, x2]",
    "strb w3, [x0, x2]",
    "b 2b",
    "3: ret",
    "memcpy: mov x3, x0",
    "2: cbz x2, 3f",
    "ldrb w4, [x1], #1",
    "strb w4, [x3], #1",
    "sub x2, x2, #1",
    "b 2b",
    "3: ret",
    "memset: mov x3, x0",
    "2: cbz x2, 3f",
    "strb w1, [x3], #1",
    "sub x2, x2, #1",
    "b 2b",
    "3: ret",
    "strlen: mov x1, x0",
    "2: ldrb w2, [x1], #1",
    "cbnz w2, 2b",
    "sub x0, x1, x0",
    "sub x0, x0, #1",
    "ret",
);

pub const SENDMSG: usize = 211;
pub const RECVMSG: usize = 212;
pub const CONNECT: usize = 203;
pub const BIND: usize = 200;
pub const GETSOCKNAME: usize = 204;
pub const SOCKET: usize = 198;
pub const ACCEPT: usize = 242;

/// Calls the kernel. Its answer: a negative one is an error's number.
///
/// # Safety
/// As the system call.
pub unsafe fn system_call(number: usize, [first, second, third, fourth]: [usize; 4]) -> isize {
    let answer;
    // SAFETY: as the caller promises.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") first => answer,
            in("x1") second,
            in("x2") third,
            in("x3") fourth,
            options(nostack),
        );
    }
    answer
}

/// Where glibc and musl keep what is for debuggers; null for the one that is not there.
pub fn debuggers() -> (*const Debug, *const *const Debug) {
    let (gnu, musl);
    // SAFETY: it reads two words that the loader has written.
    unsafe {
        asm!(
            ".weak _r_debug, _dl_debug_addr",
            "adrp {gnu}, :got:_r_debug",
            "ldr {gnu}, [{gnu}, :got_lo12:_r_debug]",
            "adrp {musl}, :got:_dl_debug_addr",
            "ldr {musl}, [{musl}, :got_lo12:_dl_debug_addr]",
            gnu = out(reg) gnu,
            musl = out(reg) musl,
            options(nostack, readonly, preserves_flags),
        );
    }
    (gnu, musl)
}

/// The word of this thread; 0 at first.
#[inline(always)]
pub fn cell() -> usize {
    let value;
    // SAFETY: it reads this thread's word.
    unsafe {
        asm!(
            "mrs {at}, tpidr_el0",
            "adrp {offset}, :gottprel:firn_cell",
            "ldr {offset}, [{offset}, :gottprel_lo12:firn_cell]",
            "ldr {value}, [{at}, {offset}]",
            at = out(reg) _,
            offset = out(reg) _,
            value = out(reg) value,
            options(nostack, readonly, preserves_flags),
        );
    }
    value
}

/// Sets the word of this thread.
pub fn set_cell(value: usize) {
    // SAFETY: it writes this thread's word.
    unsafe {
        asm!(
            "mrs {at}, tpidr_el0",
            "adrp {offset}, :gottprel:firn_cell",
            "ldr {offset}, [{offset}, :gottprel_lo12:firn_cell]",
            "str {value}, [{at}, {offset}]",
            at = out(reg) _,
            offset = out(reg) _,
            value = in(reg) value,
            options(nostack, preserves_flags),
        );
    }
}

/// As the C library's, which sees the caller if it is the one to answer: RTLD_NEXT means what follows the
/// caller.
///
/// # Safety
/// As the C library's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym() {
    naked_asm!(
        ".cfi_startproc",
        "bti c",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        ".cfi_adjust_cfa_offset 32",
        ".cfi_offset x30, -16",
        "bl {answer}",
        "mov x16, x1",
        "mov x17, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        ".cfi_adjust_cfa_offset -32",
        ".cfi_restore x30",
        "cbz x16, 2f",
        "br x16",
        "2: mov x0, x17",
        "ret",
        ".cfi_endproc",
        answer = sym resolve::answer,
    )
}
