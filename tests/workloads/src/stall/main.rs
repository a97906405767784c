//! `stall-fs LOWER POINT CONTROL`: a FUSE file system that shows the directory LOWER at POINT and can be made
//! to hang. How to: write operations into the file CONTROL (`echo unlink statfs >CONTROL`); from then on
//! those get no answer, and who asks for one sleeps in state D. Emptying the file lets them continue; ending
//! the program fails them. Prints `ready` once mounted.
//!
//! Operations: `stat` (any look at attributes or a name), `statfs`, `readlink`, `open`, `read`, `write`,
//! `readdir`, `create`, `mkdir`, `unlink`, `rename`, `setattr`, `fsync`. Speaks the kernel's protocol itself
//! (include/uapi/linux/fuse.h, 7.31).

#![forbid(unsafe_code)]

mod wire;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use clap::Parser;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::statvfs;

use wire::{Fields, Reply};

/// A directory whose operations can be made to hang.
#[derive(Parser)]
#[command(name = "stall-fs", version)]
struct Options {
    /// Directory that is shown
    lower: PathBuf,
    /// Where it is mounted
    point: PathBuf,
    /// File with the operations that hang, read at each request; none when it is absent
    control: PathBuf,
}

/// Bytes of a request in front of its arguments, and of a reply in front of its data.
const REQUEST_HEAD: usize = 40;
const REPLY_HEAD: usize = 16;

/// Holds a request with the longest write.
const BUFFER: usize = 1 << 20;
const MAX_WRITE: u32 = 128 << 10;

const ROOT: u64 = 1;

/// How often it is looked whether what hangs may continue.
const POLL: Duration = Duration::from_millis(20);

fn main() -> Result<()> {
    let options = Options::parse();
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let device = Arc::new(device.context("open /dev/fuse")?);
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
        device.as_raw_fd()
    );
    let kind = Some("fuse.stall-fs");
    mount(
        Some("stall-fs"),
        &options.point,
        kind,
        MsFlags::empty(),
        Some(&*data),
    )
    .with_context(|| format!("mount {}", options.point.display()))?;
    println!("ready");
    io::stdout().flush().context("report that it is mounted")?;

    let server = Arc::new(Mutex::new(Server {
        device: Arc::clone(&device),
        control: options.control,
        tree: Tree::of(options.lower),
        stalled: Vec::new(),
    }));
    let waker = Arc::clone(&server);
    thread::spawn(move || {
        loop {
            thread::sleep(POLL);
            let Ok(mut server) = waker.lock() else { return };
            for request in std::mem::take(&mut server.stalled) {
                server.serve(request);
            }
        }
    });
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = match (&*device).read(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => return Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::NotFound) => {
                continue;
            }
            Err(error) => return Err(error).context("read a request"),
        };
        let Ok(mut server) = server.lock() else {
            return Ok(());
        };
        server.serve(buffer[..length].to_vec());
    }
}

struct Server {
    device: Arc<File>,
    control: PathBuf,
    tree: Tree,
    stalled: Vec<Vec<u8>>,
}

impl Server {
    /// Answers a request, or keeps it while its operation hangs.
    fn serve(&mut self, request: Vec<u8>) {
        let mut head = Fields(&request);
        let (_length, opcode, unique, node) = (head.u32(), head.u32(), head.u64(), head.u64());
        let stalling = fs::read_to_string(&self.control).unwrap_or_default();
        if stalling.split_whitespace().any(|word| word == operation(opcode)) {
            self.stalled.push(request);
            return;
        }
        let arguments = Fields(request.get(REQUEST_HEAD..).unwrap_or_default());
        let reply = match self.tree.answer(opcode, node, arguments) {
            Some(reply) => reply,
            None => return,
        };
        let (error, data) = match reply {
            Ok(Reply(data)) => (0, data),
            Err(error) => (-error.raw_os_error().unwrap_or(Errno::EIO as i32), Vec::new()),
        };
        let length = u32::try_from(REPLY_HEAD + data.len()).unwrap_or(u32::MAX);
        let head = Reply::default().u32(length).bytes(&error.to_le_bytes());
        // Who asked may be gone.
        let _ = (&*self.device).write(&head.u64(unique).bytes(&data).0);
    }
}

