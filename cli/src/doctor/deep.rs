//! `firn doctor --deep`: a small container is started, checkpointed, ended, and restored, by the calls that
//! clients make. It has the programs of the node and no image, and is removed whole.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use firn_cdi::{DeviceName, KIND, Registry};
use firn_config::{Config, find_program, names};
use firn_containerd::runc::CHECKPOINT_OPTIONS;
use firn_gpu::{Gpu, Inventory};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::Check;
use crate::checkpoint::Interrupts;
use crate::containerd::{Any, Container, Containerd, CreateTask, Mount, Runtime, block_on};
use crate::oci_image::{Part, media};
use crate::restore::dir::{start_with, url};
use crate::restore::unpack::unpack;
use crate::steps::Steps;
use crate::work_dir::WorkDir;

const NAME: &str = "deep";
const RUNTIME: &str = "io.containerd.firn.v2";
const SPEC: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
/// Directories of the node that programs need, if they are there.
const DIRS: [&str; 5] = ["usr", "bin", "sbin", "lib", "lib64"];
/// Where the container finds firn-gpu.
const WORKER: &str = "/.firn-gpu";
const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// Moves a container once.
pub fn check(socket: &Path, config: &Config, inventory: Option<&Inventory>, quiet: bool) -> Check {
    let gpus = inventory.map(|inventory| &inventory.gpus[..]).unwrap_or_default();
    let gpu = gpus.iter().find(|gpu| !gpu.mig);
    match block_on(run(socket, config, gpu, quiet))
        .map_err(Into::into)
        .flatten()
    {
        Ok(found) => Check::ok(NAME, found),
        Err(error) => {
            let error = format!("{error:#}");
            let (found, remedy) = error
                .split_once(". hint: ")
                .unwrap_or((&error, "see containerd's log: `journalctl -u containerd`"));
            Check::fail(NAME, found, remedy)
        }
    }
}

async fn run(socket: &Path, config: &Config, gpu: Option<&Gpu>, quiet: bool) -> Result<String> {
    let mut interrupts = Interrupts::new()?;
    let id = format!("firn-doctor-{}", std::process::id());
    let dir = WorkDir::make(Path::new(names::RESTORE_DIR), "doctor")?;
    let containerd = Containerd::connect(socket, "default").await?;
    let probe = Probe::make(&containerd, &id, dir.path(), config, gpu)?;
    let done = interrupts.unless(probe.moves(&mut Steps::new(quiet))).await;
    // Order matters: the directory is in use until the task is gone.
    let removed = probe.remove().await;
    let (checkpoint, restore) = done.context("it was interrupted")??;
    removed.context("the container is left")?;
    let with = match gpu {
        Some(gpu) => format!("a container with GPU {}", gpu.uuid),
        None => "a container without GPU".to_owned(),
    };
    let seconds = |took: Duration| format!("{:.1} s", took.as_secs_f64());
    Ok(format!(
        "{with} was checkpointed ({}) and restored ({})",
        seconds(checkpoint),
        seconds(restore)
    ))
}

/// The container.
struct Probe<'a> {
    /// Under a lease, for the checkpoint.
    containerd: &'a Containerd,
    container: Container,
    rootfs: PathBuf,
    image: PathBuf,
    log: PathBuf,
    has_gpu: bool,
}

impl<'a> Probe<'a> {
    fn make(
        containerd: &'a Containerd,
        id: &str,
        dir: &Path,
        config: &Config,
        gpu: Option<&Gpu>,
    ) -> Result<Self> {
        let (rootfs, image) = (dir.join("rootfs"), dir.join("image"));
        fs::create_dir(&image)?;
        let mut mounts = root(&rootfs)?;
        let mut command = vec!["sleep".to_owned(), "3600".to_owned()];
        if gpu.is_some() {
            let worker = find_program(names::WORKER_PROGRAM, config.worker.path.as_deref())?;
            fs::write(rootfs.join(&WORKER[1..]), "")?;
            mounts.push(bind(&worker, WORKER));
            command = vec![WORKER.to_owned(), "hold".to_owned()];
        }
        let mut spec = spec(id, &command, &mounts);
        if let Some(gpu) = gpu {
            let name = DeviceName::new(KIND, gpu.uuid.as_str())?;
            let registry = Registry::read(&config.create.cdi_dirs);
            registry.inject(&mut spec, &[name])?;
            with_own_libraries(&mut spec, &mounts, &registry.library_dirs());
        }
        let runtime = Runtime {
            name: RUNTIME.to_owned(),
            options: None,
        };
        let container = Container {
            id: id.to_owned(),
            runtime: Some(runtime),
            spec: Some(Any {
                type_url: SPEC.to_owned(),
                value: serde_json::to_vec(&spec)?,
            }),
            ..Container::default()
        };
        Ok(Self {
            containerd,
            container,
            rootfs,
            image,
            log: dir.join("log"),
            has_gpu: gpu.is_some(),
        })
    }

    fn id(&self) -> &str {
        &self.container.id
    }

    fn mounts(&self) -> Vec<Mount> {
        vec![Mount {
            r#type: "bind".to_owned(),
            source: self.rootfs.to_string_lossy().into_owned(),
            target: String::new(),
            options: ["rbind", "rw"].map(str::to_owned).to_vec(),
        }]
    }

