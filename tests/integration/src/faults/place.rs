//! Where the GPU state of a container is, and that everything that records it agrees: containerd's status,
//! its metadata, the spec in the bundle, the container's /dev, the rules of its device cgroup, its lease, and
//! the memory in use on the GPUs.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use firn_node::wait_for;
use serde_json::Value;

use super::case::From;
use super::testbed::{ID, Job, Testbed};
use crate::BUNDLES;

const LEASES: &str = "/run/firn/leases";
const LABEL: &str = "firn.dev/parked";
/// How long a shim may take to reach containerd, which may have been restarted meanwhile.
const SHOWN: Duration = Duration::from_secs(20);

/// Run in a container: prints which of these devices (`b 7:3`) it may open.
const PROBE: &str = "for device in \"$@\"; do
        rm -f /probe
        mknod /probe ${device%% *} $(echo ${device#* } | tr : ' ')
        if (: </probe) 2>/dev/null; then echo \"$device\"; fi
    done; rm -f /probe";

/// Where a container's GPU state is; GPUs by their place on the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    On(usize),
    /// In host memory; the container has this GPU.
    Parked(usize),
}

/// A device as rules name it: type and numbers.
type Device = (String, u64, u64);

impl Place {
    fn gpu(self) -> usize {
        match self {
            Self::On(gpu) | Self::Parked(gpu) => gpu,
        }
    }

    fn is_parked(self) -> bool {
        matches!(self, Self::Parked(_))
    }
}

impl Job<'_> {
    /// It is there in every respect. One that runs counts on.
    pub(super) fn is_at(&mut self, place: Place) -> Result<()> {
        self.is_at_untold(place)?;
        self.containerd_has(place).with_context(|| format!("{place:?}"))
    }

    /// It is there in every respect but containerd's metadata: a daemon that was killed may have missed it,
    /// and learns of it with the next pause or resume.
    pub(super) fn is_at_untold(&mut self, place: Place) -> Result<()> {
        self.stands_or_runs(place).with_context(|| format!("{place:?}"))?;
        self.agrees(place).with_context(|| format!("{place:?}"))
    }

    fn stands_or_runs(&mut self, place: Place) -> Result<()> {
        let host = &self.testbed.host;
        let mut memory = vec![0; host.gpus().len()];
        match place {
            Place::On(gpu) => {
                self.is(From::Running)?;
                let used = self.container.gpus_in_use()?;
                ensure!(used == [host.gpus()[gpu].uuid.clone()], "it uses {used:?}");
                memory = host.gpu_memory()?;
                memory[gpu] = 0;
            }
            Place::Parked(_) => {
                self.container.becomes("PAUSED")?;
                ensure!(self.freezer()? == From::Paused, "it is not frozen");
                self.is_traced_by_nobody()?;
                self.counting.stands_still()?;
                memory = host.gpu_memory()?;
            }
        }
        ensure!(memory.iter().all(|mib| *mib == 0), "memory in use: {memory:?}");
        Ok(())
    }

    /// Everything that records where it is agrees.
    fn agrees(&self, place: Place) -> Result<()> {
        let testbed = self.testbed;
        let devices = testbed.devices()?;
        let device = devices.get(place.gpu()).context("no such GPU")?;
        let spec: Value = serde_json::from_str(&testbed.read_bundle("config.json")?)?;
        ensure!(
            gpus_of(&spec) == [device.clone()],
            "the spec has {:?}",
            gpus_of(&spec)
        );
        let nodes = format!("/proc/{}/root/dev", self.container.pid()?);
        let names = testbed.host.node().run(&["ls", &nodes])?.stdout;
        // The driver's library makes nodes of all GPUs; the rules decide which can be opened.
        let node = format!("nvidia{}", place.gpu());
        ensure!(names.lines().any(|name| name == node), "no {node} in its /dev");
        self.lease_has(place, device)?;
        match place {
            Place::On(_) => self.may_open(&devices, device),
            Place::Parked(_) => Ok(()),
        }
    }

    fn containerd_has(&self, place: Place) -> Result<()> {
        let devices = self.testbed.devices()?;
        let device = devices.get(place.gpu()).context("no such GPU")?;
        let mut wrong = String::new();
        let agreed = wait_for("containerd's metadata", SHOWN, || {
            let info = self.testbed.host.node().run(&["ctr", "containers", "info", ID])?;
            let info: Value = serde_json::from_str(&info.stdout)?;
            let label = info["Labels"].get(LABEL);
            wrong = format!("label {label:?}, GPUs {:?}", gpus_of(&info["Spec"]));
            let agrees = label.is_some() == place.is_parked() && gpus_of(&info["Spec"]) == [device.clone()];
            Ok(agrees.then_some(()))
        });
        agreed.with_context(|| format!("containerd's metadata have {wrong}"))
    }

    fn lease_has(&self, place: Place, device: &Device) -> Result<()> {
        let lease = format!("{LEASES}/{}", self.container.pid()?);
        let lease: Value = serde_json::from_str(&self.testbed.host.node().read(lease)?)?;
        let of = &lease["gpus"][0];
        let numbers = (of[1].as_u64(), of[2].as_u64());
        let agrees = lease["parked"] == place.is_parked() && numbers == (Some(device.1), Some(device.2));
        ensure!(agrees, "the lease is {lease}");
        Ok(())
    }

    /// Of the node's GPUs it may open its own.
    fn may_open(&self, devices: &[Device], own: &Device) -> Result<()> {
        let named = |(kind, major, minor): &Device| format!("{kind} {major}:{minor}");
        let names: Vec<String> = devices.iter().map(named).collect();
        let mut command = vec!["sh", "-c", PROBE, "probe"];
        command.extend(names.iter().map(String::as_str));
        let opened = self.container.exec(&command)?;
        let opened: Vec<&str> = opened.lines().collect();
        ensure!(opened == [named(own)], "of {names:?} it can open {opened:?}");
        Ok(())
    }

    /// The GPU that the spec in its bundle names.
    pub(super) fn gpu_in_spec(&self) -> Result<usize> {
        let spec: Value = serde_json::from_str(&self.testbed.read_bundle("config.json")?)?;
        let (devices, named) = (self.testbed.devices()?, gpus_of(&spec));
        let place = devices.iter().position(|device| named == [device.clone()]);
        place.with_context(|| format!("the spec has {named:?}"))
    }
}

