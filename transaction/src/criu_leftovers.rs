//! What a CRIU that was killed leaves: the cgroup tree that it mounted in its work directory, and the empty
//! directory in /tmp below which it mounted the root of a restore. The log of the restore has that
//! directory's name.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use firn_host::{UnlessAbsent, procfs};
use firn_process::OrWarn;
use firn_process::blocking::tidy;
use firn_process::unmount::unmount_below;

/// Mounts that a killed CRIU leaves below its work directory.
pub const CGYARD: &str = ".criu.cgyard.";

/// How the name of the directory in /tmp begins; mkdtemp adds a suffix.
pub const ROOT: &str = ".criu.mntns.";
const PREFIX: &str = "/tmp/.criu.mntns.";
const SUFFIX: usize = 6;

/// How much of the log is read: the name comes near the beginning.
const HEAD: u64 = 1 << 20;

/// Removes the directory of the restore that has written the log, when there is one and it is empty. A log
/// that could not be written (the disk is full) names none: then all that nobody uses.
pub async fn remove_roots(log: &Path) {
    let log = log.to_owned();
    tidy("remove what CRIU has left in /tmp", move || {
        let mut text = Vec::new();
        let read = File::open(log).and_then(|file| file.take(HEAD).read_to_end(&mut text));
        if read.is_err() {
            return;
        }
        let mut all = roots(&String::from_utf8_lossy(&text));
        if all.is_empty() {
            all = unused(Path::new("/tmp"), criu_runs);
        }
        for root in all {
            let removed = std::fs::remove_dir(&root).unless_absent();
            removed.or_warn(format_args!("cannot remove {root}"));
        }
    })
    .await;
}

/// Order matters: a CRIU that starts after the look makes a directory of another name.
fn unused(temporary: &Path, criu_runs: impl Fn() -> bool) -> BTreeSet<String> {
    let entries = std::fs::read_dir(temporary).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_root = |name: &String| {
        let suffix = name.strip_prefix(ROOT).unwrap_or_default();
        suffix.len() == SUFFIX && suffix.bytes().all(|byte| byte.is_ascii_alphanumeric())
    };
    let names = names.filter(is_root);
    let found = firn_host::ordered::set_of(names.map(|name| format!("{}/{name}", temporary.display())));
    if criu_runs() { BTreeSet::new() } else { found }
}

/// Whether a CRIU runs on this host, under whatever suffix its program has. What was looked for before and is
/// there, is that of no CRIU then.
pub fn criu_runs() -> bool {
    procfs::all()
        .into_iter()
        .any(|pid| procfs::comm(pid).starts_with("criu"))
}

fn roots(log: &str) -> BTreeSet<String> {
    let mentions = log.split(PREFIX).skip(1);
    let names = mentions.filter_map(|rest| rest.get(..SUFFIX));
    let names = names.filter(|name| name.bytes().all(|byte| byte.is_ascii_alphanumeric()));
    firn_host::ordered::set_of(names.map(|name| format!("{PREFIX}{name}")))
}

/// Unmounts the cgroup tree that a killed CRIU left in its work directory. Order matters: a recursive delete
/// of that directory would otherwise walk into cgroupfs.
pub(crate) async fn unmount_yards(work: &Path) {
    let entries = std::fs::read_dir(work).into_iter().flatten().flatten();
    let is_yard = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with(CGYARD);
    for yard in entries.filter(is_yard) {
        unmount(&yard.path()).await;
    }
}

/// Unmounts what is mounted at `path` and below.
pub async fn unmount(path: &Path) {
    let unmounted = unmount_below(path).await;
    unmounted.or_warn(format_args!("cannot unmount {}", path.display()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_found_in_the_log() {
        let log = "(00.009354) mnt: \t\tWill mount 99 @ /tmp/.criu.mntns.TC9DFk/mnt-0000000099 \
                   /sys/firmware\n\
                   (00.009366) mnt: \t\tWill mount 98 @ /tmp/.criu.mntns.TC9DFk/mnt-0000000098 /proc/keys\n\
                   mnt: Mount /tmp/.criu.mntns.../x and /tmp/.criu.mntns.TC\n";
        assert_eq!(roots(log), BTreeSet::from(["/tmp/.criu.mntns.TC9DFk".to_owned()]));
        assert!(roots("").is_empty());
    }

    #[tokio::test]
    async fn the_directory_that_the_log_names_is_removed() {
        let left = tempfile::Builder::new()
            .prefix(ROOT)
            .rand_bytes(SUFFIX)
            .tempdir_in("/tmp")
            .unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let text = format!("mnt: Will mount 99 @ {}/mnt-99 /sys\n", left.path().display());
        std::fs::write(log.path(), text).unwrap();
        remove_roots(log.path()).await;
        assert!(!left.path().exists());
    }

    /// That none runs cannot be seen here: other tests may run one.
    #[test]
    fn a_criu_with_a_suffix_runs() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("criu-ns-4.2");
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut child = std::process::Command::new(program).arg("60").spawn().unwrap();
        let runs = criu_runs();
        child.kill().unwrap();
        // The reaper of another test may have waited for it.
        let _ended = child.wait();
        assert!(runs);
    }

    #[test]
    fn without_a_log_it_is_one_that_no_criu_uses() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".criu.mntns.TC9DFk", ".criu.mntns.long-name", "criu.mntns.TC9DFk"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let own = format!("{}/.criu.mntns.TC9DFk", dir.path().display());
        assert_eq!(unused(dir.path(), || false), BTreeSet::from([own]));
        assert!(unused(dir.path(), || true).is_empty());
    }
}
