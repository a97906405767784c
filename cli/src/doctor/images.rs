//! Leftover images on this node: each holds the memory of a workload.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use firn_config::Config;

use super::Check;
use crate::leftovers::{self, Leftover};
use crate::text;

pub fn checks(config: &Config, socket: &Path) -> Vec<Check> {
    let rescue = config.checkpoint.rescue_dir();
    vec![images(leftovers::of_root(leftovers::temporary(socket), rescue))]
}

/// A leftover image.
struct LeftoverImage {
    path: PathBuf,
    bytes: u64,
    age: Duration,
    is_open: bool,
}

impl LeftoverImage {
    /// The image in a directory, if there is one.
    fn of(found: &Leftover) -> Option<Self> {
        let (mut bytes, mut is_image, mut is_readable) = (0, false, false);
        for entry in fs::read_dir(found.dir.path()).ok()?.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_file() {
                bytes += metadata.len();
                is_image |= entry.file_name().as_bytes().ends_with(b".img");
                is_readable |= metadata.mode() & 0o044 != 0;
            }
        }
        let age = found
            .metadata
            .modified()
            .ok()
            .and_then(|at| SystemTime::now().duration_since(at).ok());
        is_image.then(|| Self {
            path: found.path.clone(),
            bytes,
            age: age.unwrap_or_default(),
            is_open: found.metadata.mode() & 0o011 != 0 && is_readable,
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

fn images(directories: impl Iterator<Item = Leftover>) -> Check {
    const NAME: &str = "images";
    let left: Vec<LeftoverImage> = directories
        .filter_map(|found| LeftoverImage::of(&found))
        .collect();
    if left.is_empty() {
        return Check::ok(NAME, "none left by containerd, none rescued");
    }
    let total: u64 = left.iter().map(|left| left.bytes).sum();
    let mut found = vec![format!("{} left, {}", left.len(), text::bytes(total))];
    found.extend(left.iter().map(LeftoverImage::line));
    Check::warn(
        NAME,
        found.join("; "),
        "each holds a workload's memory: `firn restore --dir DIR ID`, `firn images prune DIR`, or for all \
         that are old `firn images prune --left --older-than 30d`; what others can read: `rm -r DIR`",
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

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
        let check = || images(leftovers::of_root(BTreeSet::from([tmp.clone()]), &rescue));
        for dir in [&tmp, &rescue] {
            fs::create_dir(dir).unwrap();
        }
        leftovers::tests::plant(&tmp);
        assert_eq!(check().status, Status::Ok);
        fs::create_dir_all(tmp.join("ctrd-checkpoint-empty")).unwrap();
        image(&tmp, "somebody-elses", 0o755);
        image(dir.path(), "elsewhere", 0o755);
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), tmp.join("ctrd-checkpoint-link")).unwrap();
        assert_eq!(check().status, Status::Ok);

        let open = image(&tmp, "ctrd-checkpoint1", 0o755);
        let closed = image(&tmp, "ctrd-checkpoint2", 0o700);
        let rescued = image(&rescue, "default-job-2026", 0o700);
        let in_tmp = image(&tmp, "firn-rescue-default-job-2026", 0o700);
        let check = check();
        assert_eq!(check.status, Status::Warn);
        assert!(check.found.starts_with("4 left, 8.0 KiB; "), "{}", check.found);
        let line = |path: &Path| {
            let name = format!("{}: 2.0 KiB", path.display());
            check
                .found
                .split("; ")
                .find(|line| line.starts_with(&name))
                .unwrap()
        };
        assert!(line(&open).ends_with("others can READ it"), "{}", line(&open));
        assert!(line(&in_tmp).ends_with(" s old"));
        assert!(line(&closed).ends_with(" s old") && line(&rescued).ends_with(" s old"));
    }

    #[test]
    fn ages_are_shown_in_one_unit() {
        let ages = [(5, "5 s"), (600, "10 min"), (7200, "2 h"), (864_000, "10 days")];
        for (seconds, text) in ages {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
    }
}
