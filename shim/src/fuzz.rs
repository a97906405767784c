//! What must hold for everything that the shim reads from others, whatever its bytes are.
//!
//! One function per fuzz target (fuzz/), each beside what it is about. The fuzzer calls them with what it makes up, the
//! unit tests below with the kept corpus. What is asserted is more than "no panic", and is not worked out by the code
//! that is under test.

pub use crate::bootstrap::fuzz::{command_line, config_json, daemon_answer, start_input};
pub use crate::cgroup::fuzz::{cgroup_files, cgroups_path};
pub use crate::mounts::fuzz::mounts;
pub use crate::options::fuzz::options;
pub use crate::runc::fuzz::runtime_output;
pub use crate::stdio::fuzz::stdio;

/// A file with this content, which the next call replaces: for what reads files only.
pub(crate) fn file(content: &[u8]) -> std::path::PathBuf {
    let path = dir().join("file");
    std::fs::write(&path, content).expect("the temporary directory is writable");
    path
}

/// A directory that is there as long as the thread.
pub(crate) fn dir() -> std::path::PathBuf {
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
        // One after the other: some share a file.
        for (target, run) in [
            ("command_line", super::command_line as fn(&[u8])),
            ("config_json", super::config_json),
            ("daemon_answer", super::daemon_answer),
            ("start_input", super::start_input),
            ("cgroup_files", super::cgroup_files),
            ("cgroups_path", super::cgroups_path),
            ("mounts", super::mounts),
            ("options", super::options),
            ("runtime_output", super::runtime_output),
            ("stdio", super::stdio),
        ] {
            super::kept::run(target, run);
        }
    }
}
