//! What the worker needs from the process and the dynamic linker that has no safe form.
//!
//! A library once opened stays open until the process ends, so pointers to its functions never dangle.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// A driver library that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The dynamic linker did not find or accept the library.
    #[error("cannot open {library}")]
    Open {
        library: &'static str,
        #[source]
        source: libloading::Error,
    },
    /// The library lacks a function that every supported version has.
    #[error("{library} has no {symbol}")]
    Symbol {
        library: &'static str,
        symbol: &'static str,
        #[source]
        source: libloading::Error,
    },
}

/// A library of the driver, open until the process ends.
#[derive(Clone, Copy)]
pub(crate) struct Library {
    name: &'static str,
    handle: &'static libloading::Library,
}

impl Library {
    /// Opens `name` as the dynamic linker finds it.
    pub(crate) fn open(name: &'static str) -> Result<Self, LoadError> {
        // SAFETY: opening runs the library's initialisers. `name` is one of the two libraries of NVIDIA's
        // user mode driver, whose initialisers make no demand on the process, and no code here relies on
        // anything they may set.
        let opened = unsafe { libloading::Library::new(name) };
        let handle = opened.map_err(|source| LoadError::Open {
            library: name,
            source,
        })?;
        Ok(Self {
            name,
            handle: Box::leak(Box::new(handle)),
        })
    }

    /// The function `symbol` as a pointer of type `T`.
    ///
    /// # Safety
    /// `T` must be the `extern "C"` function pointer type that the library's header gives `symbol`.
    pub(crate) unsafe fn symbol<T: Copy>(self, symbol: &'static str) -> Result<T, LoadError> {
        // SAFETY: the caller vouches for the type; the pointer is good for ever because the library is never
        // closed.
        let found = unsafe { self.handle.get::<T>(symbol) };
        found.map(|pointer| *pointer).map_err(|source| LoadError::Symbol {
            library: self.name,
            symbol,
            source,
        })
    }
}

/// A table of functions of a library, as its header declares them: those that every supported version has,
/// and those that old versions lack.
macro_rules! functions {
    (
        $(#[$doc:meta])*
        $table:ident -> $result:ty;
        required { $($name:ident = $symbol:ident($($argument:ty),*);)* }
        optional { $($option:ident = $lacking:ident($($parameter:ty),*);)* }
    ) => {
        $(#[$doc])*
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(super) $option: Option<unsafe extern "C" fn($($parameter),*) -> $result>,)*
        }

        impl $table {
            /// Fails with the first required function that is missing.
            pub(super) fn load(library: $crate::sys::Library) -> Result<Self, $crate::sys::LoadError> {
                Ok(Self {
                    // SAFETY: who uses the macro declares the functions as the library's header does.
                    $($name: unsafe { library.symbol(stringify!($symbol)) }?,)*
                    // SAFETY: as above.
                    $($option: unsafe { library.symbol(stringify!($lacking)) }.ok(),)*
                })
            }
        }
    };
}

pub(crate) use functions;

/// The socket that whoever started this process left open as descriptor `fd`.
///
/// `fd` itself stays open, closed on exec: the stream is a duplicate, so that nothing else can own what it
/// owns.
pub(crate) fn inherited_socket(fd: RawFd) -> io::Result<UnixStream> {
    // SAFETY: `fd` is positive, and nothing in this process closes it; the kernel refuses one that is not
    // open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let socket = UnixStream::from(fd.try_clone_to_owned()?);
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    // Fails when this is no socket.
    socket.local_addr()?;
    Ok(socket)
}

/// Ends the process without the exit handlers that the driver's libraries registered.
///
/// They wait for calls that other threads still have in the driver, and the worker ends exactly when such
/// calls hang.
pub(crate) fn leave(code: u8) -> ! {
    // SAFETY: _exit has no precondition; nothing buffered is lost because callers flush what they print.
    unsafe { libc::_exit(i32::from(code)) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};

    use super::*;

    #[test]
    fn a_missing_library_and_a_missing_symbol_are_named() {
        let error = Library::open("libfirn-has-no-such.so.1").err().unwrap();
        assert_eq!(error.to_string(), "cannot open libfirn-has-no-such.so.1");
        let libc = Library::open("libc.so.6").unwrap();
        // SAFETY: the pointer is not called.
        let error = unsafe { libc.symbol::<extern "C" fn()>("cuNoSuchCall") }.unwrap_err();
        assert_eq!(error.to_string(), "libc.so.6 has no cuNoSuchCall");
    }

    #[test]
    fn the_stream_is_the_inherited_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut stream = inherited_socket(theirs.as_raw_fd()).unwrap();
        stream.write_all(b"x").unwrap();
        let mut byte = [0];
        (&ours).read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        let flags = FdFlag::from_bits_retain(fcntl(&theirs, FcntlArg::F_GETFD).unwrap());
        assert!(flags.contains(FdFlag::FD_CLOEXEC));
    }

    #[test]
    fn what_is_not_open_or_no_socket_is_refused() {
        assert!(inherited_socket(999_999).is_err());
        let file = tempfile::tempfile().unwrap();
        assert!(inherited_socket(file.as_raw_fd()).is_err());
    }
}
