//! Leftover images on this node: each holds the memory of a workload.
//!
//! containerd keeps one in its directory for temporary files during a checkpoint, and one for every restore,
//! which it never removes. The shim keeps those that an error has named.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use firn_config::{Config, names};
use firn_host::bounded;

use super::Check;
use crate::text;

/// Variables that name the directory of containerd's temporary directories.
const VARIABLES: [&str; 2] = ["XDG_RUNTIME_DIR", "TMPDIR"];

pub fn checks(config: &Config) -> Vec<Check> {
    vec![images(leftover(config))]
}

/// Where containerd may have left images: in /tmp, and in directories that its environment or that of this
/// program names.
fn temporary(proc: &Path) -> BTreeSet<PathBuf> {
    let mut dirs = BTreeSet::from([PathBuf::from("/tmp")]);
    dirs.extend(VARIABLES.iter().filter_map(std::env::var_os).map(PathBuf::from));
    for process in fs::read_dir(proc).into_iter().flatten().flatten() {
        let process = process.path();
        let name = fs::read(process.join("comm")).unwrap_or_default();
        if name.trim_ascii_end() != b"containerd" {
            continue;
        }
        let environment = bounded::read(&process.join("environ")).unwrap_or_default();
        for entry in environment.split(|byte| *byte == 0) {
            let value = |name: &&str| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=");
            dirs.extend(
                VARIABLES
                    .iter()
                    .find_map(value)
                    .map(|path| PathBuf::from(OsStr::from_bytes(path))),
            );
        }
    }
    dirs.retain(|dir| dir.is_absolute());
    dirs
}

/// A leftover image.
struct Left {
    path: PathBuf,
    bytes: u64,
    age: Duration,
    is_open: bool,
}

impl Left {
    /// The image in a directory, if there is one. Links are not followed.
    fn of(path: PathBuf) -> Option<Self> {
        let dir = fs::symlink_metadata(&path).ok().filter(Metadata::is_dir)?;
        let (mut bytes, mut is_image, mut is_readable) = (0, false, false);
        for entry in fs::read_dir(&path).ok()?.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_file() {
                bytes += metadata.len();
                is_image |= entry.file_name().as_bytes().ends_with(b".img");
                is_readable |= metadata.mode() & 0o044 != 0;
            }
        }
        let age = dir
            .modified()
            .ok()
            .and_then(|at| SystemTime::now().duration_since(at).ok());
        is_image.then(|| Self {
            path,
            bytes,
            age: age.unwrap_or_default(),
            is_open: dir.mode() & 0o011 != 0 && is_readable,
        })
    }

    fn line(&self) -> String {
        let open = if self.is_open {
            ", and others can READ it"
        } else {
            ""
        };
        let (path, size) = (self.path.display(), text::bytes(self.bytes));
        format!("{path}: {size}, {} old{open}", age(self.age))
    }
}

fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Directories that containerd has left, or that firn has rescued from it: each may be an image.
pub fn leftover(config: &Config) -> Vec<PathBuf> {
    below(&temporary(Path::new("/proc")), config.checkpoint.rescue_dir())
}

fn below(temporary: &BTreeSet<PathBuf>, rescue: &Path) -> Vec<PathBuf> {
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
    let begins = |name: &OsStr| {
        let begin = [names::CONTAINERD_CHECKPOINT, names::RESCUE_PREFIX];
        begin
            .iter()
            .any(|begin| name.as_bytes().starts_with(begin.as_bytes()))
    };
    let of_containerd = temporary.iter().flat_map(|dir| entries(dir));
    let of_containerd = of_containerd.filter(|entry| begins(&entry.file_name()));
    of_containerd
        .chain(entries(rescue))
        .map(|entry| entry.path())
        .collect()
}

fn images(directories: Vec<PathBuf>) -> Check {
    const NAME: &str = "images";
    let left: Vec<Left> = directories.into_iter().filter_map(Left::of).collect();
    if left.is_empty() {
        return Check::ok(NAME, "none left by containerd, none rescued");
    }
    let total: u64 = left.iter().map(|left| left.bytes).sum();
    let mut found = vec![format!("{} left, {}", left.len(), text::bytes(total))];
    found.extend(left.iter().map(Left::line));
    Check::warn(
        NAME,
        found.join("\n"),
        "each holds a workload's memory: `firn restore --dir` it, or remove it when no checkpoint or \
         restore is in progress",
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::Status;
    use super::*;

    fn image(parent: &Path, name: &str, mode: u32) -> PathBuf {
        let path = parent.join(name);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("pages-1.img"), [0; 2048]).unwrap();
        fs::set_permissions(path.join("pages-1.img"), PermissionsExt::from_mode(0o644)).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn leftover_images_are_listed_with_size_and_readers() {
        let dir = tempfile::tempdir().unwrap();
        let (tmp, rescue) = (dir.path().join("tmp"), dir.path().join("rescue"));
        let temporary = BTreeSet::from([tmp.clone()]);
        assert_eq!(images(below(&temporary, &rescue)).status, Status::Ok);
        fs::create_dir_all(tmp.join("ctrd-checkpoint-empty")).unwrap();
        image(&tmp, "somebody-elses", 0o755);
        image(dir.path(), "elsewhere", 0o755);
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), tmp.join("ctrd-checkpoint-link")).unwrap();
        assert_eq!(images(below(&temporary, &rescue)).status, Status::Ok);

        let open = image(&tmp, "ctrd-checkpoint1", 0o755);
        let closed = image(&tmp, "ctrd-checkpoint2", 0o700);
        let rescued = image(&rescue, "default-job-2026", 0o700);
        let in_tmp = image(&tmp, "firn-rescue-default-job-2026", 0o700);
        let check = images(below(&temporary, &rescue));
        assert_eq!(check.status, Status::Warn);
        assert!(check.found.starts_with("4 left, 8.0 KiB\n"), "{}", check.found);
        let line = |path: &Path| {
            let name = format!("{}: 2.0 KiB", path.display());
            check.found.lines().find(|line| line.starts_with(&name)).unwrap()
        };
        assert!(line(&open).ends_with("others can READ it"), "{}", line(&open));
        assert!(line(&in_tmp).ends_with(" s old"));
        assert!(line(&closed).ends_with(" s old") && line(&rescued).ends_with(" s old"));
    }

    #[test]
    fn the_environment_of_containerd_names_directories() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: &str, name: &str, environment: &[u8]| {
            let dir = proc.path().join(pid);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("comm"), format!("{name}\n")).unwrap();
            fs::write(dir.join("environ"), environment).unwrap();
        };
        process(
            "7",
            "containerd",
            b"PATH=/bin\0TMPDIR=/srv/tmp\0XDG_RUNTIME_DIR=relative\0",
        );
        process("8", "bash", b"TMPDIR=/home/tmp\0");
        let dirs = temporary(proc.path());
        assert!(dirs.contains(Path::new("/tmp")) && dirs.contains(Path::new("/srv/tmp")));
        assert!(!dirs.contains(Path::new("/home/tmp")) && !dirs.contains(Path::new("relative")));
    }

    #[test]
    fn ages_are_shown_in_one_unit() {
        let ages = [(5, "5 s"), (600, "10 min"), (7200, "2 h"), (864_000, "10 days")];
        for (seconds, text) in ages {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
    }
}
