//! What must hold for everything that the shim reads from others, whatever its bytes are.
//!
//! One function per fuzz target (fuzz/), each next to the code that it tests. The fuzzer calls them with what
//! it makes up, the unit tests below with the kept corpus. What is asserted is more than "no panic", and is
//! not worked out by the code that is under test.

pub use crate::bootstrap::fuzz::{command_line, config_json, daemon_answer, start_input};
pub use crate::metrics::fuzz::cgroup_files;
pub use crate::mounts::fuzz::mounts;
pub use crate::options::fuzz::options;

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
            ("mounts", super::mounts),
            ("options", super::options),
        ] {
            super::kept::run(target, run);
        }
    }
}
