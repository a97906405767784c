//! `firn inspect`: what a checkpoint holds and whether it is whole.

use anyhow::Result;
use firn_image::manifest::{Manifest, StoredMemory};
use serde_json::json;

use crate::args::InspectArgs;
use crate::image::{self, Found};
use crate::output::{self, line};
use crate::text;

/// True: the checkpoint is whole.
pub fn run(args: &InspectArgs) -> Result<bool> {
    let (found, failure) = image::look(&args.dir);
    if args.json {
        let Found { manifest, images } = &found;
        output::json(&json!({"manifest": manifest, "images": images, "failure": failure}))?;
    } else {
        if !found.images.is_empty() {
            print(&found);
        }
        match &failure {
            None => line!("integrity  whole"),
            Some(failure) => line!("integrity  {failure}"),
        }
    }
    Ok(failure.is_none())
}

fn print(found: &Found) {
    match &found.manifest {
        Some(manifest) => print_manifest(manifest),
        None => {
            line!("manifest   none: not made by firn. It restores only into a container that asks for no GPU")
        }
    }
    line!(
        "images     {} files, {}",
        found.images.len(),
        text::bytes(found.bytes())
    );
}

fn print_manifest(manifest: &Manifest) {
    let versions = &manifest.versions;
    let made_by = [
        ("firn", &versions.firn),
        ("CRIU", &versions.criu),
        ("runc", &versions.runc),
        ("Linux", &versions.kernel),
    ];
    let made_by: Vec<String> = made_by
        .iter()
        .filter(|(_, v)| !v.is_empty())
        .map(|(name, v)| format!("{name} {v}"))
        .collect();
    line!("made by    {}", made_by.join(", "));
    if let Some(driver) = &manifest.driver {
        line!(
            "driver     {} (CUDA {})",
            driver.driver,
            text::cuda_version(driver.cuda)
        );
    }
    for gpu in &manifest.gpus {
        let memory = text::bytes(gpu.memory_total);
        line!(
            "gpu        {} {}, {memory}, minor {}, {}",
            gpu.uuid,
            gpu.name,
            gpu.minor,
            gpu.pci_address
        );
    }
    if let Some(released) = &manifest.released_gpus {
        line!("devices    none, device-free: it restores with any device or without one");
        for gpu in released {
            line!("let go     {} {}, {}", gpu.uuid, gpu.name, gpu.pci_address);
        }
    }
    print_processes(manifest);
    if let Some(bulk) = &manifest.bulk {
        print_stored(bulk);
    }
    print_dump_options(manifest);
    for mount in &manifest.mounts {
        line!(
            "mount      {} (from {})",
            mount.destination.display(),
            mount.source_name
        );
    }
}

fn print_processes(manifest: &Manifest) {
    match manifest.processes.as_slice() {
        [] => line!("processes  none with GPU state"),
        processes => {
            let pids: Vec<String> = processes.iter().map(|process| process.pid.to_string()).collect();
            line!(
                "processes  {} with GPU state: pid {} in the container",
                pids.len(),
                pids.join(", ")
            );
        }
    }
}

fn print_stored(bulk: &StoredMemory) {
    let (all, written) = (text::bytes(bulk.bytes), text::bytes(bulk.written));
    line!("memory     {all} in store {}, {written} new", bulk.store);
    line!("           index {}", bulk.index);
    if let Some(parent) = &bulk.parent {
        line!("parent     {parent}: the container's checkpoint before, which this one does not need");
    }
}

fn print_dump_options(manifest: &Manifest) {
    let flags = [
        ("tcp-established", manifest.dump.open_tcp),
        ("ext-unix-sk", manifest.dump.external_unix_sockets),
        ("shell-job", manifest.dump.terminal),
        ("file-locks", manifest.dump.file_locks),
    ];
    let flags: Vec<&str> = flags
        .iter()
        .filter(|(_, set)| *set)
        .map(|(name, _)| *name)
        .collect();
    line!(
        "dumped     {}",
        if flags.is_empty() {
            "without options".to_owned()
        } else {
            format!("with {}", flags.join(", "))
        }
    );
}
