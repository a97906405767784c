//! A container's root file system, as far as a hook may read and change it.
//!
//! Its content comes from an image and is hostile. The kernel resolves every path inside the root (`openat2`
//! with `RESOLVE_IN_ROOT`) and does not follow links of /proc: at that stage /proc/1/root is the host's root.
//! Nothing is read or changed below a mount, which may be a directory of the host ([`is_mounted`]). A file is
//! opened only if it is a regular file and no link. Changes are made by a rename inside a directory that is
//! held open.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};
use firn_host::bounded::read_at_most;
use firn_host::{open_below, reopen_regular};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag, open, openat, readlinkat, renameat};
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

/// Name of a file or link before the rename.
const TEMPORARY: &str = ".firn-hook.tmp";

/// A container's root file system.
pub struct Rootfs {
    root: OwnedFd,
}

impl Rootfs {
    /// Opens the root file system at this path.
    pub fn open(path: &Path) -> Result<Self> {
        let root = open(
            path,
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
        .with_context(|| format!("cannot open the root file system {}", path.display()))?;
        Ok(Self { root })
    }

    /// Makes a symbolic link with this text, and the directories that it needs. Replaces a link with another
    /// text. Returns false if something else is there, which stays.
    pub fn symlink(&self, text: &Path, link: &Path) -> Result<bool> {
        let (dir, name) = self.parent(link)?;
        match readlinkat(&dir, name) {
            Ok(same) if same == *text => return Ok(true),
            Ok(_) | Err(Errno::ENOENT) => {}
            // It exists and is no link.
            Err(Errno::EINVAL) => return Ok(false),
            Err(error) => return Err(error).with_context(|| format!("cannot look at {}", name.display())),
        }
        clear(&dir)?;
        symlinkat(text, &dir, TEMPORARY).context("cannot make a symbolic link")?;
        renameat(&dir, TEMPORARY, &dir, name)
            .with_context(|| format!("cannot put the link at {}", link.display()))?;
        Ok(true)
    }

    /// Reads a regular file of at most `limit` bytes; none if nothing is there, an error if it is something
    /// else.
    pub fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
        let found = match self.resolve(path, OFlag::O_PATH | OFlag::O_NOFOLLOW) {
            Ok(found) => found,
            Err(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot open {}", path.display())),
        };
        let file = reopen_regular(found).with_context(|| format!("cannot open {}", path.display()))?;
        let bytes = read_at_most(file, limit).with_context(|| format!("cannot read {}", path.display()))?;
        let too_large = || format!("{} is larger than {limit} bytes", path.display());
        bytes.with_context(too_large).map(Some)
    }

    /// Whether something is at this path.
    pub fn has(&self, path: &Path) -> bool {
        self.resolve(path, OFlag::O_PATH).is_ok()
    }

    /// Replaces or creates a file, and makes the directories that it needs.
    pub fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let (dir, name) = self.parent(path)?;
        clear(&dir)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let file = openat(&dir, TEMPORARY, flags, Mode::from_bits_truncate(0o644))
            .with_context(|| format!("cannot write next to {}", path.display()))?;
        File::from(file)
            .write_all(bytes)
            .with_context(|| format!("cannot write {}", path.display()))?;
        renameat(&dir, TEMPORARY, &dir, name).with_context(|| format!("cannot replace {}", path.display()))
    }

    /// The directory of a path, made if it is missing, and the path's last name.
    fn parent<'p>(&self, path: &'p Path) -> Result<(OwnedFd, &'p Path)> {
        let name = path.file_name().map(Path::new);
        let (Some(name), Some(parent)) = (name.filter(|_| path.is_absolute()), path.parent()) else {
            bail!("{} is no absolute path of a file", path.display());
        };
        let mut reached = PathBuf::from("/");
        let mut dir = self.directory(&reached)?;
        for part in parent.components() {
            let part = match part {
                Component::Normal(part) => part,
                Component::RootDir => continue,
                _ => bail!("{} is not a plain path", path.display()),
            };
            reached.push(part);
            let mut found = self.directory(&reached);
            if matches!(found, Err(Errno::ENOENT)) {
                mkdirat(&dir, part, Mode::from_bits_truncate(0o755))
                    .with_context(|| format!("cannot make {}", reached.display()))?;
                found = self.directory(&reached);
            }
            dir = found.with_context(|| format!("cannot open {}", reached.display()))?;
        }
        Ok((dir, name))
    }

    fn directory(&self, path: &Path) -> Result<OwnedFd, Errno> {
        self.resolve(path, OFlag::O_PATH | OFlag::O_DIRECTORY)
    }

    fn resolve(&self, path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
        let resolve =
            ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS | ResolveFlag::RESOLVE_NO_XDEV;
        open_below(&self.root, path, flags, resolve)
    }
}

/// Whether an operation has failed because the path is below a mount.
pub fn is_mounted(error: &anyhow::Error) -> bool {
    error.root_cause().downcast_ref() == Some(&Errno::EXDEV)
}