/// The word of an operation in the control file.
fn operation(opcode: u32) -> &'static str {
    match opcode {
        1 | 3 => "stat",
        4 => "setattr",
        5 => "readlink",
        8 | 35 => "create",
        9 => "mkdir",
        10 | 11 => "unlink",
        12 | 45 => "rename",
        14 | 27 => "open",
        15 => "read",
        16 => "write",
        17 => "statfs",
        20 | 30 => "fsync",
        28 => "readdir",
        _ => "",
    }
}

/// What the kernel knows of the directory: nodes by number, open files by handle.
struct Tree {
    paths: BTreeMap<u64, PathBuf>,
    files: HashMap<u64, File>,
    next: u64,
}

impl Tree {
    fn of(lower: PathBuf) -> Self {
        Self {
            paths: BTreeMap::from([(ROOT, lower)]),
            files: HashMap::new(),
            next: ROOT + 1,
        }
    }

    /// None for what wants no answer.
    fn answer(&mut self, opcode: u32, node: u64, mut of: Fields<'_>) -> Option<io::Result<Reply>> {
        Some(match opcode {
            // FORGET, INTERRUPT, BATCH_FORGET: nodes are kept.
            2 | 36 | 42 => return None,
            1 => self.child(node, of.name()).and_then(|path| self.entry(path)),
            3 => self.attributes(node, &mut of),
            4 => self.change(node, &mut of),
            5 | 6 | 8..=12 | 45 => self.name(opcode, node, of),
            14 => self.open(node, of.u32()),
            15 => self.read(&mut of),
            16 => self.write(&mut of),
            17 => self.room(node),
            18 => {
                self.files.remove(&of.u64());
                Ok(Reply::default())
            }
            20 => self
                .file(of.u64())
                .and_then(File::sync_all)
                .map(|()| Reply::default()),
            // FLUSH, RELEASEDIR, FSYNCDIR.
            25 | 29 | 30 => Ok(Reply::default()),
            26 => Ok(Reply::default()
                .u32(7)
                .u32(31)
                .u32(0)
                .u32(0)
                .zeros(4)
                .u32(MAX_WRITE)
                .u32(1)
                .zeros(36)),
            27 => Ok(opened(0)),
            28 => self.list(node, &mut of),
            35 => self.create(node, &mut of),
            _ => Err(Errno::ENOSYS.into()),
        })
    }

    /// Reads, makes, renames and removes names.
    fn name(&mut self, opcode: u32, node: u64, mut of: Fields<'_>) -> io::Result<Reply> {
        match opcode {
            5 => self
                .path(node)
                .and_then(fs::read_link)
                .map(|to| Reply::default().bytes(to.as_os_str().as_bytes())),
            6 => {
                let (name, to) = (of.name(), of.name());
                self.make(node, name, |path| std::os::unix::fs::symlink(to, path))
            }
            8 => {
                let (mode, _rdev, _umask, _) = (of.u32(), of.u32(), of.u32(), of.u32());
                self.make(node, of.name(), |path| create(path, mode).map(drop))
            }
            9 => {
                let (mode, _umask) = (of.u32(), of.u32());
                self.make(node, of.name(), |path| {
                    fs::create_dir(path)?;
                    fs::set_permissions(path, Permissions::from_mode(mode & 0o7777))
                })
            }
            10 => self
                .child(node, of.name())
                .and_then(fs::remove_file)
                .map(|()| Reply::default()),
            11 => self
                .child(node, of.name())
                .and_then(fs::remove_dir)
                .map(|()| Reply::default()),
            12 => self.rename(node, of.u64(), &mut of),
            45 => {
                let (to, flags, _) = (of.u64(), of.u32(), of.u32());
                if flags == 0 {
                    self.rename(node, to, &mut of)
                } else {
                    Err(Errno::EINVAL.into())
                }
            }
            _ => Err(Errno::ENOSYS.into()),
        }
    }

