//! System calls without a safe wrapper.
#![allow(unsafe_code)]

use nix::libc;

/// `KCMP_FILE`, `KCMP_VM` and `KCMP_FILES` of `linux/kcmp.h`.
const KCMP_FILE: libc::c_int = 0;
const KCMP_VM: libc::c_int = 1;
const KCMP_FILES: libc::c_int = 2;

/// Whether descriptor `a.1` of process `a.0` and `b.1` of `b.0` are the same open file. `false` if a process
/// or a descriptor does not exist, or may not be compared.
pub(crate) fn is_same_file(a: (i32, i32), b: (i32, i32)) -> bool {
    is_same(KCMP_FILE, (a.0, b.0), (a.1, b.1))
}

/// Whether two processes have the same memory, not copies of it. `false` if one does not exist, or may not be
/// compared.
pub(crate) fn is_same_memory(a: i32, b: i32) -> bool {
    is_same(KCMP_VM, (a, b), (0, 0))
}

/// Whether two threads have one table of descriptors together. `false` if one does not exist, or may not be
/// compared.
pub(crate) fn is_same_table(a: i32, b: i32) -> bool {
    is_same(KCMP_FILES, (a, b), (0, 0))
}

fn is_same(kind: libc::c_int, pids: (i32, i32), numbers: (i32, i32)) -> bool {
    let (a, b) = (libc::c_long::from(numbers.0), libc::c_long::from(numbers.1));
    // SAFETY: kcmp takes numbers and writes no memory.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, pids.0, pids.1, kind, a, b) };
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
        let is_same = |a: &File, b: &File| is_same_file((me, a.as_raw_fd()), (me, b.as_raw_fd()));
        assert!(is_same(&one, &same));
        assert!(!is_same(&one, &other));
        assert!(!is_same_file((me, one.as_raw_fd()), (me, 1 << 20)));
        assert!(!is_same_file((me, one.as_raw_fd()), (i32::MAX, 0)));
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
