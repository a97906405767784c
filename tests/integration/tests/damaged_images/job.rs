//! A container that is created by containerd's own calls, from image directories that containerd has never
//! seen.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::{
    CreateTaskRequest, CreateTaskResponse, DeleteRequest, DeleteResponse, Mount, StartRequest, StartResponse,
};
use firn_lab::{BUNDLES, GpuHost, Task, describe, nothing_left};

/// How long a refusal may take: far less than anything that waits.
const AT_ONCE: Duration = Duration::from_secs(10);

const BUNDLE: &str = "/run/raw/job";

/// The container "job", created by the calls that containerd makes, from image directories of the node.
pub struct Job<'h> {
    pub host: &'h GpuHost,
    pub task: Task,
    spec: String,
}

impl<'h> Job<'h> {
    pub fn new(host: &'h GpuHost, spec: String) -> Result<Self> {
        let task = Task::of(host, "anchor")?.with_id("job");
        host.watch_runc()?;
        Ok(Self { host, task, spec })
    }

    pub fn make_bundle(&self) -> Result<()> {
        fs::create_dir_all(self.host.node().path(BUNDLE))?;
        self.host
            .node()
            .write(format!("{BUNDLE}/config.json"), &self.spec)
    }

    /// Removes the bundle, in which nothing may be mounted any more.
    pub fn remove_bundle(&self) -> Result<()> {
        nothing_left(self.host, "job")?;
        let bundle = self.host.node().path(BUNDLE);
        fs::remove_dir(bundle.join("rootfs"))?;
        Ok(fs::remove_dir_all(bundle)?)
    }

    pub fn create(&self, image: &str) -> Result<ttrpc::Result<CreateTaskResponse>> {
        self.make_bundle()?;
        let request = CreateTaskRequest {
            id: "job".to_owned(),
            bundle: BUNDLE.to_owned(),
            checkpoint: image.to_owned(),
            rootfs: vec![Mount {
                type_: "bind".to_owned(),
                source: format!("{BUNDLES}/anchor/rootfs"),
                options: vec!["rbind".to_owned(), "rw".to_owned()],
                ..Mount::default()
            }],
            ..CreateTaskRequest::default()
        };
        Ok(self.task.call("Create", &request))
    }

    /// Refused with one of these codes, at once, and nothing is left. Returns the client's error.
    pub fn refused(&self, image: &str, codes: &[&str]) -> Result<String> {
        let begun = Instant::now();
        let output = describe(&self.create(image)?, |_| "accepted".to_owned());
        ensure!(begun.elapsed() < AT_ONCE, "after {:?}: {output}", begun.elapsed());
        ensure!(
            codes.iter().any(|code| output.contains(&format!(": {code}: "))),
            "none of {codes:?} but: {output}"
        );
        ensure!(output.contains("hint: "), "no hint: {output}");
        ensure!(!output.contains(char::is_control), "shown as it is: {output:?}");
        ensure!(
            !self.host.runc_has("create")? && !self.host.runc_has("restore")?,
            "runc was called"
        );
        let spec = self.host.node().read(format!("{BUNDLE}/config.json"))?;
        ensure!(spec == self.spec, "the spec was changed: {spec}");
        self.remove_bundle()?;
        Ok(output)
    }

    /// What the client sees of a start.
    pub fn start(&self) -> String {
        let mut start = StartRequest::new();
        start.id = "job".to_owned();
        describe(&self.task.call::<StartResponse>("Start", &start), |_| {
            "started".to_owned()
        })
    }

    /// Refused at the start with one of these codes, by when CRIU has restored processes that never ran.
    pub fn refused_at_start(&self, image: &str, codes: &[&str]) -> Result<()> {
        self.create(image)?.context("create")?;
        let output = self.start();
        ensure!(
            codes.iter().any(|code| output.contains(&format!(": {code}: "))),
            "none of {codes:?} but: {output}"
        );
        ensure!(output.contains("hint: "), "no hint: {output}");
        self.delete()?;
        self.host.watch_runc()
    }

    pub fn delete(&self) -> Result<()> {
        let mut request = DeleteRequest::new();
        request.id = "job".to_owned();
        self.task
            .call::<DeleteResponse>("Delete", &request)
            .context("Delete")?;
        self.remove_bundle()
    }

    /// Accepted: the refusals are not for another reason.
    pub fn expect_accepted(&self, image: &str) -> Result<()> {
        self.create(image)?
            .with_context(|| format!("create from {image}"))?;
        self.delete()
    }
}
