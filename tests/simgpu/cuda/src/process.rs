//! What the driver knows of the process that it is loaded in. Lies in ordinary memory, so CRIU carries it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;

use simgpu_model::{CHUNK, GpuInfo, Mapping, Uuid};

use crate::error::Error;
use crate::hardware::{Hardware, OpenGpu};
use crate::kernels::Kernel;
use crate::pieces::Pieces;

/// State as cuCheckpointProcessGetState numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Running = 0,
    Locked = 1,
    Checkpointed = 2,
}

/// Where an allocation's bytes are.
pub(crate) enum Backing {
    /// On a GPU, under this id. While checkpointed nothing is mapped there, and the addresses stay taken:
    /// seen of driver 580, whose restore maps memory at the addresses that it had.
    Device { id: u32, mapping: Mapping },
    /// On a GPU, another process's; unmapped for good by a checkpoint.
    Imported { mapping: Option<Mapping> },
    /// Managed.
    Managed { mapping: Mapping },
}

/// One allocation.
pub(crate) struct Allocation {
    pub(crate) gpu: usize,
    pub(crate) size: usize,
    pub(crate) backing: Backing,
}

impl Allocation {
    fn mapping(&self) -> Option<&Mapping> {
        match &self.backing {
            Backing::Imported { mapping } => mapping.as_ref(),
            Backing::Device { mapping, .. } | Backing::Managed { mapping } => Some(mapping),
        }
    }
}

/// A context; its share of GPU memory is an allocation of its own.
pub(crate) struct Context {
    pub(crate) gpu: usize,
    pub(crate) memory: u64,
    /// How often it was retained, for a primary context.
    pub(crate) retained: usize,
    pub(crate) primary: bool,
}

/// Regions of shared memory that a process has from cuInit on.
const SHARED: usize = 3;

/// Allocations of this size have larger pages, which the driver does not restore with access by peers: seen
/// of 512 MiB, and not of 256 MiB.
const LARGE: usize = 512 << 20;

/// See the module head.
pub(crate) struct Process {
    pub(crate) state: State,
    /// All GPUs that could be opened at cuInit, as they were then: what the process continues reporting. None
    /// before.
    pub(crate) seen: Vec<GpuInfo>,
    /// Where each of them is now.
    pub(crate) current: Vec<Uuid>,
    /// Other GPUs that could be opened at a restore: from then on a map needs a pair for each of them, too.
    pub(crate) exposed: Vec<Uuid>,
    /// Device ordinals, as places in `seen`; none before cuInit.
    pub(crate) ordinals: Vec<usize>,
    /// The nodes that a process has open, and not mapped, that uses NVML alone.
    pub(crate) nodes: Vec<File>,
    /// The open devices; none before cuInit, and while checkpointed.
    pub(crate) hardware: Option<Hardware>,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) pieces: Pieces,
    /// Per GPU, what a checkpoint saved of its memory.
    pub(crate) saved: Vec<Option<Mapping>>,
    /// A restore found too little GPU memory: no other one works.
    pub(crate) is_spoilt: bool,
    /// The driver has refused a checkpoint: it refuses every later one.
    pub(crate) is_poisoned: bool,
    /// GPUs that may access memory of another one, each with that one.
    pub(crate) peers: BTreeSet<(usize, usize)>,
    pub(crate) contexts: HashMap<usize, Context>,
    pub(crate) modules: HashMap<usize, Vec<Kernel>>,
    pub(crate) functions: HashMap<usize, Kernel>,
    pub(crate) streams: HashSet<usize>,
    /// Memory that the driver shares with itself; 2 MiB each, as with driver 580.
    shared: Vec<Mapping>,
    next_address: u64,
    next_id: u32,
    next_handle: usize,
}

impl Process {
    pub(crate) fn new(nodes: Vec<File>) -> Self {
        Self {
            state: State::Running,
            current: Vec::new(),
            saved: Vec::new(),
            is_spoilt: false,
            is_poisoned: false,
            peers: BTreeSet::new(),
            seen: Vec::new(),
            ordinals: Vec::new(),
            nodes,
            hardware: None,
            exposed: Vec::new(),
            allocations: BTreeMap::new(),
            pieces: Pieces::default(),
            contexts: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            streams: HashSet::new(),
            shared: Vec::new(),
            // Where driver 580 puts the first allocation. Addresses are the GPU's: the CPU cannot use them.
            next_address: 0x3_0200_0000,
            next_id: 1,
            next_handle: 1,
        }
    }