impl Testbed {
    fn read_bundle(&self, name: &str) -> Result<String> {
        self.host.node().read(format!("{BUNDLES}/{ID}/{name}"))
    }

    /// The devices of the node's GPUs.
    fn devices(&self) -> Result<Vec<Device>> {
        let mut devices = BTreeMap::new();
        for place in 0..self.host.gpus().len() {
            let path = format!("/dev/nvidia{place}");
            let stat = self.host.node().run(&["stat", "-c", "%F,%t,%T", &path])?.stdout;
            let fields: Vec<&str> = stat.trim().split(',').collect();
            let [kind, major, minor] = fields[..] else {
                anyhow::bail!("stat printed {stat:?}");
            };
            let kind = if kind.starts_with("block") { "b" } else { "c" };
            let number = |text| u64::from_str_radix(text, 16);
            devices.insert(place, (kind.to_owned(), number(major)?, number(minor)?));
        }
        Ok(devices.into_values().collect())
    }

    /// No living process is noted to have a GPU.
    pub(super) fn no_leases(&self) -> Result<()> {
        let node = self.host.node();
        let names = node.run(&["ls", LEASES])?.stdout;
        let pids: Vec<i32> = names.lines().filter_map(|name| name.parse().ok()).collect();
        let living = node
            .processes()
            .into_iter()
            .find(|process| pids.contains(&process.pid));
        ensure!(living.is_none(), "a lease is left of {living:?}");
        Ok(())
    }
}

fn is_gpu(name: &str) -> bool {
    let number = name.strip_prefix("nvidia");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The GPUs whose nodes a spec names.
fn gpus_of(spec: &Value) -> Vec<Device> {
    let devices = spec["linux"]["devices"].as_array().into_iter().flatten();
    let gpus = devices.filter(|device| {
        let name = device["path"]
            .as_str()
            .and_then(|path| path.strip_prefix("/dev/"));
        name.is_some_and(is_gpu)
    });
    let of = |device: &Value| {
        let kind = device["type"].as_str()?.to_owned();
        Some((kind, device["major"].as_u64()?, device["minor"].as_u64()?))
    };
    gpus.filter_map(of).collect()
}
