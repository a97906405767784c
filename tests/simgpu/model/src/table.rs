//! The control device: what the node's driver is, which GPUs it has, and which processes use it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::mapping::Mapping;
use crate::memory::punch;
use crate::slots::{SLOT_TABLE_SIZE, Slots};
use crate::{Uuid, paths};

const MAGIC: &[u8; 8] = b"SIMGPUC1";
/// Bytes of the control device that hold the table; the slots follow.
pub const TABLE_SIZE: usize = 64 << 10;
/// Bytes of the control device.
pub(crate) const CONTROL_SIZE: usize = TABLE_SIZE + SLOT_TABLE_SIZE;

/// A device node of the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// File name in `/dev`.
    pub name: String,
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl Node {
    /// The device number as `stat` and `mknod` have it.
    pub fn device(&self) -> u64 {
        libc::makedev(self.major, self.minor)
    }

    /// Whether `path` is this node.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let meta = std::fs::metadata(path)?;
        Ok(meta.file_type().is_block_device() && meta.rdev() == self.device())
    }
}

/// A GPU of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInfo {
    /// Identity.
    pub uuid: Uuid,
    /// Model name.
    pub name: String,
    /// PCI address, `00000000:17:00.0`.
    pub pci_address: String,
    /// `(device << 16) | vendor`.
    pub pci_device_id: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// NVML minor number: N of `/dev/nvidiaN`.
    pub minor: u32,
    /// Whether MIG mode is on.
    pub mig: bool,
    /// Whether persistence mode is on.
    pub persistence: bool,
    /// Its device node.
    pub node: Node,
}

/// What the control device reports about its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTable {
    /// Full driver version, `580.159.04`.
    pub driver_version: String,
    /// CUDA version as `cuDriverGetVersion` codes it.
    pub cuda_version: i32,
    /// Nodes that belong to no single GPU.
    pub common: Vec<Node>,
    /// GPUs in NVML order.
    pub gpus: Vec<GpuInfo>,
    /// What joins them.
    #[serde(default)]
    pub links: Vec<NvLinks>,
}

/// NVLinks of GPUs, which are named by their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NvLinks {
    /// So many links between two GPUs.
    Between(usize, usize, u32),
    /// So many links of every GPU, all of them to switches.
    ToSwitches(u32),
}

/// Where one NVLink of a GPU ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvLinkEnd {
    /// At the GPU in this place.
    Gpu(usize),
    /// At a switch.
    Switch,
}

/// Number of a driver's branch; 0 for a version of another form.
pub fn branch_of(driver_version: &str) -> u32 {
    let branch = driver_version
        .split('.')
        .next()
        .and_then(|text| text.parse().ok());
    branch.unwrap_or(0)
}

/// A control device that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// It cannot be opened or read.
    #[error("cannot use the control device; hint: simgpu setup")]
    Io(#[from] io::Error),
    /// It is something else than this simulator's device.
    #[error("the control device is not that of a simulated driver")]
    Foreign,
    /// Its table cannot be read.
    #[error("the control device's table is damaged")]
    Damaged(#[from] serde_json::Error),
}

impl NodeTable {
    /// The table as the control device holds it.
    pub fn encode(&self) -> Result<Vec<u8>, TableError> {
        let json = serde_json::to_vec(self)?;
        if json.len() > TABLE_SIZE - 16 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many GPUs for the table").into());
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend((json.len() as u64).to_le_bytes());
        bytes.extend(json);
        Ok(bytes)
    }

    fn read(file: &File) -> Result<Self, TableError> {
        let mut bytes = vec![0; TABLE_SIZE];
        file.read_exact_at(&mut bytes, 0)?;
        let (magic, rest) = bytes.split_at(8);
        let (len, rest) = rest.split_at(8);
        if magic != MAGIC {
            return Err(TableError::Foreign);
        }
        let len = u64::from_le_bytes(len.try_into().map_err(|_| TableError::Foreign)?);
        let json = rest.get(..crate::index(len)).ok_or(TableError::Foreign)?;
        Ok(serde_json::from_slice(json)?)
    }

    /// The node with this name that belongs to no single GPU.
    pub fn common_node(&self, name: &str) -> Option<&Node> {
        self.common.iter().find(|node| node.name == name)
    }

    /// Where the NVLinks of the GPU in this place end, in their order.
    pub fn nvlinks(&self, gpu: usize) -> Vec<NvLinkEnd> {
        let of = |links: &NvLinks| match *links {
            NvLinks::Between(a, b, count) if a == gpu => vec![NvLinkEnd::Gpu(b); count as usize],
            NvLinks::Between(a, b, count) if b == gpu => vec![NvLinkEnd::Gpu(a); count as usize],
            NvLinks::Between(..) => Vec::new(),
            NvLinks::ToSwitches(count) => vec![NvLinkEnd::Switch; count as usize],
        };
        self.links.iter().flat_map(of).collect()
    }

    /// Number of the driver's branch, 580.
    pub fn branch(&self) -> u32 {
        branch_of(&self.driver_version)
    }

    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: Uuid) -> Option<&GpuInfo> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }
}

