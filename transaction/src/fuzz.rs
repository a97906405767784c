//! Properties that must hold for all input from the OCI runtime, the kernel and containers, whatever its
//! bytes are.
//!
//! One function per fuzz target (fuzz/), each next to the code that it tests. The fuzzer calls them with
//! generated input, the unit tests below with the stored corpus. The assertions go beyond "no panic", and
//! their expected values are not computed by the code under test.

pub use crate::restore::named::fuzz::restore_from;
pub use crate::runc::fuzz::runtime_output;
pub use crate::stdio::fuzz::stdio;

/// A file with this content, which the next call replaces: for parsers that read files only.
pub fn file(content: &[u8]) -> std::path::PathBuf {
    let path = dir().join("file");
    std::fs::write(&path, content).expect("the temporary directory is writable");
    path
}

/// A directory that exists as long as the thread.
pub fn dir() -> std::path::PathBuf {
    thread_local! {
        static DIR: tempfile::TempDir = tempfile::tempdir().expect("there is a temporary directory");
    }
    DIR.with(|dir| dir.path().to_owned())
}

#[cfg(test)]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        for (target, run) in [
            ("restore_from", super::restore_from as fn(&[u8])),
            ("runtime_output", super::runtime_output),
            ("stdio", super::stdio),
        ] {
            super::kept::run(target, run);
        }
    }
}
