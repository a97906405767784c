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
pub trait UnlessAbsent {
    /// No failure if there is nothing (any more) to work on.
    fn unless_absent(self) -> Self;
}

impl<E: Absent> UnlessAbsent for Result<(), E> {
    fn unless_absent(self) -> Self {
        self.or_else(|error| if error.is_absent() { Ok(()) } else { Err(error) })
    }
}
