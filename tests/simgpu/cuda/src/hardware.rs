//! The devices that a process has open: control, UVM, and every GPU that it could see.
//!
//! Opened and left by the restore thread only, because that thread holds the owner slots.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use simgpu_model::{CHUNK, Control, GpuInfo, GpuMemory, Mapping, paths, punch, punch_managed};

use crate::error::Error;

/// Where every process with a context has its first mapping of the UVM device, offset equal to address.
const UVM_BASE: usize = 0x2_04a0_0000;
const UVM_BASE_SIZE: usize = 2 << 20;

/// Where processes with a context have a mapping of 2 MiB of its GPU's node, which forked children inherit.
/// Those of further GPUs follow; their addresses were not measured.
const INHERITED_BASE: usize = 0x2_0060_0000;

/// One open GPU and the process's slot in it.
pub(crate) struct OpenGpu {
    pub(crate) memory: GpuMemory,
    pub(crate) slot: usize,
}

/// See the module head.
pub(crate) struct Hardware {
    control: Control,
    uvm: File,
    uvm_slot: usize,
    /// The driver has one for each context, this one whatever their number.
    uvm_base: Option<Mapping>,
    /// See [`INHERITED_BASE`], by the GPU's place.
    inherited: BTreeMap<usize, Mapping>,
    gpus: Vec<OpenGpu>,
}

/// Opens the control device in the container's `/dev`.
pub(crate) fn open_control() -> Option<Control> {
    Control::open(&paths::dev_dir()).ok()
}

/// Opens all nodes that can be opened, and maps none.
pub(crate) fn open_nodes() -> Vec<File> {
    let Some(control) = open_control() else {
        return Vec::new();
    };
    let gpus = control.table.gpus.iter().map(|gpu| gpu.node.name.as_str());
    let names = [paths::CONTROL, paths::UVM].into_iter().chain(gpus);
    let open = |name| {
        File::options()
            .read(true)
            .write(true)
            .open(paths::dev_dir().join(name))
            .ok()
    };
    names.filter_map(open).collect()
}

/// Opens a GPU; makes its node first when it is missing, which takes the right to. A node with another number
/// (left over from another host) is not used.
pub(crate) fn open_gpu(gpu: &GpuInfo) -> io::Result<GpuMemory> {
    let path = paths::dev_dir().join(&gpu.node.name);
    if !path.exists() {
        make_node(&path, gpu.node.device())?;
    }
    if !gpu.node.is_at(&path)? {
        return Err(io::ErrorKind::InvalidData.into());
    }
    GpuMemory::open(File::options().read(true).write(true).open(path)?)
}

/// Whether the GPU's node is there and may be opened.
pub(crate) fn is_open_to(gpu: &GpuInfo) -> bool {
    let path = paths::dev_dir().join(&gpu.node.name);
    let open = || File::options().read(true).write(true).open(&path);
    gpu.node.is_at(&path).unwrap_or(false) && open().is_ok()
}

fn make_node(path: &Path, device: u64) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is a C string that lives through the call.
    if unsafe { libc::mknod(name.as_ptr(), libc::S_IFBLK | 0o666, device) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above. The mode given to mknod is cut by the umask.
    match unsafe { libc::chmod(name.as_ptr(), 0o666) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Hardware {
    /// Opens the UVM device and takes a slot everywhere, under `token`.
    pub(crate) fn enter(control: Control, gpus: Vec<GpuMemory>, token: u64) -> Result<Self, Error> {
        // None of the failures here was measured on hardware; a broken UVM node is an unknown error there
        // too.
        let node = control.table.common_node(paths::UVM).ok_or(Error::UNKNOWN)?;
        let path = paths::dev_dir().join(paths::UVM);
        if !node.is_at(&path).unwrap_or(false) {
            return Err(Error::UNKNOWN);
        }
        let uvm = File::options()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|_| Error::UNKNOWN)?;
        let uvm_slot = control.claim(token, uvm.as_fd()).ok_or(Error::OUT_OF_MEMORY)?;
        let mut hardware = Self {
            control,
            uvm,
            uvm_slot,
            uvm_base: None,
            inherited: BTreeMap::new(),
            gpus: Vec::new(),
        };
        for memory in gpus {
            match memory.claim(token) {
                Some(slot) => hardware.gpus.push(OpenGpu { memory, slot }),
                None => {
                    hardware.leave();
                    return Err(Error::OUT_OF_MEMORY);
                }
            }
        }
        Ok(hardware)
    }

    /// Maps what a process with a context on this GPU has of the UVM device and of the GPU.
    pub(crate) fn map_base(&mut self, gpu: usize) -> Result<(), Error> {
        if self.uvm_base.is_none() {
            let base = Mapping::shared(self.uvm.as_fd(), UVM_BASE, UVM_BASE_SIZE, Some(UVM_BASE));
            self.uvm_base = Some(base.map_err(|_| Error::UNKNOWN)?);
        }
        if !self.inherited.contains_key(&gpu) {
            let at = INHERITED_BASE + self.inherited.len() * CHUNK;
            let mapping = self.gpus[gpu].memory.map_inherited(at);
            self.inherited.insert(gpu, mapping.map_err(|_| Error::UNKNOWN)?);
        }
        Ok(())
    }

    /// Frees all memory and closes everything.
    pub(crate) fn leave(self) {
        for gpu in &self.gpus {
            gpu.memory.release(gpu.slot);
        }
        punch_managed(self.uvm.as_fd(), self.uvm_slot);
        self.control.slots().release(self.uvm_slot);
    }

    /// The GPU with this place among those that the process could see.
    pub(crate) fn gpu(&self, place: usize) -> &OpenGpu {
        &self.gpus[place]
    }

    /// Maps managed memory.
    pub(crate) fn map_managed(&self, size: usize) -> Result<Mapping, Error> {
        Control::map_managed(self.uvm_slot, self.uvm.as_fd(), size).map_err(|_| Error::OUT_OF_MEMORY)
    }

    /// Unmaps managed memory and gives it back.
    pub(crate) fn free_managed(&self, mapping: Mapping) {
        let (start, len) = (mapping.as_ptr().addr(), mapping.size());
        drop(mapping);
        punch(self.uvm.as_fd(), start, len);
    }
}
