//! x86_64.

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
    "memmove: mov rax, rdi",
    "sub rax, rsi",
    "cmp rax, rdx",
    "jae memcpy",
    // The end of what is moved lies in what is still to be moved.
    "mov rax, rdi",
    "mov rcx, rdx",
    "lea rdi, [rdi + rdx - 1]",
    "lea rsi, [rsi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "memcpy: mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    "memset: mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "strlen: mov rax, -1",
    "2: inc rax",
    "cmp byte ptr [rdi + rax], 0",
    "jne 2b",
    "ret",
);

pub const SENDMSG: usize = 46;
pub const RECVMSG: usize = 47;
pub const CONNECT: usize = 42;
pub const BIND: usize = 49;
pub const GETSOCKNAME: usize = 51;
pub const SOCKET: usize = 41;
pub const ACCEPT: usize = 288;

/// Calls the kernel. Its answer: a negative one is an error's number.
///
/// # Safety
/// As the system call.
pub unsafe fn system_call(number: usize, [first, second, third, fourth]: [usize; 4]) -> isize {
    let answer;
    // SAFETY: as the caller promises.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => answer,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            out("rcx") _,
            out("r11") _,
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
