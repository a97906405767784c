//! Memory of another process, which stands still.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

use super::MemoryError;

/// Reads memory of a process into `buffer`. What the process itself may not read (`PROT_NONE`) is read too.
pub(super) fn read(pid: i32, at: u64, buffer: &mut [u8]) -> Result<(), MemoryError> {
    let failed = |source| MemoryError::Read { pid, at, source };
    let mut done = 0;
    while done < buffer.len() {
        let remote = remote(at, done, buffer.len()).map_err(failed)?;
        let local = &mut [IoSliceMut::new(&mut buffer[done..])];
        match process_vm_readv(Pid::from_raw(pid), local, &[remote]) {
            Ok(count) if count > 0 => done += count,
            Err(Errno::EINTR) => {}
            Ok(_) | Err(Errno::EFAULT) => return read_by_file(pid, at, buffer).map_err(failed),
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    Ok(())
}

/// Slower: page by page.
fn read_by_file(pid: i32, at: u64, buffer: &mut [u8]) -> io::Result<()> {
    File::open(format!("/proc/{pid}/mem"))?.read_exact_at(buffer, at)
}

/// Writes memory of a process.
pub(super) fn write(pid: i32, at: u64, bytes: &[u8]) -> Result<(), MemoryError> {
    let failed = |source| MemoryError::Write { pid, at, source };
    let mut done = 0;
    while done < bytes.len() {
        let remote = remote(at, done, bytes.len()).map_err(failed)?;
        match process_vm_writev(Pid::from_raw(pid), &[IoSlice::new(&bytes[done..])], &[remote]) {
            Ok(0) => return Err(failed(io::ErrorKind::WriteZero.into())),
            Ok(count) => done += count,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
    }
    Ok(())
}

/// What of a range from `at` on is left once `done` bytes of it are copied.
fn remote(at: u64, done: usize, length: usize) -> io::Result<RemoteIoVec> {
    let base = usize::try_from(at).ok().and_then(|base| base.checked_add(done));
    let base = base.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(RemoteIoVec {
        base,
        len: length - done,
    })
}

#[cfg(test)]
mod tests {
    use firn_host::Problem;

    use super::*;

    fn address(bytes: &[u8]) -> u64 {
        bytes.as_ptr().addr() as u64
    }

    #[test]
    fn memory_of_a_process_is_read_and_written() {
        let pid = std::process::id().cast_signed();
        let theirs: Vec<u8> = (0..100_000_u32).map(|n| (n % 251) as u8).collect();
        let mut ours = vec![0; theirs.len()];
        read(pid, address(&theirs), &mut ours).unwrap();
        assert_eq!(ours, theirs);
        let filled = vec![0_u8; 100_000];
        write(pid, address(&filled), &theirs).unwrap();
        assert_eq!(std::hint::black_box(&filled), &theirs);
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let pid = std::process::id().cast_signed();
        assert!(matches!(
            read(pid, 4096, &mut [0; 8]),
            Err(MemoryError::Read { .. })
        ));
        assert!(matches!(
            write(pid, 4096, &[0; 8]),
            Err(MemoryError::Write { .. })
        ));
        let lost = read(pid, 4096, &mut [0; 8]).unwrap_err();
        assert_eq!(lost.code(), "FIRN-MEMORY");
        assert!(matches!(
            read(i32::MAX, 4096, &mut [0; 8]),
            Err(MemoryError::Read { .. })
        ));
    }
}