    /// The times of the checkpoint and of the restore.
    async fn moves(&self, steps: &mut Steps) -> Result<(Duration, Duration)> {
        let containerd = self.containerd;
        containerd.create_container(self.container.clone()).await?;
        let log = url(&self.log)?;
        let task = CreateTask {
            container_id: self.id().to_owned(),
            rootfs: self.mounts(),
            stdout: log.clone(),
            stderr: log.clone(),
            terminal: false,
            options: None,
        };
        steps.begin("start");
        containerd.create(task).await?;
        containerd.start(self.id()).await?;
        self.goes_on().await?;
        steps.begin("checkpoint");
        let begun = Instant::now();
        let leased = containerd.with_lease(self.id()).await?;
        let options = Any {
            type_url: CHECKPOINT_OPTIONS.to_owned(),
            value: Vec::new(),
        };
        let parts = leased.checkpoint(self.id(), options).await?;
        let dump = parts
            .into_iter()
            .find(|part| part.media_type == media::CHECKPOINT);
        unpack(
            &leased,
            &Part::here(dump.context("containerd has made no checkpoint")?),
            &self.image,
            steps,
        )
        .await?;
        let checkpoint = begun.elapsed();
        self.goes_on().await?;
        self.end().await?;
        steps.begin("restore");
        let begun = Instant::now();
        start_with(containerd, &self.container, self.mounts(), &self.image, log).await?;
        let restore = begun.elapsed();
        self.goes_on().await?;
        steps.end();
        Ok((checkpoint, restore))
    }

    /// Waits until its process shows that its GPU memory is whole; one without GPU only has to run.
    async fn goes_on(&self) -> Result<()> {
        let size = || fs::metadata(&self.log).map_or(0, |log| log.len());
        let (begun, before) = (Instant::now(), size());
        loop {
            sleep(POLL).await;
            let shown = fs::read_to_string(&self.log).unwrap_or_default();
            if !self.containerd.running().await?.iter().any(|id| id == self.id()) {
                bail!(
                    "its process has ended: {}",
                    shown.lines().last().unwrap_or("no message")
                );
            }
            if !self.has_gpu || size() > before {
                return Ok(());
            }
            if begun.elapsed() > LIMIT {
                bail!(
                    "its process shows nothing any more: {}",
                    shown.lines().last().unwrap_or("no message")
                );
            }
        }
    }

    async fn end(&self) -> Result<()> {
        self.containerd.kill(self.id()).await?;
        self.containerd.wait(self.id()).await?;
        Ok(self.containerd.delete(self.id()).await?)
    }

    /// All of it, as far as it is there.
    async fn remove(&self) -> Result<()> {
        let is_there = self.containerd.task_state(self.id()).await?.is_some();
        if is_there && self.end().await.is_err() {
            // It was created and not started.
            self.containerd.delete(self.id()).await?;
        }
        let deleted = self.containerd.delete_container(self.id()).await;
        let ended = self.containerd.end_lease(self.id()).await;
        for done in [deleted, ended] {
            done.or_else(|error| if error.is_absent() { Ok(()) } else { Err(error) })?;
        }
        Ok(())
    }
}

/// A root directory with the node's programs and libraries. Returns what is mounted there.
fn root(rootfs: &Path) -> Result<Vec<Value>> {
    fs::create_dir(rootfs)?;
    for dir in ["proc", "dev", "sys", "tmp", "etc"] {
        fs::create_dir(rootfs.join(dir))?;
    }
    let mut mounts = Vec::new();
    for dir in DIRS {
        let host = Path::new("/").join(dir);
        match (fs::read_link(&host), host.is_dir()) {
            (Ok(text), _) => symlink(text, rootfs.join(dir))?,
            (Err(_), true) => {
                fs::create_dir(rootfs.join(dir))?;
                mounts.push(bind(&host, &host.to_string_lossy()));
            }
            (Err(_), false) => {}
        }
    }
    Ok(mounts)
}

/// The container has the node's directories, and so most of what the CDI files mount. Their hooks would write
/// there: in the place of links and of a loader's cache it gets a path of libraries.
fn with_own_libraries(spec: &mut Value, own: &[Value], libraries: &[PathBuf]) {
    let destination = |mount: &Value| PathBuf::from(mount["destination"].as_str().unwrap_or_default());
    let own: Vec<PathBuf> = own.iter().map(destination).collect();
    if let Some(mounts) = spec["mounts"].as_array_mut() {
        mounts.retain(|mount| {
            let at = destination(mount);
            let is_there = at.exists() && own.iter().any(|dir| *dir != at && at.starts_with(dir));
            !is_there
        });
    }
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("hooks");
    }
    let libraries: Vec<String> = libraries.iter().map(|dir| dir.display().to_string()).collect();
    if let Some(env) = spec["process"]["env"].as_array_mut() {
        env.push(json!(format!("LD_LIBRARY_PATH={}", libraries.join(":"))));
    }
}

fn bind(source: &Path, destination: &str) -> Value {
    json!({"destination": destination, "type": "bind", "source": source, "options": ["bind", "ro"]})
}

fn spec(id: &str, command: &[String], mounts: &[Value]) -> Value {
    let mut all = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}),
    ];
    all.extend(mounts.iter().cloned());
    let none = ["bounding", "effective", "permitted"].map(|set| (set.to_owned(), json!([])));
    let capabilities: serde_json::Map<String, Value> = none.into_iter().collect();
    let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({"type": kind}));
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0}, "args": command, "cwd": "/",
            "capabilities": capabilities, "noNewPrivileges": true,
            "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
        },
        "root": {"path": "rootfs"},
        "hostname": "firn-doctor",
        "mounts": all,
        "linux": {
            "cgroupsPath": format!("/firn-doctor/{id}"),
            "namespaces": namespaces,
            "resources": {"devices": [{"allow": false, "access": "rwm"}]},
        },
    })
}
