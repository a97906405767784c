//! Makes and removes the devices of a node.
//!
//! The control device is made last and removed first, so a node with one has all its devices. There is no
//! other record: it lists what there is.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use simgpu_model::{Control, GpuInfo, GpuMemory, Node, NodeTable, NvLinks, TableError, Uuid, paths};

use crate::loops::{self, Partitions};

const UVM_SIZE: u64 = 1 << 47;
const TOOLS_SIZE: u64 = 1 << 20;

/// A GPU as the command line asks for it; what it leaves open is filled in by [`setup`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuRequest {
    pub name: Option<String>,
    pub uuid: Option<Uuid>,
    pub memory: Option<u64>,
    pub pci_address: Option<String>,
    pub pci_device_id: Option<u32>,
    pub minor: Option<u32>,
    pub mig: bool,
    pub persistence: Option<bool>,
}

/// What `setup` is asked for.
pub struct Request {
    pub driver_version: String,
    pub cuda_version: i32,
    pub gpus: Vec<GpuRequest>,
    pub links: Vec<NvLinks>,
    /// Whether the nodes whose numbers the kernel picks have another major number than those of other nodes.
    pub other_majors: bool,
}

impl GpuRequest {
    fn fill(self, index: u32) -> Result<GpuInfo> {
        let minor = self.minor.unwrap_or(index);
        Ok(GpuInfo {
            uuid: self.uuid.map_or_else(random_uuid, Ok)?,
            name: self.name.unwrap_or_else(|| "NVIDIA H200".to_owned()),
            pci_address: self
                .pci_address
                .unwrap_or_else(|| format!("00000000:{:02X}:00.0", 0x17 + 8 * index)),
            pci_device_id: self.pci_device_id.unwrap_or(0x2335_10de),
            memory: self.memory.unwrap_or(1 << 30),
            minor,
            mig: self.mig,
            persistence: self.persistence.unwrap_or(true),
            node: Node {
                name: paths::gpu(minor),
                major: 0,
                minor: 0,
            },
        })
    }

    fn is_met_by(&self, gpu: &GpuInfo) -> bool {
        fn same<T: PartialEq>(asked: Option<&T>, got: &T) -> bool {
            asked.is_none_or(|asked| asked == got)
        }
        same(self.name.as_ref(), &gpu.name)
            && same(self.uuid.as_ref(), &gpu.uuid)
            && same(self.memory.as_ref(), &gpu.memory)
            && same(self.pci_address.as_ref(), &gpu.pci_address)
            && same(self.pci_device_id.as_ref(), &gpu.pci_device_id)
            && same(self.minor.as_ref(), &gpu.minor)
            && same(self.persistence.as_ref(), &gpu.persistence)
            && self.mig == gpu.mig
    }
}

/// Makes the devices; does nothing when devices that meet the request are there.
pub fn setup(dev: &Path, request: Request) -> Result<NodeTable> {
    if let Some(table) = existing(dev)? {
        let same = table.driver_version == request.driver_version
            && table.cuda_version == request.cuda_version
            && table.gpus.len() == request.gpus.len()
            && table.links == request.links
            && has_other_majors(&table) == request.other_majors
            && request
                .gpus
                .iter()
                .zip(&table.gpus)
                .all(|(asked, gpu)| asked.is_met_by(gpu));
        if same {
            return Ok(table);
        }
        bail!(
            "{} has other simulated GPUs; hint: simgpu teardown",
            dev.display()
        );
    }
    let gpus = request
        .gpus
        .into_iter()
        .zip(0..)
        .map(|(gpu, index)| gpu.fill(index))
        .collect::<Result<Vec<_>>>()?;
    for (index, gpu) in gpus.iter().enumerate() {
        if gpus[..index]
            .iter()
            .any(|other| other.uuid == gpu.uuid || other.minor == gpu.minor)
        {
            bail!("two GPUs have the same UUID or minor number: {}", gpu.uuid);
        }
    }
    for links in &request.links {
        if let NvLinks::Between(a, b, _) = links {
            ensure!(
                a != b && *a.max(b) < gpus.len(),
                "NVLinks between {a} and {b}, of {} GPUs",
                gpus.len()
            );
        }
    }
    let mut made = Vec::new();
    let table = NodeTable {
        driver_version: request.driver_version,
        cuda_version: request.cuda_version,
        common: Vec::new(),
        gpus,
        links: request.links,
    };
    let table = make(dev, table, request.other_majors, &mut made);
    if table.is_err() {
        made.iter().for_each(|path| {
            // The error that made us give up is the one to report.
            let _ = remove(path);
        });
    }
    table
}

