//! What stands in the way of a pause, resume or move from its beginning: a memory limit, somebody on the GPU
//! that is wanted, or no such GPU.

use std::fs;
use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use firn_node::wait_for;

use super::case::{Case, Fault, Flow};
use super::testbed::{ID, Testbed};
use crate::{BUNDLES, Container};

/// Bytes that a memory limit leaves: less than one process has on its GPU.
const LEFT: u64 = 2 << 20;
/// GPU memory that a process takes which firn knows nothing of: nearly all of a GPU.
const OCCUPIED_MIB: u64 = 1016;
/// Where such a process writes.
const OCCUPANT: &str = "/tmp/occupant.log";
/// Where the node of a GPU is put that has vanished.
const GONE: &str = "/dev/gone";
/// How long somebody may take to have a GPU.
const TAKEN: Duration = Duration::from_secs(30);

/// See the module head.
pub(super) enum Scene<'t> {
    Empty,
    /// The file of the limit, and what it had.
    Limit(PathBuf, String),
    Other(Container<'t>),
    Process(&'t Testbed, Child),
    NoNode(&'t Testbed, String),
}

/// The GPU that a flow wants: the container's own is the first.
pub(super) fn target(flow: Flow) -> usize {
    usize::from(matches!(flow, Flow::ResumeElsewhere | Flow::Move))
}

impl<'t> Scene<'t> {
    /// Sets it for a case; the container is where its flow begins.
    pub(super) fn set(testbed: &'t Testbed, case: &Case) -> Result<Self> {
        let (host, gpu) = (&testbed.host, target(case.flow));
        match case.first.fault {
            Fault::NoMemory => limit(testbed),
            Fault::GpuBusy => {
                let other = Container::count(host, "other", &[&gpu.to_string()], 1, &["--mib", "1"])?;
                other.goes_on(2)?;
                Ok(Self::Other(other))
            }
            Fault::GpuOccupied => {
                let program = format!("{BUNDLES}/{ID}/rootfs/bin/gpu-counter");
                let (gpu_text, mib) = (gpu.to_string(), OCCUPIED_MIB.to_string());
                let mut process = host.node().spawn(&[
                    &*program,
                    "--mib",
                    "1",
                    "--gpu",
                    &gpu_text,
                    "--reserve-mib",
                    &mib,
                    "--out",
                    OCCUPANT,
                ])?;
                wait_for("the GPU to be occupied", TAKEN, || {
                    if process.try_wait()?.is_some() {
                        let mut stderr = process.stderr.take().context("it has ended twice")?;
                        bail!(
                            "the occupant has ended: {}",
                            std::io::read_to_string(&mut stderr)?
                        );
                    }
                    Ok((host.gpu_memory()?[gpu] > OCCUPIED_MIB).then_some(()))
                })?;
                Ok(Self::Process(testbed, process))
            }
            Fault::GpuGone => {
                let node = format!("/dev/nvidia{gpu}");
                host.node().run(&["mv", &node, GONE])?;
                Ok(Self::NoNode(testbed, node))
            }
            _ => Ok(Self::Empty),
        }
    }

    /// The code of the error that it must lead to.
    pub(super) fn code(case: &Case) -> &'static str {
        match case.first.fault {
            Fault::NoMemory => "FIRN-HOST-MEMORY",
            Fault::GpuBusy => "FIRN-GPU-BUSY",
            Fault::GpuOccupied => "FIRN-GPU-OCCUPIED",
            _ => "FIRN-",
        }
    }

    /// Nothing stands in the way any more.
    pub(super) fn end(self) -> Result<()> {
        match self {
            Self::Empty => Ok(()),
            Self::Limit(file, before) => Ok(fs::write(file, before)?),
            Self::Other(other) => {
                other.goes_on(2).context("the container that has the GPU")?;
                other.remove()
            }
            Self::Process(testbed, mut process) => {
                process.kill()?;
                process.wait()?;
                testbed.host.node().run(&["rm", OCCUPANT]).map(drop)
            }
            Self::NoNode(testbed, node) => testbed.host.node().run(&["mv", GONE, &node]).map(drop),
        }
    }
}

/// Lets the container's cgroup have little more memory than it uses.
fn limit(testbed: &Testbed) -> Result<Scene<'_>> {
    let cgroups = testbed.host.node().remnants(ID)?.cgroups;
    let files = [
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "-1"),
        ("memory.max", "memory.current", "max"),
    ];
    let kinds = cgroups.iter().flat_map(|dir| files.map(|files| (dir, files)));
    for (dir, (limit, usage, none)) in kinds {
        let file = dir.join(limit);
        if file.exists() {
            let usage: u64 = fs::read_to_string(dir.join(usage))?.trim().parse()?;
            fs::write(&file, (usage + LEFT).to_string())?;
            return Ok(Scene::Limit(file, none.to_owned()));
        }
    }
    bail!("no memory controller in {cgroups:?}")
}