/// Removes a temporary file or link that a killed hook has left.
fn clear(dir: &OwnedFd) -> Result<()> {
    let flags = match fstatat(dir, TEMPORARY, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Err(Errno::ENOENT) => return Ok(()),
        Ok(found) if found.st_mode & nix::libc::S_IFMT == nix::libc::S_IFDIR => UnlinkatFlags::RemoveDir,
        _ => UnlinkatFlags::NoRemoveDir,
    };
    unlinkat(dir, TEMPORARY, flags).with_context(|| format!("cannot remove {TEMPORARY}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// A root, and a directory outside of it that nothing may reach.
    fn root() -> (TempDir, PathBuf, PathBuf, Rootfs) {
        let dir = tempfile::tempdir().unwrap();
        let (root, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir(&root).unwrap();
        fs::create_dir(&outside).unwrap();
        let rootfs = Rootfs::open(&root).unwrap();
        (dir, root, outside, rootfs)
    }

    fn link(rootfs: &Rootfs, text: &str, at: &str) -> Result<bool> {
        rootfs.symlink(Path::new(text), Path::new(at))
    }

    #[test]
    fn links_are_made_with_their_directories_and_again() {
        let (_dir, root, _, rootfs) = root();
        for _ in 0..2 {
            assert!(link(&rootfs, "libcuda.so.580", "/usr/lib/x/libcuda.so.1").unwrap());
        }
        let made = root.join("usr/lib/x/libcuda.so.1");
        assert_eq!(fs::read_link(&made).unwrap(), Path::new("libcuda.so.580"));
        assert!(link(&rootfs, "libcuda.so.590", "/usr/lib/x/libcuda.so.1").unwrap());
        assert_eq!(fs::read_link(&made).unwrap(), Path::new("libcuda.so.590"));
        assert_eq!(fs::read_dir(root.join("usr/lib/x")).unwrap().count(), 1);
    }

    #[test]
    fn what_is_no_link_stays() {
        let (_dir, root, _, rootfs) = root();
        fs::write(root.join("file"), "of the image").unwrap();
        fs::create_dir(root.join("dir")).unwrap();
        for at in ["/file", "/dir"] {
            assert!(!link(&rootfs, "other", at).unwrap());
        }
        assert_eq!(fs::read(root.join("file")).unwrap(), b"of the image");
    }

    #[test]
    fn links_of_the_image_lead_nowhere_outside() {
        let (_dir, root, outside, rootfs) = root();
        symlink(&outside, root.join("absolute")).unwrap();
        symlink("../../../../..", root.join("up")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        symlink("inside", root.join("relative")).unwrap();
        fs::create_dir(root.join("inside")).unwrap();
        let text = Path::new(&outside).to_str().unwrap();

        // A link to a place outside is one to the same place inside, which is not there.
        assert!(rootfs.write(Path::new("/absolute/f"), b"x").is_err());
        assert!(
            rootfs
                .write(&Path::new("/up").join(&text[1..]).join("f"), b"x")
                .is_ok()
        );
        assert!(root.join(&text[1..]).join("f").is_file());
        assert!(rootfs.write(Path::new("/magic/etc/f"), b"x").is_err());
        assert!(link(&rootfs, "text", "/relative/l").unwrap());
        assert!(root.join("inside/l").is_symlink());
        assert!(link(&rootfs, "text", "/../../x").is_err());
        assert!(link(&rootfs, "text", "relative").is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn links_of_proc_are_not_followed() {
        let rootfs = Rootfs::open(Path::new("/")).unwrap();
        let own = format!("/proc/{}/root/etc/passwd", std::process::id());
        assert!(rootfs.read(Path::new("/etc/passwd"), 1 << 20).unwrap().is_some());
        assert!(rootfs.read(Path::new(&own), 1 << 20).is_err());
    }

    #[test]
    fn files_are_read_up_to_a_limit_and_nothing_else_is() {
        let (_dir, root, outside, rootfs) = root();
        fs::write(outside.join("secret"), "x").unwrap();
        symlink(outside.join("secret"), root.join("link")).unwrap();
        fs::write(root.join("f"), "12345").unwrap();
        nix::unistd::mkfifo(&root.join("fifo"), Mode::S_IRUSR).unwrap();
        // No driver has this number: opening such a node fails with ENXIO.
        let number = nix::sys::stat::makedev(60, 250);
        nix::sys::stat::mknod(
            &root.join("device"),
            nix::sys::stat::SFlag::S_IFCHR,
            Mode::S_IRUSR,
            number,
        )
        .unwrap();
        symlink("device", root.join("to-device")).unwrap();
        symlink("/", root.join("to-root")).unwrap();
        let read = |path: &str| rootfs.read(Path::new(path), 5);
        assert_eq!(read("/f").unwrap().unwrap(), b"12345");
        assert!(rootfs.read(Path::new("/f"), 4).is_err());
        assert_eq!(read("/absent").unwrap(), None);
        assert_eq!(read("/to-root/f").unwrap().unwrap(), b"12345");
        for path in ["/link", "/fifo", "/device", "/to-device", "/to-root", "/"] {
            let message = format!("{:#}", read(path).unwrap_err());
            assert_eq!(message, format!("cannot open {path}: not a regular file"));
        }
    }

    #[test]
    fn files_are_replaced_as_a_whole_and_not_written_through() {
        let (_dir, root, outside, rootfs) = root();
        fs::write(outside.join("f"), "untouched").unwrap();
        fs::create_dir(root.join("etc")).unwrap();
        symlink(outside.join("f"), root.join("etc/f")).unwrap();
        symlink(outside.join("f"), root.join("etc").join(TEMPORARY)).unwrap();
        rootfs.write(Path::new("/etc/f"), b"new").unwrap();
        assert_eq!(fs::read(outside.join("f")).unwrap(), b"untouched");
        assert!(!root.join("etc/f").is_symlink());
        assert_eq!(fs::read(root.join("etc/f")).unwrap(), b"new");
        fs::create_dir(root.join("etc").join(TEMPORARY)).unwrap();
        rootfs.write(Path::new("/etc/f"), b"newer").unwrap();
        assert_eq!(fs::read(root.join("etc/f")).unwrap(), b"newer");
    }
}
