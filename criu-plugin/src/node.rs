//! Which files are nodes of NVIDIA's driver, and how an image names them.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, SFlag, fstat};

/// The directory of nodes, as the container sees it.
const DEV: &str = "/dev";

/// Longest name of a node that is read from an image, in bytes.
const LONGEST: u8 = 32;

/// A node of the driver in /dev, by its name: `nvidiactl`, `nvidia-uvm`, `nvidia0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node(String);

impl Node {
    /// The node of this name; none if it is no name of NVIDIA's driver. Nodes in directories (capabilities,
    /// IMEX channels) are none: firn refuses the processes that have them open.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let part = name.strip_prefix("nvidia")?;
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        (name.len() <= usize::from(LONGEST) && part.chars().all(is_plain)).then(|| Self(name.to_owned()))
    }

    /// The node at this path.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        Self::named(path.strip_prefix(DEV).ok()?.to_str()?)
    }

    /// The node that a descriptor of this process has open.
    pub(crate) fn open_at(fd: BorrowedFd<'_>) -> Option<Self> {
        if !is_device(fd) {
            return None;
        }
        Self::at(&fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?)
    }

    /// Whether it is one of a GPU, which has another number on another node.
    fn is_gpu(&self) -> bool {
        let number = self.0.trim_start_matches("nvidia");
        !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
    }

    /// Writes its name into a file of the image. One that is there is that of an earlier dump: CRIU writes
    /// its own files again, too.
    pub(crate) fn write(&self, image: BorrowedFd<'_>, file: &str) -> io::Result<()> {
        let new = OFlag::O_CREAT | OFlag::O_TRUNC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let flags = OFlag::O_WRONLY | new | OFlag::O_CLOEXEC;
        let file = openat(image, file, flags, Mode::from_bits_truncate(0o600))?;
        File::from(file).write_all(self.0.as_bytes())
    }

    /// Reads a name from a file of the image; none if there is no such file.
    ///
    /// # Errors
    /// `InvalidData` if it holds no name of a node.
    pub(crate) fn read(image: BorrowedFd<'_>, file: &str) -> io::Result<Option<Self>> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match openat(image, file, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            file => File::from(file?),
        };
        let mut name = String::new();
        file.take(u64::from(LONGEST) + 1).read_to_string(&mut name)?;
        Self::named(&name)
            .ok_or(io::ErrorKind::InvalidData.into())
            .map(Some)
    }

    /// Opens it in `dev`. In the place of a GPU that is not there the first of the GPUs there: the container
    /// has been given other ones.
    pub(crate) fn open_in(&self, dev: &Path) -> io::Result<OwnedFd> {
        match open_device(&dev.join(&self.0)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.is_gpu() => {
                let gpu = gpus(dev)?.into_iter().min().ok_or(error)?;
                open_device(&gpu)
            }
            opened => opened,
        }
    }
}

/// The nodes of GPUs in a directory.
fn gpus(dev: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dev)?.flatten();
    let names = entries.filter_map(|entry| Node::named(entry.file_name().to_str()?));
    Ok(names.filter(Node::is_gpu).map(|gpu| dev.join(gpu.0)).collect())
}

/// Opens a device as programs open NVIDIA's. Nothing else is opened for good, and no link is followed: the
/// directory is the container's.
fn open_device(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(flags.bits())
        .open(path)?;
    if is_device(file.as_fd()) {
        Ok(file.into())
    } else {
        Err(io::ErrorKind::InvalidInput.into())
    }
}

/// Whether a file is a device. NVIDIA's are character devices; the simulated ones of the tests are block
/// devices.
fn is_device(fd: BorrowedFd<'_>) -> bool {
    let of_type = |mode: u32| SFlag::from_bits_truncate(mode & SFlag::S_IFMT.bits());
    fstat(fd).is_ok_and(|stat| [SFlag::S_IFCHR, SFlag::S_IFBLK].contains(&of_type(stat.st_mode)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_driver_are_nodes() {
        for name in [
            "nvidiactl",
            "nvidia-uvm",
            "nvidia-uvm-tools",
            "nvidia0",
            "nvidia15",
        ] {
            assert_eq!(Node::at(&Path::new(DEV).join(name)), Node::named(name));
            assert!(Node::named(name).is_some(), "{name}");
        }
        let long = format!("nvidia{}", "0".repeat(40));
        for name in [
            "",
            "null",
            "nvidia-caps/nvidia-cap1",
            "nvidia0 (deleted)",
            "nvidia../x",
            "NVIDIA0",
            &long,
        ] {
            assert_eq!(Node::named(name), None, "{name}");
        }
        assert_eq!(Node::at(Path::new("/srv/nvidia0")), None);
    }

    #[test]
    fn an_image_names_a_node_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let image = File::open(dir.path()).unwrap();
        let read = |file: &str| Node::read(image.as_fd(), file);
        let node = Node::named("nvidia3").unwrap();
        assert_eq!(read("a.img").unwrap(), None);
        node.write(image.as_fd(), "a.img").unwrap();
        assert_eq!(read("a.img").unwrap(), Some(node.clone()));
        // A second dump into the same directory.
        let other = Node::named("nvidiactl").unwrap();
        other.write(image.as_fd(), "a.img").unwrap();
        assert_eq!(read("a.img").unwrap(), Some(other.clone()));
        node.write(image.as_fd(), "a.img").unwrap();
        assert_eq!(read("a.img").unwrap(), Some(node.clone()));
        for (file, content) in [
            ("b.img", "../etc/shadow"),
            ("c.img", ""),
            ("d.img", &"nvidia0".repeat(1000)),
        ] {
            fs::write(dir.path().join(file), content).unwrap();
            assert_eq!(
                read(file).unwrap_err().kind(),
                io::ErrorKind::InvalidData,
                "{file}"
            );
        }
        std::os::unix::fs::symlink("a.img", dir.path().join("link.img")).unwrap();
        assert!(read("link.img").is_err());
        assert!(
            other.write(image.as_fd(), "link.img").is_err(),
            "a link is followed"
        );
    }

    #[test]
    fn a_gpu_that_is_not_there_is_replaced_and_what_is_no_device_is_refused() {
        let dev = tempfile::tempdir().unwrap();
        let open = |name: &str| Node::named(name).unwrap().open_in(dev.path());
        assert_eq!(
            open("nvidia3").unwrap_err().kind(),
            io::ErrorKind::NotFound,
            "no GPU at all"
        );
        fs::write(dev.path().join("nvidia1"), "no device").unwrap();
        assert_eq!(open("nvidia3").unwrap_err().kind(), io::ErrorKind::InvalidInput);
        std::os::unix::fs::symlink("/dev/null", dev.path().join("nvidiactl")).unwrap();
        assert!(open("nvidiactl").is_err(), "a link");
        assert_eq!(
            open("nvidia-uvm").unwrap_err().kind(),
            io::ErrorKind::NotFound,
            "it is no GPU"
        );
    }
}
