//! Directories with images that nobody manages any more.
//!
//! containerd keeps an image in its directory for temporary files during a checkpoint, and one for every
//! restore, which it never removes. The shim keeps those that an error has named.
//!
//! Names prove nothing: /tmp is everybody's, and a container may call its program containerd. So a
//! directory is taken only where no container and no user writes: it is root's, nobody else may enter, and
//! nobody else can exchange it. It is opened once; everything after that goes by the descriptor.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_config::{Config, names};
use firn_host::{bounded, of_root};
use firn_image::manifest::UntrustedDir;

use crate::containerd::process;

/// Variables that name the directory of containerd's temporary directories.
const VARIABLES: [&str; 2] = ["XDG_RUNTIME_DIR", "TMPDIR"];

/// A directory that only root has made and filled, in which an image may be.
pub struct Leftover {
    /// Where it was found, for people.
    pub path: PathBuf,
    pub dir: UntrustedDir,
    pub metadata: Metadata,
}

impl Leftover {
    /// The directory of this name, unless others could have put it there.
    pub fn open(parent: &UntrustedDir, shown: &Path, name: &OsStr) -> Option<Self> {
        let found = Self::of_root(parent, shown, name)?;
        of_root::is_roots_alone(&found.metadata).then_some(found)
    }

    /// The same for one that others may enter: an image that they may read.
    fn of_root(parent: &UntrustedDir, shown: &Path, name: &OsStr) -> Option<Self> {
        if !of_root::holds_for_root(&parent.itself().ok()?) {
            return None;
        }
        let dir = parent.inside(name.to_str()?).ok()?;
        let metadata = dir.itself().ok()?;
        of_root::is_roots(&metadata).then(|| Self {
            path: shown.join(name),
            dir,
            metadata,
        })
    }
}

/// Directories that containerd has left, or that firn has rescued from it: each may be an image. `socket` is
/// containerd's.
pub fn directories(config: &Config, socket: &Path) -> impl Iterator<Item = Leftover> {
    below(temporary(socket), config.checkpoint.rescue_dir())
}

/// Those in these directories for temporary files, and in the one for rescued images.
pub fn below(temporary: BTreeSet<PathBuf>, rescue: &Path) -> impl Iterator<Item = Leftover> {
    of_root(temporary, rescue).filter(|found| of_root::is_roots_alone(&found.metadata))
}

/// The same, with those that others may enter.
pub fn of_root(temporary: BTreeSet<PathBuf>, rescue: &Path) -> impl Iterator<Item = Leftover> {
    let of_containerd = temporary.into_iter().flat_map(|dir| each(dir, is_left));
    of_containerd.chain(each(rescue.to_owned(), |_| true))
}

fn is_left(name: &OsStr) -> bool {
    let begin = [names::CONTAINERD_CHECKPOINT, names::RESCUE_PREFIX];
    begin
        .iter()
        .any(|begin| name.as_bytes().starts_with(begin.as_bytes()))
}

/// One after the other, as containerd leaves many.
fn each(shown: PathBuf, is_named: fn(&OsStr) -> bool) -> impl Iterator<Item = Leftover> {
    let parent = UntrustedDir::open(&shown).ok();
    let entries = parent
        .as_ref()
        .and_then(|parent| fs::read_dir(parent.path()).ok());
    let names = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name());
    let named = names.filter(move |name| is_named(name));
    named.filter_map(move |name| Leftover::of_root(parent.as_ref()?, &shown, &name))
}

/// Where containerd may have left images: in /tmp, and in directories that its environment or that of this
/// program names. containerd is the process that listens on its socket.
pub fn temporary(socket: &Path) -> BTreeSet<PathBuf> {
    let mut dirs = BTreeSet::from([PathBuf::from("/tmp")]);
    dirs.extend(VARIABLES.iter().filter_map(std::env::var_os).map(PathBuf::from));
    if let Some(pid) = process::of_socket(socket) {
        let environment = bounded::read(Path::new(&format!("/proc/{pid}/environ")));
        dirs.extend(named(&environment.unwrap_or_default()));
    }
    dirs.retain(|dir| dir.is_absolute());
    dirs
}

