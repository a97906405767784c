//! Operations on what may be gone already.

use std::io;

/// An error that may mean that there is nothing (any more) to work on.
pub trait Absent {
    fn is_absent(&self) -> bool;
}

impl Absent for io::Error {
    fn is_absent(&self) -> bool {
        self.kind() == io::ErrorKind::NotFound
    }
}

/// A result that is no failure where there is nothing to work on.
pub trait UnlessAbsent<T, E>: Sized {
    /// What is there; none if there is nothing (any more).
    fn if_present(self) -> Result<Option<T>, E>;

    /// No failure if there is nothing (any more) to work on.
    fn unless_absent(self) -> Result<(), E> {
        self.if_present().map(drop)
    }
}

impl<T, E: Absent> UnlessAbsent<T, E> for Result<T, E> {
    fn if_present(self) -> Result<Option<T>, E> {
        match self {
            Err(error) if error.is_absent() => Ok(None),
            found => found.map(Some),
        }
    }
}
