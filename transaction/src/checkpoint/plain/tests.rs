//! Checkpoints of containers without GPUs. Needs root.

use firn_gpu::Backend;
use std::fs;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use firn_image::manifest::DumpFlags;
use firn_process::reaper::Reaper;

use super::super::Overrides;
use super::*;
use crate::container::{ContainerTraits, Process, StdioPaths};
use crate::image_dir::ImageDir;
use crate::options::RuncOptions;
use crate::runc::Runc;

/// One page: what a tmpfs of the smallest size holds.
const PAGE: usize = 4096;

fn container(bundle: &Path, reaper: &Reaper) -> Container {
    let options = RuncOptions {
        binary_name: "/nonexistent/runc".to_owned(),
        ..RuncOptions::default()
    };
    let runc = Runc::new("job", "default", bundle, &options, reaper.clone());
    let init = Process::new("", StdioPaths::default(), Vec::new());
    let traits = ContainerTraits {
        other_gpus: false,
        device_free: false,
        criu: None,
        backend: Backend::None,
        private_pids: true,
        interposed: false,
    };
    Container::new("job", bundle.to_owned(), runc, options, init, traits, None)
}

fn request(image: PathBuf) -> Request {
    Request {
        image: ImageDir::unopened(&image),
        work: None,
        parent: None,
        exit: false,
        flags: DumpFlags::default(),
        empty_namespaces: Vec::new(),
        meeting: None,
        layer: None,
        files_copied: false,
        inline: false,
        overrides: Overrides::default(),
    }
}

/// A path that exists nowhere, `length` bytes long.
fn long_path(length: usize) -> PathBuf {
    let mut path = "/nonexistent".to_owned();
    while path.len() + 202 <= length {
        path += &format!("/{}", "d".repeat(200));
    }
    let rest = length - path.len();
    path += &format!("/{}", "d".repeat(rest - 1));
    assert_eq!(path.len(), length);
    path.into()
}

/// Length of the journal's first line, without the bundle's path in it.
async fn first_line(reaper: &Reaper, image: PathBuf) -> usize {
    let bundle = tempfile::tempdir().unwrap();
    let container = container(bundle.path(), reaper);
    let (intent, cancel) = (request(image).intent(&container), CancellationToken::default());
    let bundle_bytes = bundle.path().as_os_str().len();
    let begun = Transaction::begin_within(&container, configured(), intent, reaper, cancel);
    begun.await.unwrap();
    let line = fs::read(bundle.path().join(journal::FILE)).unwrap();
    line.len() - bundle_bytes
}

#[tokio::test]
async fn a_disk_that_fills_after_the_first_journal_line_leaves_no_files() {
    if let Err(errno) = unshare(CloneFlags::CLONE_NEWNS) {
        eprintln!("skipped: needs root for a mount namespace ({errno})");
        return;
    }
    let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
    let (reaper, bundle) = (Reaper::start().unwrap(), tempfile::tempdir().unwrap());
    let page = Some("size=4096");
    mount(
        Some("tmpfs"),
        bundle.path(),
        Some("tmpfs"),
        MsFlags::empty(),
        page,
    )
    .unwrap();
    // The page has room for the first line only.
    let short = 300;
    let line = first_line(&reaper, long_path(short)).await + bundle.path().as_os_str().len();
    let image = long_path(short + PAGE - line - 8);
    let container = container(bundle.path(), &reaper);
    let refused = super::super::run(&container, &request(image.clone()), &reaper)
        .await
        .unwrap_err();
    let text = refused.to_string();
    let left = fs::read_dir(bundle.path()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    umount2(bundle.path(), MntFlags::MNT_DETACH).unwrap();
    assert!(
        text.starts_with("FIRN-JOURNAL: ") && text.contains("No space left"),
        "{text}"
    );
    assert!(left.is_empty(), "{left:?}");
}