/// Directories that an environment names.
fn named(environment: &[u8]) -> Vec<PathBuf> {
    let of = |entry: &[u8]| {
        let value = |name: &&str| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=");
        let value = VARIABLES.iter().find_map(value)?;
        Some(PathBuf::from(OsStr::from_bytes(value)))
    };
    environment.split(|byte| *byte == 0).filter_map(of).collect()
}

#[cfg(test)]
pub mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    /// Sets mode and owner of a directory.
    pub fn give(dir: &Path, owner: u32, mode: u32) {
        fs::set_permissions(dir, PermissionsExt::from_mode(mode)).unwrap();
        chown(dir, Some(owner), None).unwrap();
    }

    /// A directory that looks like an image.
    pub fn image(parent: &Path, name: &str, owner: u32, mode: u32) -> PathBuf {
        let path = parent.join(name);
        fs::create_dir_all(&path).unwrap();
        for file in ["inventory.img", "pages-1.img"] {
            fs::write(path.join(file), [0; 1024]).unwrap();
        }
        give(&path, owner, mode);
        path
    }

    /// A directory for temporary files with what users may put there, of which nothing is an image of firn's.
    pub fn plant(tmp: &Path) {
        give(tmp, 0, 0o1777);
        for name in ["ctrd-checkpoint7", "firn-rescue-a"] {
            image(tmp, name, 1000, 0o700);
            image(tmp, &format!("{name}-open"), 1000, 0o755);
            let elsewhere = image(tmp, &format!("of-root-{name}"), 0, 0o700);
            symlink(elsewhere, tmp.join(format!("{name}-link"))).unwrap();
            fs::write(tmp.join(format!("{name}-file")), "").unwrap();
            // Root's, and others may put files into it.
            image(tmp, &format!("{name}-writable"), 0, 0o777);
        }
    }

    #[test]
    fn what_users_put_into_directories_for_temporary_files_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (tmp, rescue) = (dir.path().join("tmp"), dir.path().join("rescue"));
        for dir in [&tmp, &rescue] {
            fs::create_dir(dir).unwrap();
        }
        plant(&tmp);
        image(&rescue, "of-a-user", 1000, 0o700);
        let found = || {
            let found = below(BTreeSet::from([tmp.clone()]), &rescue).map(|found| found.path);
            found.collect::<BTreeSet<PathBuf>>()
        };
        assert_eq!(found(), BTreeSet::new());
        let expected = [
            image(&tmp, "ctrd-checkpoint1", 0, 0o700),
            image(&tmp, "firn-rescue-default-job-2026", 0, 0o700),
            image(&rescue, "default-job-2026", 0, 0o700),
        ];
        image(&tmp, "ctrd-checkpoint2", 0, 0o750);
        assert_eq!(found(), BTreeSet::from(expected.clone()));
        // As in a volume of a container, whose root has the same number.
        for (owner, mode) in [(0, 0o777), (1000, 0o755), (1000, 0o1777)] {
            give(&tmp, owner, mode);
            assert_eq!(found(), BTreeSet::from([expected[2].clone()]), "{owner} {mode:o}");
        }
        give(&rescue, 1000, 0o700);
        assert_eq!(found(), BTreeSet::new());
    }

    #[test]
    fn the_environment_names_directories() {
        let environment = b"PATH=/bin\0TMPDIR=/srv/tmp\0XDG_RUNTIME_DIR=/run/user\0XTMPDIR=/x\0TMPDIR2=/y\0";
        assert_eq!(
            named(environment),
            [Path::new("/srv/tmp"), Path::new("/run/user")]
        );
    }

    /// A container may have a program of that name, and any environment.
    #[test]
    fn a_process_that_is_called_containerd_names_none() {
        use std::process::{Command, Stdio};
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("containerd");
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut command = Command::new(program);
        command
            .arg("100")
            .env("TMPDIR", "/volume/of/a/pod")
            .stdin(Stdio::null());
        let mut child = command.spawn().unwrap();
        let comm = format!("/proc/{}/comm", child.id());
        let limit = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while fs::read(&comm).unwrap() != b"containerd\n" && std::time::Instant::now() < limit {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let found = temporary(&dir.path().join("no.sock"));
        let comm = fs::read(&comm).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(comm, b"containerd\n");
        assert!(found.contains(Path::new("/tmp")));
        assert!(!found.contains(Path::new("/volume/of/a/pod")), "{found:?}");
    }
}