    /// cuInit: these GPUs are there for CUDA.
    pub(crate) fn initialise(&mut self, seen: Vec<GpuInfo>, hardware: Hardware) {
        self.current = seen.iter().map(|gpu| gpu.uuid).collect();
        self.saved = seen.iter().map(|_| None).collect();
        self.seen = seen;
        self.hardware = Some(hardware);
        self.nodes.clear();
        let region = || Mapping::shared_anonymous(2 << 20);
        self.shared = (0..SHARED).filter_map(|_| region().ok()).collect();
    }

    /// A handle that was never given before; looks like an aligned pointer.
    pub(crate) fn fresh_handle(&mut self) -> usize {
        self.next_handle += 1;
        self.next_handle << 4
    }

    /// The id of an allocation that was never given before.
    pub(crate) fn fresh_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Device addresses that were never given before.
    pub(crate) fn fresh_address(&mut self, size: usize) -> u64 {
        let address = self.next_address;
        self.next_address += size.next_multiple_of(CHUNK) as u64;
        address
    }

    /// The open devices. Calls of the application only see the process with devices: the gate is closed
    /// otherwise.
    pub(crate) fn hardware(&self) -> Result<&Hardware, Error> {
        self.hardware.as_ref().ok_or(Error::ILLEGAL_STATE)
    }

    /// The GPU at a place in `seen`.
    pub(crate) fn open_gpu(&self, place: usize) -> Result<&OpenGpu, Error> {
        Ok(self.hardware()?.gpu(place))
    }

    /// The place of a device ordinal.
    pub(crate) fn place(&self, ordinal: i32) -> Result<usize, Error> {
        let ordinal = usize::try_from(ordinal).map_err(|_| Error::INVALID_DEVICE)?;
        self.ordinals.get(ordinal).copied().ok_or(Error::INVALID_DEVICE)
    }

    /// Allocates on a GPU.
    pub(crate) fn allocate(&mut self, gpu: usize, size: usize) -> Result<u64, Error> {
        let id = self.fresh_id();
        let open = self.open_gpu(gpu)?;
        let runs = open
            .memory
            .allocate(open.slot, id, size)
            .ok_or(Error::OUT_OF_MEMORY)?;
        let mapping = open.memory.map(&runs).map_err(|_| {
            open.memory.free(open.slot, id);
            Error::OUT_OF_MEMORY
        })?;
        Ok(self.insert(gpu, size, Backing::Device { id, mapping }))
    }

    /// Records an allocation at a fresh device address.
    pub(crate) fn insert(&mut self, gpu: usize, size: usize, backing: Backing) -> u64 {
        let address = self.fresh_address(size);
        self.allocations
            .insert(address, Allocation { gpu, size, backing });
        address
    }

    /// Frees the allocation that starts at `address`.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), Error> {
        let allocation = self.allocations.remove(&address).ok_or(Error::INVALID_VALUE)?;
        match allocation.backing {
            Backing::Device { id, mapping } => {
                drop(mapping);
                let open = self.open_gpu(allocation.gpu)?;
                open.memory.free(open.slot, id);
            }
            Backing::Managed { mapping } => self.hardware()?.free_managed(mapping),
            Backing::Imported { .. } => {}
        }
        Ok(())
    }

    /// Where this process can reach `len` bytes at a device address.
    pub(crate) fn reach(&self, address: u64, len: usize) -> Result<*mut u8, Error> {
        let offset = |start: u64| simgpu_model::index(address - start);
        let is_inside = |(start, allocation): &(&u64, &Allocation)| {
            let end = offset(**start).checked_add(len);
            end.is_some_and(|end| end <= allocation.size)
        };
        let before = self.allocations.range(..=address).next_back();
        match before.filter(is_inside) {
            Some((start, allocation)) => {
                let mapping = allocation.mapping().ok_or(Error::ILLEGAL_STATE)?;
                Ok(mapping.at(offset(*start), len))
            }
            None => self.pieces.reach(address, len).ok_or(Error::INVALID_VALUE),
        }
    }

    /// Whether any memory is managed.
    pub(crate) fn has_managed(&self) -> bool {
        self.allocations
            .values()
            .any(|allocation| matches!(allocation.backing, Backing::Managed { .. }))
    }

    /// Whether a large allocation lies on a GPU whose memory another one may access.
    pub(crate) fn has_large_peer_memory(&self) -> bool {
        let is_open = |gpu| self.peers.iter().any(|(_, accessed)| *accessed == gpu);
        let is_large = |allocation: &Allocation| {
            allocation.size >= LARGE && matches!(allocation.backing, Backing::Device { .. })
        };
        self.allocations
            .values()
            .any(|allocation| is_large(allocation) && is_open(allocation.gpu))
    }

    /// Whether any memory is another process's.
    pub(crate) fn has_imported(&self) -> bool {
        let is_imported = |allocation: &Allocation| matches!(allocation.backing, Backing::Imported { .. });
        self.allocations.values().any(is_imported) || self.pieces.has_imported()
    }
}
