//! aarch64.

use core::arch::{asm, naked_asm};

use crate::resolve;

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
        "bti c",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {answer}",
        "mov x16, x1",
        "mov x17, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "cbz x16, 2f",
        "br x16",
        "2: mov x0, x17",
        "ret",
        answer = sym resolve::answer,
    )
}
