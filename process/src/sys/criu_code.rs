//! A process whose first thread is in code that CRIU has put into it, for tests of what ends it.

use super::*;

const PAGE: usize = 4096;
/// Where the code reads to, in its own mapping.
const BUFFER: usize = 2048;
/// Where its sigreturn is.
const RETURN: usize = 1024;
const SA_RESTORER: u64 = 0x0400_0000;

/// The kernel's `sigaction`.
#[repr(C)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

/// Memory that the code protects before it returns.
pub struct InCriuCode(usize);

impl InCriuCode {
    /// Sends the first thread of this process into the code. There it waits for the end of standard input,
    /// makes memory inaccessible that is so already, and returns by sigreturn. As CRIU's does when its pages
    /// are not read any more, it gets a SIGPIPE, which is blocked.
    pub fn enter() -> Self {
        // SAFETY: the default action is a valid one.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let memory = Self(mapped(
            libc::PROT_NONE,
            libc::MAP_ANONYMOUS | libc::MAP_PRIVATE,
            0,
            -1,
        ));
        let at = mapped_code();
        // SAFETY: the mapping has a page, of which nothing else knows yet.
        let page = unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(at), PAGE) };
        let code = memory.code(at + BUFFER);
        page[..code.len()].copy_from_slice(&code);
        // mov eax, SYS_rt_sigreturn; syscall
        let back = [0xb8, 15, 0, 0, 0, 0x0f, 0x05];
        page[RETURN..RETURN + back.len()].copy_from_slice(&back);
        let action = Action {
            handler: at,
            flags: SA_RESTORER,
            restorer: at + RETURN,
            mask: u64::MAX,
        };
        let none = std::ptr::null::<Action>();
        // SAFETY: the action has the kernel's layout and outlives the call; its handler changes only memory
        // of this value.
        let rc = unsafe { libc::syscall(libc::SYS_rt_sigaction, libc::SIGUSR1, &raw const action, none, 8) };
        Errno::result(rc).unwrap();
        signal_first_thread(libc::SIGUSR1);
        let pid = getpid();
        let waits = || std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
        while !waits().starts_with("0 0x0 ") {
            std::thread::yield_now();
        }
        memory
    }

    /// Maps other memory there, which can be written.
    pub fn map(&self) {
        let flags = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_FIXED;
        mapped(libc::PROT_READ | libc::PROT_WRITE, flags, self.0, -1);
    }

    /// From now on the first thread runs for ever, in code of the application.
    pub fn spin() {
        extern "C" fn spin(_: i32) {
            loop {
                std::hint::spin_loop();
            }
        }
        let handler = spin as *const () as usize;
        // SAFETY: the handler touches no memory.
        unsafe { libc::signal(libc::SIGUSR2, handler) };
        signal_first_thread(libc::SIGUSR2);
    }

    pub fn write(&self) {
        // SAFETY: the page belongs to this value. That it may be protected is what a test looks for.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(self.0).write_volatile(1) };
    }

    /// Reads a byte of standard input to `buffer`, and protects the memory.
    fn code(&self, buffer: usize) -> Vec<u8> {
        let mut code = vec![
            0x31, 0xc0, // xor eax, eax: SYS_read
            0x31, 0xff, // xor edi, edi
            0x48, 0xbe, // mov rsi, buffer
        ];
        code.extend(buffer.to_le_bytes());
        code.extend([
            0xba, 1, 0, 0, 0, // mov edx, 1
            0x0f, 0x05, // syscall
            0x48, 0xbf, // mov rdi, memory
        ]);
        code.extend(self.0.to_le_bytes());
        code.extend([
            0xbe, 0, 0x10, 0, 0, // mov esi, PAGE
            0x31, 0xd2, // xor edx, edx: PROT_NONE
            0xb8, 10, 0, 0, 0, // mov eax, SYS_mprotect
            0x0f, 0x05, // syscall
            0xbf, // mov edi, the first thread
        ]);
        code.extend(getpid().as_raw().to_le_bytes());
        code.extend([
            0xbe, 13, 0, 0, 0, // mov esi, SIGPIPE
            0xb8, 200, 0, 0, 0, // mov eax, SYS_tkill
            0x0f, 0x05, // syscall
            0xc3, // ret
        ]);
        code
    }
}

fn signal_first_thread(signal: i32) {
    let pid = getpid().as_raw();
    // SAFETY: the call takes numbers.
    Errno::result(unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, signal) }).unwrap();
}

/// A page of the file that CRIU uses, which can be written and executed.
fn mapped_code() -> usize {
    // SAFETY: the name is a string that ends with a zero.
    let file = Errno::result(unsafe { libc::memfd_create(c"CRIUMFD".as_ptr(), 0) }).unwrap();
    // SAFETY: the descriptor is new, and nobody else has it.
    let file = unsafe { std::fs::File::from_raw_fd(file) };
    file.set_len(PAGE as u64).unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    mapped(protection, libc::MAP_SHARED, 0, file.as_raw_fd())
}

fn mapped(protection: i32, flags: i32, at: usize, fd: RawFd) -> usize {
    let at = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: the kernel chooses where nothing else is, or replaces a mapping of the value that asks for it.
    let mapped = unsafe { libc::mmap(at, PAGE, protection, flags, fd, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.expose_provenance()
}