    fn path(&self, node: u64) -> io::Result<PathBuf> {
        self.paths.get(&node).cloned().ok_or(Errno::ESTALE.into())
    }

    fn child(&self, node: u64, name: &OsStr) -> io::Result<PathBuf> {
        Ok(self.path(node)?.join(name))
    }

    fn file(&self, handle: u64) -> io::Result<&File> {
        self.files.get(&handle).ok_or(Errno::EBADF.into())
    }

    fn keep(&mut self, file: File) -> u64 {
        let handle = self.next;
        self.next += 1;
        self.files.insert(handle, file);
        handle
    }

    /// What a name leads to. Nothing of it is cached.
    fn entry(&mut self, path: PathBuf) -> io::Result<Reply> {
        let attributes = fs::symlink_metadata(&path)?;
        let known = self.paths.iter().find(|(_, known)| **known == path);
        let node = match known {
            Some((node, _)) => *node,
            None => {
                let node = self.next;
                self.next += 1;
                self.paths.insert(node, path);
                node
            }
        };
        Ok(Reply::default().u64(node).zeros(32).attributes(&attributes))
    }

    fn make(
        &mut self,
        node: u64,
        name: &OsStr,
        make: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<Reply> {
        let path = self.child(node, name)?;
        self.forget(&path);
        make(&path)?;
        self.entry(path)
    }

    /// The node of a file that is gone must not be taken for the next one of its name.
    fn forget(&mut self, path: &Path) {
        self.paths.retain(|_, known| known != path);
    }

    fn attributes(&self, node: u64, of: &mut Fields<'_>) -> io::Result<Reply> {
        let (by_handle, _, handle) = (of.u32() & 1 != 0, of.u32(), of.u64());
        let attributes = match self.file(handle) {
            Ok(file) if by_handle => file.metadata()?,
            _ => fs::symlink_metadata(self.path(node)?)?,
        };
        Ok(Reply::default().zeros(16).attributes(&attributes))
    }

    fn change(&self, node: u64, of: &mut Fields<'_>) -> io::Result<Reply> {
        let (valid, _, handle, size) = (of.u32(), of.u32(), of.u64(), of.u64());
        let (_owner, _atime, mtime, _ctime) = (of.u64(), of.u64(), of.u64(), of.u64());
        let (_, mtime_nanos, _, mode) = (of.u32(), of.u32(), of.u32(), of.u32());
        let (_, uid, gid) = (of.u32(), of.u32(), of.u32());
        let has = |bit: u32| valid & (1 << bit) != 0;
        let path = self.path(node)?;
        if has(0) {
            fs::set_permissions(&path, Permissions::from_mode(mode & 0o7777))?;
        }
        if has(1) || has(2) {
            std::os::unix::fs::lchown(&path, has(1).then_some(uid), has(2).then_some(gid))?;
        }
        if has(3) {
            match self.file(handle) {
                Ok(file) if has(6) => file.set_len(size)?,
                _ => OpenOptions::new().write(true).open(&path)?.set_len(size)?,
            }
        }
        if has(5) && !has(8) {
            let time = SystemTime::UNIX_EPOCH + Duration::new(mtime, mtime_nanos);
            File::open(&path)?.set_modified(time)?;
        }
        let attributes = fs::symlink_metadata(&path)?;
        Ok(Reply::default().zeros(16).attributes(&attributes))
    }

    fn rename(&mut self, node: u64, to: u64, of: &mut Fields<'_>) -> io::Result<Reply> {
        let (from, to) = (self.child(node, of.name())?, self.child(to, of.name())?);
        fs::rename(&from, &to)?;
        self.forget(&to);
        for path in self.paths.values_mut() {
            if let Ok(below) = path.strip_prefix(&from) {
                // Not joined with an empty path, which would add a slash.
                *path = if below.as_os_str().is_empty() {
                    to.clone()
                } else {
                    to.join(below)
                };
            }
        }
        Ok(Reply::default())
    }

    fn open(&mut self, node: u64, flags: u32) -> io::Result<Reply> {
        let path = self.path(node)?;
        let access = flags & 3;
        let mut options = OpenOptions::new();
        options.read(access != 1).write(access != 0);
        // The kernel truncates by itself; with O_APPEND it passes where to write.
        let file = options.open(path)?;
        Ok(opened(self.keep(file)))
    }

    fn create(&mut self, node: u64, of: &mut Fields<'_>) -> io::Result<Reply> {
        let (_flags, mode, _umask, _) = (of.u32(), of.u32(), of.u32(), of.u32());
        let path = self.child(node, of.name())?;
        self.forget(&path);
        let file = create(&path, mode)?;
        let handle = self.keep(file);
        let Reply(entry) = self.entry(path)?;
        Ok(Reply(entry).bytes(&opened(handle).0))
    }

    fn read(&self, of: &mut Fields<'_>) -> io::Result<Reply> {
        let (handle, offset, size) = (of.u64(), of.u64(), of.u32());
        let mut data = vec![0; usize::try_from(size).unwrap_or(0)];
        let length = self.file(handle)?.read_at(&mut data, offset)?;
        data.truncate(length);
        Ok(Reply(data))
    }

    fn write(&self, of: &mut Fields<'_>) -> io::Result<Reply> {
        let (handle, offset, size) = (of.u64(), of.u64(), of.u32());
        of.take(20);
        let data = of.take(usize::try_from(size).unwrap_or(0));
        self.file(handle)?.write_all_at(data, offset)?;
        Ok(Reply::default().u32(size).u32(0))
    }

    fn room(&self, node: u64) -> io::Result<Reply> {
        let room = statvfs(&self.path(node)?)?;
        let size = |bytes| u32::try_from(bytes).unwrap_or(4096);
        Ok(Reply::default()
            .u64(room.blocks())
            .u64(room.blocks_free())
            .u64(room.blocks_available())
            .u64(room.files())
            .u64(room.files_free())
            .u32(size(room.block_size()))
            .u32(255)
            .u32(size(room.fragment_size()))
            .zeros(28))
    }

    #[expect(clippy::disallowed_methods, reason = "FUSE has one file system here")]
    fn list(&self, node: u64, of: &mut Fields<'_>) -> io::Result<Reply> {
        let (_handle, offset, size) = (of.u64(), of.u64(), of.u32());
        let mut names: Vec<_> = fs::read_dir(self.path(node)?)?.collect::<io::Result<_>>()?;
        names.sort_by_key(fs::DirEntry::file_name);
        let mut reply = Reply::default();
        for (entry, next) in names.iter().zip(1_u64..).filter(|(_, next)| *next > offset) {
            let name = entry.file_name();
            let length = name.len();
            let kind = entry.metadata()?.mode() >> 12;
            let padding = (8 - length % 8) % 8;
            if reply.0.len() + 24 + length + padding > usize::try_from(size).unwrap_or(0) {
                break;
            }
            reply = reply
                .u64(entry.metadata()?.ino())
                .u64(next)
                .u32(u32::try_from(length).unwrap_or(0))
                .u32(kind)
                .bytes(name.as_bytes())
                .zeros(padding);
        }
        Ok(reply)
    }
}

fn create(path: &Path, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    options.mode(mode & 0o7777).open(path)
}

/// The answer to OPEN.
fn opened(handle: u64) -> Reply {
    Reply::default().u64(handle).zeros(8)
}
