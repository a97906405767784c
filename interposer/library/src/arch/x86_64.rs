//! x86_64.

use core::arch::{asm, naked_asm};

use crate::resolve;

/// The word of this thread; 0 at first.
#[inline(always)]
pub fn cell() -> usize {
    let value;
    // SAFETY: it reads this thread's word.
    unsafe {
        asm!(
            "mov {at}, qword ptr [rip + firn_cell@GOTTPOFF]",
            "mov {value}, qword ptr fs:[{at}]",
            at = out(reg) _,
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
            "mov {at}, qword ptr [rip + firn_cell@GOTTPOFF]",
            "mov qword ptr fs:[{at}], {value}",
            at = out(reg) _,
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
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "jz 2f",
        "jmp rdx",
        "2: ret",
        answer = sym resolve::answer,
    )
}
