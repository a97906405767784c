//! What `nvidia-smi` would show.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use simgpu_model::{CudaProcess, GpuMemory};

use crate::setup;

/// Prints the GPUs, their memory and the processes that have some of it.
pub fn print(dev: &Path) -> Result<()> {
    let table = setup::table(dev)?;
    println!("driver {} cuda {}", table.driver_version, table.cuda_version);
    let processes = CudaProcess::all();
    for (index, gpu) in table.gpus.iter().enumerate() {
        let path = dev.join(&gpu.node.name);
        let file = File::options().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let memory = GpuMemory::open(file).with_context(|| format!("cannot use {}", path.display()))?;
        memory.sweep();
        let used = (memory.total() - memory.free_bytes()) >> 20;
        println!(
            "gpu {index} {} {} {} minor={} node={}:{} used={used}MiB total={}MiB",
            gpu.uuid,
            gpu.name,
            gpu.pci_address,
            gpu.minor,
            gpu.node.major,
            gpu.node.minor,
            memory.total() >> 20
        );
        for (slot, token) in memory.slots().owners() {
            let mib = memory.used_by(slot) >> 20;
            match processes.iter().find(|process| process.token == token) {
                Some(process) => {
                    let comm = fs::read_to_string(format!("/proc/{}/comm", process.pid)).unwrap_or_default();
                    println!(
                        "  pid={} {} state={} used={mib}MiB",
                        process.pid,
                        comm.trim_end(),
                        process.state
                    );
                }
                None => println!("  pid=? (not in this pid namespace) used={mib}MiB"),
            }
        }
    }
    Ok(())
}
