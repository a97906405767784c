//! `firn inspect`: what a checkpoint holds and whether it is whole.

mod json;
mod processes;

use anyhow::{Result, bail};
use firn_host::ProblemReport;
use firn_image::manifest::{Manifest, Origin, StoredMemory};

use crate::args::InspectArgs;
use crate::image::{ImageSummary, Sizes};
use crate::output::{self, Tone, line, print_toned};
use crate::text;
use crate::view::{Subject, View};
use processes::Tree;

/// True: the checkpoint is whole.
pub fn run(args: &InspectArgs) -> Result<bool> {
    let place = match Subject::of(&args.subject) {
        Subject::Container(_) => bail!(
            "{0} is a container, and no checkpoint. hint: `firn ps {0}` shows it",
            args.subject.subject
        ),
        Subject::Checkpoint(place) => place,
    };
    let view = View::open(&place, &args.subject.containerd)?;
    let (found, failure) = view.look();
    let has_tree = args.processes && !found.images.is_empty();
    let tree = has_tree
        .then(|| Tree::read(&view.dir, found.manifest.as_ref()))
        .transpose();
    let (tree, failure) = match tree {
        Ok(tree) => (tree, failure),
        Err(fault) => (None, failure.or(Some(fault))),
    };
    let sizes = Sizes::of(&found, view.written);
    if args.json {
        output::json(&json::Checkpoint {
            what: &view.what,
            manifest: found.manifest.as_ref().map(json::ManifestReport::of),
            images: &found.images,
            sizes,
            image: image_name(&view, &found),
            unread: view.unread(),
            failure: failure.as_ref(),
            processes: tree.as_ref().map(Tree::shown),
        })?
    } else {
        show(&view, &found, &sizes, tree, failure.as_ref(), args.verbose)
    }
    Ok(failure.is_none())
}

/// Name of the image that the container began with.
fn image_name<'a>(view: &'a View, found: &'a ImageSummary) -> Option<&'a str> {
    let of_index = view.index.as_ref().map(|index| index.base());
    let origin = found
        .manifest
        .as_ref()
        .and_then(|manifest| manifest.origin.as_ref());
    let of_origin = origin.map(|origin| &*origin.image);
    [of_index, of_origin]
        .into_iter()
        .flatten()
        .find(|name| !name.is_empty())
}

fn show(
    view: &View,
    found: &ImageSummary,
    sizes: &Sizes,
    tree: Option<Tree>,
    failure: Option<&ProblemReport>,
    is_verbose: bool,
) {
    match failure {
        None => print_toned(Some((Tone::Good, "whole")), "verdict    whole"),
        Some(failure) => print_toned(Some((Tone::Bad, &failure.code)), &format!("verdict    {failure}")),
    }
    line!("subject    {}", view.what);
    if found.images.is_empty() {
        return;
    }
    let origin = found
        .manifest
        .as_ref()
        .and_then(|manifest| manifest.origin.as_ref());
    let of_index = view.index.as_ref().and_then(|index| index.container());
    match (origin, of_index) {
        (Some(origin), _) => print_origin(origin),
        (None, Some(container)) => line!("container  {container}"),
        (None, None) => {}
    }
    if let Some(name) = image_name(view, found) {
        line!("image      {name}");
    }
    print_sizes(sizes);
    if view.unread() > 0 {
        line!(
            "unread     {} of memory, of which only the size was compared; a restore compares it",
            text::bytes(view.unread())
        );
    }
    print(found, is_verbose);
    if let Some(tree) = tree {
        line!("tree");
        tree.print();
    }
}

fn print_origin(origin: &Origin) {
    let Origin { container, host, .. } = origin;
    line!("container  {container} on {host}, {}", text::time(origin.made));
    if !origin.command.is_empty() {
        line!("command    {}", origin.command);
    }
}

fn print_sizes(sizes: &Sizes) {
    let named = sizes.named().into_iter().filter(|(_, bytes)| *bytes > 0);
    let named: Vec<String> = named
        .map(|(name, bytes)| format!("{} {name}", text::bytes(bytes)))
        .collect();
    line!("size       {}: {}", text::bytes(sizes.all()), named.join(", "));
}

fn print(found: &ImageSummary, is_verbose: bool) {
    match &found.manifest {
        Some(manifest) => print_manifest(manifest, is_verbose),
        None => {
            line!("manifest   none: not made by firn. It restores only into a container that asks for no GPU")
        }
    }
    if is_verbose {
        let (count, bytes) = (found.images.len(), text::bytes(found.bytes()));
        line!("files      {count} of CRIU, {bytes}");
    }
}

fn print_manifest(manifest: &Manifest, is_verbose: bool) {
    print_gpus(manifest);
    print_processes(manifest);
    if let Some(bulk) = &manifest.bulk {
        print_stored(bulk);
    }
    if is_verbose {
        print_versions(manifest);
        print_dump_options(manifest);
        for mount in &manifest.mounts {
            line!(
                "mount      {} (from {})",
                mount.destination.display(),
                mount.source_name
            );
        }
    }
}

fn print_versions(manifest: &Manifest) {
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
        .map(|(name, v)| {
            let number = v
                .strip_prefix("Version: ")
                .or_else(|| v.strip_prefix("runc version "));
            format!("{name} {}", number.unwrap_or(v))
        })
        .collect();
    line!("made by    {}", made_by.join(", "));
}

fn print_gpus(manifest: &Manifest) {
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
