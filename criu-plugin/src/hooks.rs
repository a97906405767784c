//! The hooks that CRIU calls, with C's types.
//!
//! A hook returns `-ENOTSUP` for what is not NVIDIA's: CRIU then asks the next plugin. A panic ends CRIU: the
//! dump or restore fails and firn rolls back.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::libc::{self, ENOTSUP};

use crate::node::Node;
use crate::unix_sockets::{self, Socket};

/// Hooks of CRIU 4.0; later releases have more behind them.
const HOOKS: c_uint = 12;
const DUMP_UNIX_SK: usize = 0;
const DUMP_EXT_FILE: usize = 2;
const RESTORE_EXT_FILE: usize = 3;
const HANDLE_DEVICE_VMA: usize = 7;
const UPDATE_VMA_MAP: usize = 8;

/// `CRIU_PLUGIN_GEN_VERSION(0, 2, 0)`.
const VERSION: c_uint = 0x200;

/// `cr_plugin_desc_t`.
#[repr(C)]
pub struct Description {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: c_uint,
    max_hooks: c_uint,
    hooks: [*const c_void; HOOKS as usize],
}

// SAFETY: it is never written, and what it points to lives as long as the library.
unsafe impl Sync for Description {}

/// What CRIU looks up in a plugin.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: Description = Description {
    name: c"firn".as_ptr(),
    init,
    exit,
    version: VERSION,
    max_hooks: HOOKS,
    hooks: {
        let mut hooks = [std::ptr::null(); HOOKS as usize];
        hooks[DUMP_UNIX_SK] = dump_unix_socket as *const c_void;
        hooks[DUMP_EXT_FILE] = dump_file as *const c_void;
        hooks[RESTORE_EXT_FILE] = restore_file as *const c_void;
        hooks[HANDLE_DEVICE_VMA] = handle_mapping as *const c_void;
        hooks[UPDATE_VMA_MAP] = update_mapping as *const c_void;
        hooks
    },
};

unsafe extern "C" {
    /// The directory of the image, open in CRIU; not to be closed.
    safe fn criu_get_image_dir() -> c_int;
}

/// `CR_PLUGIN_STAGE__DUMP`.
const STAGE_DUMP: c_int = 0;

/// The Unix sockets of this dump that firn closes in the image.
static UNIX_SOCKETS: OnceLock<Vec<Socket>> = OnceLock::new();

/// Called when CRIU has loaded the plugin, before it reads sockets from the kernel.
extern "C" fn init(stage: c_int) -> c_int {
    if stage != STAGE_DUMP {
        return 0;
    }
    // The OCI runtime passes it on to CRIU.
    let dir = std::env::var_os("CRIU_LIBS_DIR").map(PathBuf::from);
    let sockets =
        UNIX_SOCKETS.get_or_init(|| dir.and_then(|dir| unix_sockets::listed(&dir)).unwrap_or_default());
    let mut unseen: Vec<_> = sockets.iter().filter_map(Socket::answer).collect();
    unseen.sort_unstable();
    unseen.dedup();
    show(&unseen);
    0
}

/// A network namespace of CRIU's without number: that of the container.
static NAMESPACE: [u64; 512] = [0; 512];

/// Shows CRIU Unix sockets that it does not see, as if the kernel had listed them. It is not part of the
/// interface for plugins: a CRIU without this function dumps no socket that is connected to one of them.
fn show(answers: &[Vec<u8>]) {
    /// Of sk-unix.c: a netlink message, the network namespace, and nothing.
    type Receive = unsafe extern "C" fn(*const c_void, *const c_void, *const c_void) -> c_int;
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"unix_receive_one".as_ptr()) };
    // SAFETY: CRIU 4.0 to 4.2 have the function with these arguments; a null pointer is `None`.
    let Some(receive) = (unsafe { std::mem::transmute::<*mut c_void, Option<Receive>>(found) }) else {
        return;
    };
    for answer in answers {
        let namespace = NAMESPACE.as_ptr().cast();
        // SAFETY: the answer is a whole message, of which CRIU keeps copies. Of the namespace it keeps the
        // address, and reads the number, wherever that is in its struct.
        unsafe { receive(answer.as_ptr().cast(), namespace, std::ptr::null()) };
    }
}

