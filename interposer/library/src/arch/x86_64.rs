//! x86_64.

use core::arch::{asm, global_asm, naked_asm};

use crate::elf::Debug;
use crate::resolve;

// Of the functions that the compiler calls: the program may have others by these names.
global_asm!(
    ".hidden bcmp, memcmp, strlen",
    ".globl bcmp, memcmp, strlen",
    ".type bcmp,%function",
    ".type memcmp,%function",
    ".type strlen,%function",
    "bcmp:",
    "memcmp: xor eax, eax",
    "xor ecx, ecx",
    "2: cmp rcx, rdx",
    "je 3f",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "inc rcx",
    "sub eax, r8d",
    "je 2b",
    "3: ret",
    "strlen: mov rax, -1",
    "2: inc rax",
    "cmp byte ptr [rdi + rax], 0",
    "jne 2b",
    "ret",
);

/// Where glibc and musl keep what is for debuggers; null for the one that is not there.
pub fn debuggers() -> (*const Debug, *const *const Debug) {
    let (gnu, musl);
    // SAFETY: it reads two words that the loader has written.
    unsafe {
        asm!(
            ".weak _r_debug, _dl_debug_addr",
            "mov {gnu}, qword ptr [rip + _r_debug@GOTPCREL]",
            "mov {musl}, qword ptr [rip + _dl_debug_addr@GOTPCREL]",
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
        ".cfi_startproc",
        "endbr64",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 24",
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        ".cfi_adjust_cfa_offset -24",
        "test rdx, rdx",
        "jz 2f",
        "jmp rdx",
        "2: ret",
        ".cfi_endproc",
        answer = sym resolve::answer,
    )
}
