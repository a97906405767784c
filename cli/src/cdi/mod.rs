//! `firn cdi`: the node's CDI files.

mod driver;
mod generate;
mod list;

pub use generate::is_ours;

use anyhow::Result;
use firn_cdi::{Device, DeviceNode, Edits};
use firn_gpu::Gpu;

use crate::args::CdiCommand;

/// True: all is well.
pub fn run(command: &CdiCommand) -> Result<bool> {
    match command {
        CdiCommand::Generate(args) => generate::run(args),
        CdiCommand::List(args) => list::run(args),
    }
}

/// CDI devices of GPUs with these nodes: each GPU by its index and by its UUID, and `all`.
pub fn devices(gpus: &[Gpu], nodes: &[Vec<DeviceNode>]) -> Vec<Device> {
    let device = |name: String, device_nodes: Vec<DeviceNode>| Device {
        name,
        edits: Edits {
            device_nodes,
            ..Edits::default()
        },
    };
    let each = gpus
        .iter()
        .zip(nodes)
        .enumerate()
        .flat_map(|(index, (gpu, own))| {
            [index.to_string(), gpu.uuid.to_string()].map(|name| device(name, own.clone()))
        });
    each.chain([device("all".to_owned(), nodes.concat())]).collect()
}
