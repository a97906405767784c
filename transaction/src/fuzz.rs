//! What must hold for everything that is read from the OCI runtime, the kernel and containers, whatever its bytes are.
//!
//! One function per fuzz target (fuzz/), each beside what it is about. The fuzzer calls them with what it makes up, the
//! unit tests below with the kept corpus. What is asserted is more than "no panic", and is not worked out by the code
//! that is under test.

pub use crate::cgroup::fuzz::cgroups_path;
pub use crate::runc::fuzz::runtime_output;
pub use crate::stdio::fuzz::stdio;

/// A file with this content, which the next call replaces: for what reads files only.
pub fn file(content: &[u8]) -> std::path::PathBuf {
    let path = dir().join("file");
    std::fs::write(&path, content).expect("the temporary directory is writable");
    path
}

/// A directory that is there as long as the thread.
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
            ("cgroups_path", super::cgroups_path as fn(&[u8])),
            ("runtime_output", super::runtime_output),
            ("stdio", super::stdio),
        ] {
            super::kept::run(target, run);
        }
    }
}
