//! Loop devices over anonymous memory.
//!
//! The memory (a memfd) has no path and no size limit and goes away with its loop device. Its name,
//! `simgpu:<mount namespace>:<node>`, shows a later clean-up whose device it was.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use simgpu_model::Node;

const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const BLKPG: libc::c_ulong = 0x1269;
const ADD_PARTITION: i32 = 1;
/// LO_FLAGS_PARTSCAN, and the word of `struct loop_info64` in whose upper half the flags are.
const PARTSCAN: u64 = 8;
const FLAGS_AT: usize = 6;
const BLOCK_SIZE: u32 = 4096;
const NAME: &str = "simgpu:";

/// `struct loop_config` with its `struct loop_info64` left zero.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: [u64; 29],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

/// `struct blkpg_ioctl_arg`.
#[repr(C)]
struct PartitionCall {
    op: i32,
    flags: i32,
    length: i32,
    data: *const Partition,
}

/// `struct blkpg_partition`.
#[repr(C)]
struct Partition {
    start: i64,
    length: i64,
    number: i32,
    names: [u8; 128],
}

const _: () = assert!(size_of::<Partition>() == 152 && size_of::<PartitionCall>() == 24);

/// Anonymous memory for node `name`, sparse.
pub fn backing(name: &str, size: u64) -> Result<File> {
    let name = CString::new(format!("{NAME}{}:{name}", own_mount_namespace()?))?;
    // SAFETY: the name is a C string that lives through the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error()).context("cannot make anonymous memory");
    }
    // SAFETY: memfd_create has just given this descriptor to nobody else.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(size).context("cannot size the memory of a device")?;
    Ok(file)
}

/// Whether a loop device can have a partition, which the kernel then removes with what is behind the device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Partitions {
    None,
    One,
}

/// Puts `backing` behind a free loop device and makes its node `name` in `dev`.
pub fn attach(dev: &Path, name: &str, backing: &File, partitions: Partitions) -> Result<Node> {
    let path = dev.join(name);
    let control = open_control(dev)?;
    for _ in 0..64 {
        // SAFETY: the request takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(io::Error::last_os_error()).context("cannot get a loop device");
        }
        let node = loop_node(name, number)?;
        make_node(&path, node.device())?;
        let device = File::options().read(true).write(true).open(&path);
        let device = device.with_context(|| format!("cannot open {}", path.display()))?;
        let fd = u32::try_from(backing.as_raw_fd())?;
        let mut config = LoopConfig {
            fd,
            block_size: BLOCK_SIZE,
            info: [0; 29],
            reserved: [0; 8],
        };
        if partitions == Partitions::One {
            config.info[FLAGS_AT] = PARTSCAN << 32;
        }
        // SAFETY: the argument is a loop_config that lives through the call; the kernel only reads it.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } == 0 {
            return Ok(node);
        }
        let error = io::Error::last_os_error();
        fs::remove_file(&path)?;
        // Another process took the same free device first.
        if error.raw_os_error() != Some(libc::EBUSY) {
            return Err(error).with_context(|| format!("cannot set up loop{number}"));
        }
    }
    bail!("no loop device stayed free long enough to take it")
}

/// Makes the node of a device that can have a partition that of a partition over the whole of it: the same
/// bytes under another major number.
pub fn renumber(dev: &Path, node: &Node, size: u64) -> Result<Node> {
    let path = dev.join(&node.name);
    let device = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    add_partition(&device, i64::try_from(size)?).context("cannot make a partition")?;
    let below = format!("/sys/dev/block/{}:{}", node.major, node.minor);
    let disk = fs::canonicalize(below).context("cannot find a loop device")?;
    let number = disk.file_name().context("a block device without name")?;
    let partition = numbered(&node.name, &disk.join(format!("{}p1", number.to_string_lossy())))?;
    make_node(&path, partition.device())?;
    Ok(partition)
}

