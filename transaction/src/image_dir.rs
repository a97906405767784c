//! The directory that receives an image, and CRIU's log next to it.

mod dir;
mod error;
pub mod rescue;

use std::path::Path;

use firn_host::bounded;

pub use dir::ImageDir;
pub(crate) use dir::is_containerds;
pub use error::ImageDirError;

/// How many of CRIU's last errors are quoted.
const QUOTED: usize = 3;

/// How much of the end of a log is searched for them.
const TAIL: u64 = 256 << 10;

/// The last errors of a CRIU log, without their time stamps.
pub(crate) fn error_lines(log: &Path) -> Vec<String> {
    let text = bounded::tail(log, 0, TAIL).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let errors = text.lines().filter_map(|line| line.split_once("Error "));
    let mut lines: Vec<String> = errors.map(|(_, error)| error.trim().to_owned()).collect();
    lines.split_off(lines.len().saturating_sub(QUOTED))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_last_errors_of_a_log_are_quoted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = "(00.1) Error (a.c:1): one\n(00.2) fine\n(00.3) Error (b.c:2): two\n\
                   (00.4) Error (c.c:3): three\n\
                   (00.5) Error (d.c:4): four\n";
        fs::write(file.path(), log).unwrap();
        assert_eq!(
            error_lines(file.path()),
            ["(b.c:2): two", "(c.c:3): three", "(d.c:4): four"]
        );
        assert!(error_lines(Path::new("/nonexistent")).is_empty());
    }
}
