//! A second container of a shim, created by Task calls with mounts of the test's choice.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use containerd_shim_protos::api::{CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse};
use containerd_shim_protos::types::mount::Mount;
use firn_lab::{Container, Task, describe, nothing_left};
use serde_json::{Value, json};

use crate::conformance::Place;

/// Where the points keep what they mount, on the node.
pub const HERE: &str = "/run/mount-points";

/// Id of the container that is made by hand.
pub const ID: &str = "mounted";

/// A shim that runs a second container, created by direct calls, next to the one that containerd has it run.
pub struct Lab<'p> {
    pub place: &'p Place<'p>,
    pub task: Task,
    pub first: Container<'p>,
}

impl<'p> Lab<'p> {
    /// `HERE/source` holds a busybox and can be a root file system.
    pub fn new(place: &'p Place<'p>) -> Result<Self> {
        let first = place.start("c", &[], "while :; do sleep 1; done")?;
        let task = Task::of(place.host, "c")?.with_id(ID);
        let node = place.node();
        let fill = format!(
            "set -e; mkdir -p {HERE}/source/inner {HERE}/bundle; cd {HERE}/source; \
             mkdir -p bin dev proc sys tmp run; \
             cp /usr/bin/busybox bin/sh"
        );
        node.run(&["sh", "-c", &fill])?;
        let spec = node.read(format!("{}/c/config.json", firn_lab::BUNDLES))?;
        let mut spec: Value = serde_json::from_str(&spec)?;
        spec["process"]["args"] = json!(["/bin/sh", "-c", "exit 0"]);
        spec["linux"]["cgroupsPath"] = json!(format!("/default/{ID}"));
        spec["root"] = json!({ "path": "rootfs" });
        node.write(format!("{HERE}/bundle/config.json"), spec.to_string())?;
        Ok(Self { place, task, first })
    }

    /// A file of the lab, as the host reaches it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.node().path(format!("{HERE}/{name}"))
    }

    pub fn sh(&self, script: &str) -> Result<String> {
        let script = format!("set -e; cd {HERE}; {script}");
        Ok(self.place.node().run(&["sh", "-c", &script])?.stdout)
    }

    pub fn create(&self, mounts: &[Mount]) -> ttrpc::Result<CreateTaskResponse> {
        let request = CreateTaskRequest {
            id: ID.to_owned(),
            bundle: format!("{HERE}/bundle"),
            rootfs: mounts.to_vec(),
            ..CreateTaskRequest::default()
        };
        self.task.call("Create", &request)
    }

    pub fn delete(&self) -> ttrpc::Result<DeleteResponse> {
        let request = DeleteRequest {
            id: ID.to_owned(),
            ..DeleteRequest::default()
        };
        self.task.call("Delete", &request)
    }

    /// What is mounted at and below the root file system: where, with which flags, how it propagates.
    pub fn mounts(&self) -> Result<Vec<String>> {
        let rootfs = format!("{HERE}/bundle/rootfs");
        let table = std::fs::read_to_string(format!("/proc/{}/mountinfo", self.place.node().pid()))?;
        let shown = table.lines().filter_map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let below = Path::new(words[4]).strip_prefix(&rootfs).ok()?;
            let propagation = words[6].split(':').next()?;
            Some(format!("/{} {} {propagation}", below.display(), words[5]))
        });
        Ok(shown.collect())
    }

    /// Creates the container, returns what `look` sees and what is mounted, and deletes the container.
    pub fn shows(&self, mounts: &[Mount], look: impl FnOnce() -> Result<String>) -> Result<String> {
        let created = self.create(mounts);
        let mut seen = brief(&created);
        if created.is_ok() {
            for mount in self.mounts()? {
                write!(seen, "\n{mount}")?;
            }
            write!(seen, "\n{}", look()?)?;
            write!(seen, "\ndeleted: {}", brief(&self.delete()))?;
        }
        let left = self.mounts()?;
        ensure!(left.is_empty(), "still mounted: {left:?}\n{seen}");
        Ok(seen + "\n")
    }

    pub fn end(self) -> Result<()> {
        nothing_left(self.place.host, ID)?;
        drop(self.task);
        self.first.remove()?;
        self.place.node().run(&["rm", "-r", HERE])?;
        Ok(())
    }
}

/// How a call went: of an error the code and the cause, which ends the text. Clients do not read the rest of
/// it.
pub fn brief<Answer>(answer: &ttrpc::Result<Answer>) -> String {
    let text = describe(answer, |_| "Ok".to_owned());
    match text.split_once(": ") {
        Some((code, message)) => {
            let cause = message.rsplit(": ").next().unwrap_or_default();
            let cause = cause.split(" (os error").next().unwrap_or_default();
            format!("{code}: {}", cause.to_lowercase())
        }
        None => text,
    }
}

pub fn mount(fs_type: &str, source: &str, target: &str, options: &[&str]) -> Mount {
    Mount {
        type_: fs_type.to_owned(),
        source: source.to_owned(),
        target: target.to_owned(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        ..Mount::default()
    }
}

pub fn bind(name: &str, target: &str, options: &[&str]) -> Mount {
    mount("bind", &format!("{HERE}/{name}"), target, options)
}