/// The opened control device.
#[derive(Debug)]
pub struct Control {
    file: File,
    /// Its text.
    pub table: NodeTable,
    mapping: Mapping,
}

impl Control {
    /// Opens `nvidiactl` in `dev`.
    pub fn open(dev: &Path) -> Result<Self, TableError> {
        let path = dev.join(paths::CONTROL);
        // Opening a node of another kind could have effects (a tape rewinds); the simulated one is a block
        // device.
        if !std::fs::metadata(&path)?.file_type().is_block_device() {
            return Err(TableError::Foreign);
        }
        let file = File::options().read(true).write(true).open(path)?;
        let table = NodeTable::read(&file)?;
        let mapping = Mapping::shared(file.as_fd(), 0, CONTROL_SIZE, None)?;
        Ok(Self { file, table, mapping })
    }

    /// Bytes of the control device.
    pub fn device_size() -> u64 {
        (CONTROL_SIZE as u64).next_multiple_of(1 << 20)
    }

    /// Makes the slots of a fresh control device over `file`.
    pub fn format(file: &File) -> io::Result<()> {
        let mapping = Mapping::shared(file.as_fd(), 0, CONTROL_SIZE, None)?;
        Slots::within(&mapping, TABLE_SIZE).initialise();
        Ok(())
    }

    /// Writes the table of a fresh control device.
    pub fn publish(file: &File, table: &NodeTable) -> Result<(), TableError> {
        file.write_all_at(&table.encode()?, 0)?;
        Ok(())
    }

    /// The processes that use managed memory windows, one slot each.
    pub fn slots(&self) -> &Slots {
        Slots::within(&self.mapping, TABLE_SIZE)
    }

    /// Takes a managed memory window for the process with this token and the calling thread.
    pub fn claim(&self, token: u64, uvm: BorrowedFd<'_>) -> Option<usize> {
        self.slots().claim(token, |dead| punch_managed(uvm, dead))
    }

    /// The descriptor of the control device.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// Addresses at which the process in `slot` may have managed memory: one 4 GiB window in each TiB of the
/// ordinary mmap range, so that no two processes share an offset of the UVM device although offsets equal
/// addresses.
pub(crate) fn managed_windows(slot: usize) -> impl Iterator<Item = usize> {
    (0x7d..=0x7f).rev().map(move |tib: usize| tib << 40 | slot << 32)
}

impl Control {
    /// Maps `len` bytes of managed memory for the process in `slot`, offset equal to address.
    pub fn map_managed(slot: usize, uvm: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let step = crate::CHUNK;
        let places = managed_windows(slot).flat_map(|window| (window..window + (1 << 32)).step_by(step));
        for at in places.filter(|at| at % (1 << 32) + len <= 1 << 32) {
            match Mapping::shared(uvm, at, len, Some(at)) {
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => continue,
                done => return done,
            }
        }
        Err(io::ErrorKind::OutOfMemory.into())
    }
}

/// Frees all managed memory of the process in `slot`.
pub fn punch_managed(uvm: BorrowedFd<'_>, slot: usize) {
    for window in managed_windows(slot) {
        punch(uvm, window, 1 << 32);
    }
}