/// Whether the control device and UVM's have different major numbers.
fn has_other_majors(table: &NodeTable) -> bool {
    let major = |name| table.common_node(name).map(|node| node.major);
    major(paths::CONTROL) != major(paths::UVM)
}

fn make(dev: &Path, mut table: NodeTable, other_majors: bool, made: &mut Vec<PathBuf>) -> Result<NodeTable> {
    let mut attach = |name: &str, file: &File, partitions| {
        let node = loops::attach(dev, name, file, partitions)?;
        made.push(dev.join(name));
        Ok::<Node, anyhow::Error>(node)
    };
    for gpu in &mut table.gpus {
        let file = loops::backing(&gpu.node.name, GpuMemory::device_size(gpu.memory))?;
        GpuMemory::format(&file, gpu.memory).with_context(|| format!("cannot make {}", gpu.node.name))?;
        gpu.node = attach(&gpu.node.name, &file, Partitions::None)?;
    }
    let partitions = if other_majors {
        Partitions::One
    } else {
        Partitions::None
    };
    let mut uvm = attach(paths::UVM, &loops::backing(paths::UVM, UVM_SIZE)?, partitions)?;
    let mut tools = attach(
        paths::UVM_TOOLS,
        &loops::backing(paths::UVM_TOOLS, TOOLS_SIZE)?,
        partitions,
    )?;
    if other_majors {
        uvm = loops::renumber(dev, &uvm, UVM_SIZE)?;
        tools = loops::renumber(dev, &tools, TOOLS_SIZE)?;
    }
    let control = loops::backing(paths::CONTROL, Control::device_size())?;
    Control::format(&control)?;
    let node = attach(paths::CONTROL, &control, Partitions::None)?;
    table.common = vec![node, uvm, tools];
    let device = File::options()
        .read(true)
        .write(true)
        .open(dev.join(paths::CONTROL))?;
    Control::publish(&device, &table)?;
    Ok(table)
}

/// Removes the devices; nothing to do is no error.
pub fn teardown(dev: &Path) -> Result<()> {
    let Some(table) = existing(dev)? else {
        return Ok(());
    };
    let gpus = table.gpus.iter().map(|gpu| &gpu.node);
    for node in table.common.iter().chain(gpus) {
        let path = dev.join(&node.name);
        remove(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    if path.exists() {
        loops::detach(path)?;
        fs::remove_file(path)?;
    }
    Ok(())
}

/// The table of the devices in `dev`; nothing when there are none or only what a node that is gone has left.
fn existing(dev: &Path) -> Result<Option<NodeTable>> {
    if !dev.join(paths::CONTROL).exists() {
        return Ok(None);
    }
    match Control::open(dev) {
        Ok(control) => Ok(Some(control.table)),
        // A loop device without memory behind it.
        Err(TableError::Io(_)) => Ok(None),
        Err(error) => {
            Err(error).with_context(|| format!("cannot use {}", dev.join(paths::CONTROL).display()))
        }
    }
}

/// The node's table, for commands that need one.
pub fn table(dev: &Path) -> Result<NodeTable> {
    Ok(Control::open(dev)
        .with_context(|| format!("no simulated GPUs in {}", dev.display()))?
        .table)
}

fn random_uuid() -> Result<Uuid> {
    let text = fs::read_to_string("/proc/sys/kernel/random/uuid").context("cannot draw a UUID")?;
    Ok(format!("GPU-{}", text.trim()).parse()?)
}
