//! `firn inspect`: what a checkpoint holds and whether it is whole.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::Result;
use firn_oci::manifest::{ImageFile, Manifest, describe_images};
use serde_json::json;

use crate::args::InspectArgs;
use crate::failure::Failure;
use crate::output::{self, line};
use crate::text;

/// What was found. A checkpoint without manifest is whole if CRIU finished it.
struct Found {
    manifest: Option<Manifest>,
    images: Vec<ImageFile>,
}

/// True: the checkpoint is whole.
pub fn run(args: &InspectArgs) -> Result<bool> {
    let (found, failure) = look(&args.dir);
    if args.json {
        let (manifest, images) = found
            .as_ref()
            .map_or((None, &[][..]), |f| (f.manifest.as_ref(), &f.images));
        output::json(&json!({"manifest": manifest, "images": images, "failure": failure}))?;
    } else {
        if let Some(found) = &found {
            print(found);
        }
        match &failure {
            None => line!("integrity  whole"),
            Some(failure) => line!("integrity  {failure}"),
        }
    }
    Ok(failure.is_none())
}

fn look(dir: &Path) -> (Option<Found>, Option<Failure>) {
    let manifest = match Manifest::read(dir) {
        Ok(manifest) => manifest,
        Err(error) => return (None, Some(error.into())),
    };
    match manifest {
        Some(manifest) => {
            let failure = manifest.verify_images(dir).err().map(Failure::from);
            let images = manifest.images.clone();
            (
                Some(Found {
                    manifest: Some(manifest),
                    images,
                }),
                failure,
            )
        }
        None => match describe_images(dir, &AtomicBool::new(false)) {
            Ok(images) => (
                Some(Found {
                    manifest: None,
                    images,
                }),
                None,
            ),
            Err(error) => (None, Some(error.into())),
        },
    }
}

fn print(found: &Found) {
    match &found.manifest {
        Some(manifest) => print_manifest(manifest),
        None => {
            line!("manifest   none: not made by firn. It restores only into a container that asks for no GPU")
        }
    }
    let size = found.images.iter().map(|file| file.size).sum();
    line!("images     {} files, {}", found.images.len(), text::bytes(size));
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
    for mount in &manifest.mounts {
        line!(
            "mount      {} (from {})",
            mount.destination.display(),
            mount.source_name
        );
    }
}
