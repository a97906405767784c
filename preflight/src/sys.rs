//! System calls without a safe wrapper.
#![allow(unsafe_code)]

use nix::libc;

/// `KCMP_FILE`, `KCMP_VM` and `KCMP_FILES` of `linux/kcmp.h`.
const KCMP_FILE: libc::c_int = 0;
const KCMP_VM: libc::c_int = 1;
const KCMP_FILES: libc::c_int = 2;

/// The I/O priority of a thread, as the kernel has it: class and level. `None` if it has gone.
pub(crate) fn io_priority(tid: i32) -> Option<i32> {
    /// `IOPRIO_WHO_PROCESS` of `linux/ioprio.h`.
    const PROCESS: libc::c_int = 1;
    // SAFETY: it takes numbers.
    let value = unsafe { libc::syscall(libc::SYS_ioprio_get, PROCESS, tid) };
    i32::try_from(value).ok().filter(|value| *value >= 0)
}

/// A descriptor of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub pid: i32,
    pub number: i32,
}

impl Descriptor {
    /// The process alone.
    fn none_of(pid: i32) -> Self {
        Self { pid, number: 0 }
    }
}

/// Whether two descriptors are the same open file. `false` if a process or a descriptor does not exist, or
/// may not be compared.
pub(crate) fn is_same_file(a: Descriptor, b: Descriptor) -> bool {
    is_same(KCMP_FILE, a, b)
}

/// Whether two processes have the same memory, not copies of it. `false` if one does not exist, or may not be
/// compared.
pub(crate) fn is_same_memory(a: i32, b: i32) -> bool {
    is_same(KCMP_VM, Descriptor::none_of(a), Descriptor::none_of(b))
}

/// Whether two threads have one table of descriptors together. `false` if one does not exist, or may not be
/// compared.
pub(crate) fn is_same_table(a: i32, b: i32) -> bool {
    is_same(KCMP_FILES, Descriptor::none_of(a), Descriptor::none_of(b))
}

fn is_same(kind: libc::c_int, a: Descriptor, b: Descriptor) -> bool {
    let numbers = [a, b].map(|descriptor| libc::c_long::from(descriptor.number));
    // SAFETY: kcmp takes numbers and writes no memory.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, a.pid, b.pid, kind, numbers[0], numbers[1]) };
    order == 0
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_duplicate_is_the_same_file_and_a_second_open_is_not() {
        let me = i32::try_from(std::process::id()).unwrap();
        let open = || File::open("/dev/null").unwrap();
        let (one, other) = (open(), open());
        let same = one.try_clone().unwrap();
        let of = |pid: i32, number: i32| Descriptor { pid, number };
        let is_same = |a: &File, b: &File| is_same_file(of(me, a.as_raw_fd()), of(me, b.as_raw_fd()));
        assert!(is_same(&one, &same));
        assert!(!is_same(&one, &other));
        assert!(!is_same_file(of(me, one.as_raw_fd()), of(me, 1 << 20)));
        assert!(!is_same_file(of(me, one.as_raw_fd()), of(i32::MAX, 0)));
    }

    #[test]
    fn another_program_has_other_memory() {
        let me = i32::try_from(std::process::id()).unwrap();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(other.id()).unwrap();
        assert!(is_same_memory(me, me));
        assert!(!is_same_memory(me, pid));
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(!is_same_memory(me, pid));
    }
}
