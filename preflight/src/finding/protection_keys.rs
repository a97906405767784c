//! Memory with a protection key (pkey_mprotect(2)): CRIU restores the memory without its key, and the program
//! would continue without the protection.

use std::ops::ControlFlow;
use std::path::Path;

use firn_host::{bounded, proc_maps};

use super::Unreadable;

/// Where the first memory with a key begins, in hexadecimal digits; none if the process has no such memory,
/// or has ended. On a CPU without keys /proc shows none, and one mapping is read.
pub(super) fn first(proc_root: &Path, pid: i32) -> Result<Option<String>, Unreadable> {
    let what = "smaps";
    let (mut mapping, mut found, mut has_key) = (String::new(), None, false);
    let path = proc_root.join(pid.to_string()).join(what);
    let read = bounded::each(&path, b'\n', bounded::LINES, |line| {
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("ProtectionKey:"), key) => {
                has_key = true;
                if key != Some("0") {
                    found = Some(std::mem::take(&mut mapping));
                    return ControlFlow::Break(());
                }
            }
            // The last line of a mapping.
            (Some("VmFlags:"), _) if !has_key => return ControlFlow::Break(()),
            (Some(head), Some(_)) if !head.ends_with(':') => {
                let (start, _) = head.split_once('-').unwrap_or_default();
                start.clone_into(&mut mapping);
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    let read = proc_maps::unless_gone(read).map_err(|source| Unreadable { pid, what, source })?;
    Ok(read.and(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two mappings: as a kernel shows them on a CPU with keys.
    fn smaps(first: &str, second: &str) -> String {
        let mapping = |at: &str, key: &str| {
            format!(
                "{at} rw-p 00000000 00:00 0                  [anon: a: b]\n\
                 Size:                  4 kB\nTHPeligible:           0\n{key}VmFlags: rd wr mr mw me ac sd\n"
            )
        };
        let (first, second) = (mapping("1000-2000", first), mapping("7f10a000-7f10b000", second));
        first + &second
    }

    #[test]
    fn memory_with_a_key_is_found_where_the_cpu_has_keys() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("7");
        std::fs::create_dir(&dir).unwrap();
        let of = |text: &str| {
            std::fs::write(dir.join("smaps"), text).unwrap();
            first(root.path(), 7).unwrap()
        };
        let (none, one) = ("ProtectionKey:         0\n", "ProtectionKey:         1\n");
        assert_eq!(of(&smaps(none, none)), None);
        assert_eq!(of(&smaps(none, one)).as_deref(), Some("7f10a000"));
        assert_eq!(of(&smaps(one, none)).as_deref(), Some("1000"));
        let odd = "ProtectionKey:\n";
        assert_eq!(
            of(&smaps(none, odd)).as_deref(),
            Some("7f10a000"),
            "unknown is a key"
        );
        // Without keys no second mapping is read.
        assert_eq!(of(&smaps("", one)), None);
        assert_eq!(of(""), None);
        assert_eq!(first(root.path(), 8).unwrap(), None, "it has ended");
    }
}
