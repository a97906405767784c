//! A container with a cgroup of its own and a runtime that does nothing, for tests.

use std::path::Path;

use firn_config::Config;
use firn_gpu::Backend;
use firn_image::manifest::DumpFlags;
use firn_oci::Spec;
use firn_process::cancel::CancellationToken;
use firn_process::cgroup::Cgroup;
use firn_process::cgroup::testing::Scratch;
use firn_process::reaper::Reaper;
use serde_json::json;
use tempfile::TempDir;

use crate::container::{Container, ContainerTraits, Process, StdioPaths};
use crate::journal::Operation;
use crate::options::RuncOptions;
use crate::prepared_restore::{PlainPart, PreparedRestore};
use crate::runc::Runc;
use crate::transaction::{Intent, Transaction};

/// A container whose spec names the cgroup of its id. `runtime` is any program.
pub(super) fn container(id: &str, bundle: &Path, runtime: &str, reaper: &Reaper) -> Container {
    let spec = json!({"linux": {"cgroupsPath": format!("/{id}")}});
    Spec::from(spec).save(bundle).unwrap();
    let options = RuncOptions {
        binary_name: runtime.to_owned(),
        root: bundle.join("root").display().to_string(),
        ..RuncOptions::default()
    };
    let runc = Runc::new(id, "default", bundle, &options, reaper.clone());
    let init = Process::new("", StdioPaths::default(), Vec::new());
    let traits = ContainerTraits {
        backend: Backend::Nvidia,
        other_gpus: false,
        device_free: false,
        criu: None,
        private_pids: true,
        interposed: false,
    };
    Container::new(id, bundle.to_owned(), runc, options, init, traits, None)
}

/// A container whose cgroup exists.
pub(super) struct Stub {
    pub container: Container,
    pub scratch: Scratch,
    _bundle: TempDir,
}

impl Stub {
    /// None where cgroups cannot be made.
    pub(super) fn new(runtime: &str, reaper: &Reaper) -> Option<Self> {
        let is_found = |scratch: &Scratch| {
            let path = format!("/{}", name(scratch));
            Cgroup::by_spec(&path, "", false).is_ok_and(|cgroup| cgroup.exists())
        };
        let scratch = Scratch::all().into_iter().find(is_found)?;
        let bundle = TempDir::new().unwrap();
        Some(Self {
            container: container(&name(&scratch), bundle.path(), runtime, reaper),
            scratch,
            _bundle: bundle,
        })
    }

    /// A restore of this container that has begun.
    pub(super) async fn transaction<'c>(&'c self, reaper: &'c Reaper) -> Transaction<'c> {
        let intent = Intent {
            operation: Operation::Restore,
            gpu: true,
            id: String::new(),
            exit: false,
            image: "/image".into(),
            work: self.container.bundle.join("work"),
            work_is_ours: true,
            was_frozen: false,
        };
        let (config, cancel) = (Config::default(), CancellationToken::default());
        let begun = Transaction::begin_within(&self.container, config, intent, reaper, cancel);
        begun.await.unwrap()
    }
}

fn name(scratch: &Scratch) -> String {
    let dir = scratch.cgroup.primary_dir();
    dir.file_name().unwrap().to_str().unwrap().to_owned()
}

/// A restore from `image`.
pub(super) fn prepared(image: &Path) -> PreparedRestore {
    PreparedRestore {
        id: "job".to_owned(),
        facts: None,
        image: image.to_owned(),
        flags: DumpFlags::default(),
        verified: None,
        bytes: 0,
        plain: PlainPart::default(),
        gpu: None,
    }
}
