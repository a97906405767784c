//! The directory that receives an image, and CRIU's log next to it.

mod dir;
mod error;
pub mod rescue;

use std::path::Path;

use firn_host::bounded;

pub use dir::ImageDir;
pub(crate) use dir::is_containerds;
pub use error::ImageDirError;

/// How many of CRIU's errors are quoted.
const QUOTED: usize = 3;

/// How much of the end of a log is searched for them.
const TAIL: u64 = 256 << 10;

/// The first errors of a CRIU log, without their time stamps: what follows them is their consequence. Those
/// that CRIU logs whatever the reason are left out, unless there are no others.
pub(crate) fn error_lines(log: &Path) -> Vec<String> {
    let text = bounded::tail(log, 0, TAIL).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let errors = text.lines().filter_map(|line| line.split_once("Error "));
    let errors: Vec<&str> = errors.map(|(_, error)| error.trim()).collect();
    let mut reasons: Vec<&str> = errors.iter().copied().filter(|error| !is_usual(error)).collect();
    if reasons.is_empty() {
        reasons = errors;
    }
    reasons.dedup();
    reasons.truncate(QUOTED);
    reasons.into_iter().map(str::to_owned).collect()
}

/// Whether CRIU logs this error, `(FILE:LINE): TEXT`, at the end of each failure: which task has ended, that
/// its helpers have, and that all has failed; or at each beginning, as in containers without a capability.
fn is_usual(error: &str) -> bool {
    let text = error.split_once("): ").map_or(error, |(_, text)| text);
    let of_task = |text: &str| {
        let (pid, what) = text.split_once(' ')?;
        let is_pid = pid.bytes().all(|byte| byte.is_ascii_digit());
        Some(is_pid && what.starts_with("exited, status="))
    };
    ["Restoring FAILED.", "Dumping FAILED."].contains(&text)
        || text.starts_with("cg: cgroupd: recv req error")
        || text.starts_with("rlimit: Can't setup RLIMIT_NOFILE for self")
        || of_task(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn errors(log: &str) -> Vec<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), log).unwrap();
        error_lines(file.path())
    }

    #[test]
    fn the_first_errors_of_a_log_are_quoted() {
        let log = "(00.1) Error (a.c:1): one\n(00.2) fine\n(00.3)   7: Error (b.c:2): two\n\
                   (00.4) Error (b.c:2): two\n\
                   (00.5) Error (c.c:3): three\n\
                   (00.6) Error (d.c:4): four\n";
        assert_eq!(errors(log), ["(a.c:1): one", "(b.c:2): two", "(c.c:3): three"]);
        assert!(error_lines(Path::new("/nonexistent")).is_empty());
    }

    /// As CRIU 4.2 ends a restore.
    #[test]
    fn the_end_of_criu_is_no_reason() {
        const END: &str = "(00.0) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: No\n\
                           (00.5) Error (criu/cr-restore.c:1492): 12 exited, status=1\n\
                           (00.6) Error (criu/cr-restore.c:2320): Restoring FAILED.\n\
                           (00.7) Error (criu/cgroup.c:1998): cg: cgroupd: recv req error: No such file\n";
        let reason = "(00.4)  12: Error (criu/files-reg.c:2225): File x has bad size 7 (expect 3)\n";
        assert_eq!(
            errors(&format!("{reason}{END}")),
            ["(criu/files-reg.c:2225): File x has bad size 7 (expect 3)"]
        );
        assert_eq!(errors(END).len(), 3, "there is no other");
    }
}