fn add_partition(device: &File, length: i64) -> io::Result<()> {
    let partition = Partition {
        start: 0,
        length,
        number: 1,
        names: [0; 128],
    };
    let call = PartitionCall {
        op: ADD_PARTITION,
        flags: 0,
        length: 152,
        data: &raw const partition,
    };
    // SAFETY: the argument and what it points to live through the call; the kernel only reads them.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKPG, &raw const call) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The device of which the node at `path` is a partition.
fn disk_of(path: &Path) -> io::Result<Option<u64>> {
    let number = fs::metadata(path)?.rdev();
    let (major, minor) = (libc::major(number), libc::minor(number));
    let here = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))?;
    let Some(disk) = here.parent().filter(|_| here.join("partition").exists()) else {
        return Ok(None);
    };
    let node = numbered("disk", disk).map_err(io::Error::other)?;
    Ok(Some(node.device()))
}

/// Takes the memory from behind the loop device at `path`, or of which that is a partition; deferred by the
/// kernel until its last user closes it.
pub fn detach(path: &Path) -> io::Result<()> {
    if let Some(disk) = disk_of(path)? {
        let own = path.with_file_name(format!(".simgpu-disk-{}", std::process::id()));
        make_node(&own, disk).map_err(io::Error::other)?;
        let done = detach(&own);
        fs::remove_file(&own)?;
        return done;
    }
    let device = File::open(path)?;
    // SAFETY: the request takes no argument.
    match unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
            error => Err(error),
        },
    }
}

/// Detaches the devices whose node (mount namespace) no longer exists; gives their number.
#[expect(clippy::disallowed_methods, reason = "all namespaces are on one device")]
pub fn detach_stale(dev: &Path) -> Result<usize> {
    let alive: HashSet<String> = (fs::read_dir("/proc")?.flatten())
        .filter_map(|entry| Some(fs::metadata(entry.path().join("ns/mnt")).ok()?.ino().to_string()))
        .collect();
    let mut detached = 0;
    for entry in fs::read_dir("/sys/block")?.flatten() {
        let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) else {
            continue;
        };
        let Some((owner, _)) = file
            .split_once(&format!("memfd:{NAME}"))
            .and_then(|(_, rest)| rest.split_once(':'))
        else {
            continue;
        };
        if alive.contains(owner) {
            continue;
        }
        let number = entry
            .file_name()
            .to_string_lossy()
            .trim_start_matches("loop")
            .parse()?;
        let path = dev.join(format!(".simgpu-stale-{}", std::process::id()));
        make_node(&path, loop_node("stale", number)?.device())?;
        let done = detach(&path);
        fs::remove_file(&path)?;
        done.with_context(|| format!("cannot detach loop{number}"))?;
        detached += 1;
    }
    Ok(detached)
}

/// Makes the block node, replacing what a node that is gone has left.
fn make_node(path: &Path, device: u64) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", path.display()));
        }
        _ => {}
    }
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is a C string that lives through the call.
    if unsafe { libc::mknod(name.as_ptr(), libc::S_IFBLK | 0o666, device) } != 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("cannot make {}", path.display()));
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
    Ok(())
}

fn loop_node(name: &str, number: i32) -> Result<Node> {
    numbered(name, Path::new(&format!("/sys/block/loop{number}")))
}

/// A node of the block device that has this directory of sysfs.
fn numbered(name: &str, sysfs: &Path) -> Result<Node> {
    let path = sysfs.join("dev");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let (major, minor) = text
        .trim()
        .split_once(':')
        .context("a block device without number")?;
    Ok(Node {
        name: name.to_owned(),
        major: major.parse()?,
        minor: minor.parse()?,
    })
}

fn open_control(dev: &Path) -> Result<File> {
    let open = |path: &Path| File::options().read(true).write(true).open(path);
    match open(Path::new("/dev/loop-control")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        done => return done.context("cannot open /dev/loop-control; hint: needs root"),
    }
    let own = dev.join(".simgpu-loop-control");
    let name = CString::new(own.as_os_str().as_bytes())?;
    // SAFETY: the path is a C string that lives through the call. 10:237 is loop-control's fixed number.
    if unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(10, 237)) } != 0 {
        return Err(io::Error::last_os_error()).context("cannot make a node for loop-control");
    }
    let opened = open(&own);
    fs::remove_file(&own)?;
    opened.context("cannot open loop-control; hint: modprobe loop")
}

#[expect(clippy::disallowed_methods, reason = "all namespaces are on one device")]
fn own_mount_namespace() -> Result<u64> {
    Ok(fs::metadata("/proc/self/ns/mnt")
        .context("cannot see the own mount namespace; hint: mount /proc")?
        .ino())
}