extern "C" fn exit(_stage: c_int, _result: c_int) {}

/// The image's file for the descriptor that CRIU calls `id`.
fn file_of(id: c_int) -> String {
    format!("firn-device-{id:x}.img")
}

/// A descriptor that CRIU has open for the length of a call.
fn borrowed<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: CRIU passes open descriptors, and closes none during the call.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// `CR_PLUGIN_HOOK__DUMP_UNIX_SK`: a Unix socket whose other end no dumped process has, by its inode. CRIU
/// marks the ones that a plugin takes.
extern "C" fn dump_unix_socket(_fd: c_int, inode: c_int) -> c_int {
    let sockets = UNIX_SOCKETS.get().map_or(&[][..], Vec::as_slice);
    let inode = inode.cast_unsigned();
    if sockets.iter().any(|socket| socket.is_taken(inode)) {
        0
    } else {
        -ENOTSUP
    }
}

/// `CR_PLUGIN_HOOK__DUMP_EXT_FILE`: a file that CRIU cannot dump. Once for each open file, whatever the
/// number of its descriptors.
extern "C" fn dump_file(fd: c_int, id: c_int) -> c_int {
    let Some(node) = Node::open_at(borrowed(fd)) else {
        return -ENOTSUP;
    };
    match node.write(borrowed(criu_get_image_dir()), &file_of(id)) {
        Ok(()) => 0,
        Err(error) => failed(&error),
    }
}

/// `CR_PLUGIN_HOOK__RESTORE_EXT_FILE`: gives an open file, in the mount namespace of the restored process.
extern "C" fn restore_file(id: c_int, retry: *mut bool) -> c_int {
    // SAFETY: CRIU passes a bool to write to.
    unsafe { retry.write(false) };
    let opened = Node::read(borrowed(criu_get_image_dir()), &file_of(id))
        .and_then(|node| node.map(|node| node.open_in(Path::new("/dev"))).transpose());
    match opened {
        Ok(Some(file)) => file.into_raw_fd(),
        Ok(None) => -ENOTSUP,
        Err(error) => failed(&error),
    }
}

/// `CR_PLUGIN_HOOK__HANDLE_DEVICE_VMA`: whether a mapping of a device may be dumped. CRIU dumps its place and
/// its path, not its content.
extern "C" fn handle_mapping(fd: c_int, _stat: *const c_void) -> c_int {
    match Node::open_at(borrowed(fd)) {
        Some(_) => 0,
        None => -ENOTSUP,
    }
}

/// `CR_PLUGIN_HOOK__UPDATE_VMA_MAP`: gives the file to map in the place of a device, which CRIU closes. 1 if
/// it is one of ours.
extern "C" fn update_mapping(
    path: *const c_char,
    _address: u64,
    _offset: u64,
    new_offset: *mut u64,
    fd: *mut c_int,
) -> c_int {
    // SAFETY: CRIU passes the path of the mapped file as a C string.
    let text = unsafe { CStr::from_ptr(path) };
    if Node::at(Path::new(OsStr::from_bytes(text.to_bytes()))).is_none() {
        return -ENOTSUP;
    }
    let zero = match std::fs::File::options().read(true).write(true).open("/dev/zero") {
        Ok(zero) => zero.into_raw_fd(),
        Err(error) => return failed(&error),
    };
    // SAFETY: CRIU passes it to be written to.
    unsafe { new_offset.write(0) };
    // SAFETY: as above.
    unsafe { fd.write(zero) };
    1
}

fn failed(error: &std::io::Error) -> c_int {
    -error.raw_os_error().unwrap_or(nix::libc::EINVAL)
}
