//! A driver in memory: processes with states, calls that can be made to wait, and a count of what was called.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Barrier, Condvar, Mutex, OnceLock};

use tempfile::TempDir;

use crate::cuda::{Checkpointer, Driver, INIT, NOT_INITIALIZED, OPERATING_SYSTEM};
use crate::node::{Libraries, Node};
use crate::nvml::{Nvml, NvmlError};
use crate::sys::LoadError;
use firn_gpu::protocol::{DriverError, GpuMemory};
use firn_gpu::{CudaState, Gpu, GpuPair, GpuUuid, Link};

/// A door in a call: the call reports that it has arrived and waits until the door is opened.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.0 = true;
        self.changed.notify_all();
        while !state.1 {
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Waits until a call stands at the door.
    pub(super) fn wait_for_entry(&self) {
        let state = self.state.lock().unwrap();
        let waited = self
            .changed
            .wait_timeout_while(state, super::DEADLINE, |state| !state.0);
        assert!(!waited.unwrap().1.timed_out(), "no call came");
    }

    pub(super) fn open(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

#[derive(Default)]
struct Inner {
    states: BTreeMap<i32, CudaState>,
    gates: BTreeMap<i32, Arc<Gate>>,
    meeting: Option<Arc<Barrier>>,
    restored: Vec<(i32, Vec<GpuPair>)>,
    asked_for_tid: Vec<i32>,
    inits: usize,
    init_refused: bool,
    init_demanded: bool,
    state_refused: bool,
    tid_refused: bool,
    /// Persistence mode by the byte that fills the UUID.
    persistence: BTreeMap<u8, bool>,
    a_gpu_is_lost: bool,
}

/// The fake driver, its NVML and its proc filesystem.
pub(crate) struct Fake {
    inner: Mutex<Inner>,
    missing: Option<LoadError>,
    loadable: bool,
    version: &'static str,
    root: TempDir,
}

impl Fake {
    fn new(processes: &[i32], loadable: bool, missing: Option<LoadError>) -> Arc<Self> {
        let inner = Inner {
            states: processes.iter().map(|pid| (*pid, CudaState::Running)).collect(),
            persistence: BTreeMap::from([(1, true), (2, true)]),
            a_gpu_is_lost: true,
            ..Inner::default()
        };
        Arc::new(Self {
            inner: Mutex::new(inner),
            missing,
            loadable,
            version: "580.95.05",
            root: tempfile::tempdir().unwrap(),
        })
    }

    pub(super) fn with_processes(processes: &[i32]) -> Arc<Self> {
        Self::new(processes, true, None)
    }

    pub(super) fn without_driver() -> Arc<Self> {
        Self::new(&[], false, None)
    }

    pub(super) fn with_old_driver() -> Arc<Self> {
        let source = load_error();
        let missing = LoadError::Symbol {
            library: "libcuda.so.1",
            symbol: "cuCheckpointProcessLock",
            source,
        };
        Self::new(&[], true, Some(missing))
    }

    pub(crate) fn node(self: &Arc<Self>) -> Node {
        Node {
            libraries: Box::new(Opened(Arc::clone(self))),
            proc_root: self.root.path().to_owned(),
            dev_root: self.root.path().join("dev"),
            sys_root: self.root.path().join("sys"),
            initialised: OnceLock::new(),
        }
    }

    /// Lets process `pid` map `path`.
    pub(super) fn maps(&self, pid: i32, path: &str) {
        let process = self.root.path().join(pid.to_string());
        fs::create_dir_all(&process).unwrap();
        fs::write(
            process.join("maps"),
            format!("7f10-7f20 r--p 00000000 00:00 0    {path}\n"),
        )
        .unwrap();
    }

    /// Lets the next changing call on `pid` wait at the gate.
    pub(super) fn hang(&self, pid: i32) -> Arc<Gate> {
        let gate = Arc::new(Gate::default());
        self.inner.lock().unwrap().gates.insert(pid, Arc::clone(&gate));
        gate
    }

    /// Lets checkpoint calls return only when `count` of them are under way.
    pub(super) fn meet_in_checkpoint(&self, count: usize) {
        self.inner.lock().unwrap().meeting = Some(Arc::new(Barrier::new(count)));
    }

    pub(super) fn set_persistence(&self, gpu: u8, on: bool) {
        self.inner.lock().unwrap().persistence.insert(gpu, on);
    }

    pub(super) fn lose_no_gpu(&self) {
        self.inner.lock().unwrap().a_gpu_is_lost = false;
    }

    pub(super) fn refuse_init(&self) {
        self.inner.lock().unwrap().init_refused = true;
    }

    pub(super) fn demand_init(&self) {
        self.inner.lock().unwrap().init_demanded = true;
    }

    pub(super) fn refuse_state(&self) {
        self.inner.lock().unwrap().state_refused = true;
    }

    pub(super) fn refuse_tid(&self) {
        self.inner.lock().unwrap().tid_refused = true;
    }

    pub(super) fn inits(&self) -> usize {
        self.inner.lock().unwrap().inits
    }

    pub(super) fn restored(&self) -> Vec<(i32, Vec<GpuPair>)> {
        let mut restored = self.inner.lock().unwrap().restored.clone();
        restored.sort_by_key(|(pid, _)| *pid);
        restored
    }

    pub(super) fn asked_for_tid(&self) -> Vec<i32> {
        let mut asked = self.inner.lock().unwrap().asked_for_tid.clone();
        asked.sort_unstable();
        asked
    }

    fn change(&self, call: &str, pid: i32, from: CudaState, to: CudaState) -> Result<(), DriverError> {
        let gate = {
            let inner = self.inner.lock().unwrap();
            if inner.init_demanded && inner.inits == 0 {
                return Err(error(call, NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"));
            }
            inner.gates.get(&pid).cloned()
        };
        if let Some(gate) = gate {
            gate.pass();
        }
        let mut inner = self.inner.lock().unwrap();
        match inner.states.get_mut(&pid) {
            None => Err(error(call, 1, "CUDA_ERROR_INVALID_VALUE")),
            Some(state) if *state != from => Err(error(call, 401, "CUDA_ERROR_ILLEGAL_STATE")),
            Some(state) => {
                *state = to;
                Ok(())
            }
        }
    }
}

fn error(call: &str, code: i32, name: &str) -> DriverError {
    DriverError {
        call: call.to_owned(),
        code,
        name: name.to_owned(),
    }
}

fn load_error() -> libloading::Error {
    libloading::Error::DlOpenUnknown
}

/// The fake as a node's libraries.
struct Opened(Arc<Fake>);

impl Libraries for Opened {
    fn driver(&self) -> Result<&dyn Driver, LoadError> {
        if self.0.loadable {
            Ok(&*self.0)
        } else {
            Err(LoadError::Open {
                library: "libcuda.so.1",
                source: load_error(),
            })
        }
    }

    fn nvml(&self) -> Result<&dyn Nvml, NvmlError> {
        if self.0.loadable {
            Ok(&*self.0)
        } else {
            Err(LoadError::Open {
                library: "libnvidia-ml.so.1",
                source: load_error(),
            }
            .into())
        }
    }
}

impl Driver for Fake {
    fn version(&self) -> Result<i32, DriverError> {
        Ok(13000)
    }

    fn init(&self) -> Result<(), DriverError> {
        let mut inner = self.inner.lock().unwrap();
        if inner.init_refused {
            return Err(error(INIT, 100, "CUDA_ERROR_NO_DEVICE"));
        }
        inner.inits += 1;
        Ok(())
    }

    fn checkpointer(&self) -> Result<&dyn Checkpointer, &LoadError> {
        match &self.missing {
            Some(missing) => Err(missing),
            None => Ok(self),
        }
    }
}

impl Checkpointer for Fake {
    fn restore_tid(&self, pid: i32) -> Result<i32, DriverError> {
        let mut inner = self.inner.lock().unwrap();
        inner.asked_for_tid.push(pid);
        let call = "cuCheckpointProcessGetRestoreThreadId";
        if inner.tid_refused {
            Err(error(call, 999, "CUDA_ERROR_UNKNOWN"))
        } else if inner.states.contains_key(&pid) {
            Ok(1000 + pid)
        } else if self.root.path().join(pid.to_string()).exists() {
            Err(error(call, NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"))
        } else {
            Err(error(call, OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM"))
        }
    }

    fn state(&self, pid: i32) -> Result<CudaState, DriverError> {
        let inner = self.inner.lock().unwrap();
        if inner.state_refused {
            return Err(error("cuCheckpointProcessGetState", 999, "CUDA_ERROR_UNKNOWN"));
        }
        // Like the real one it takes a process that only loads libcuda for a running one.
        let loaded = self.root.path().join(pid.to_string()).exists();
        inner
            .states
            .get(&pid)
            .copied()
            .or(loaded.then_some(CudaState::Running))
            .ok_or_else(|| error("cuCheckpointProcessGetState", 1, "CUDA_ERROR_INVALID_VALUE"))
    }

    fn lock(&self, pid: i32, _timeout_ms: u32) -> Result<(), DriverError> {
        self.change(
            "cuCheckpointProcessLock",
            pid,
            CudaState::Running,
            CudaState::Locked,
        )
    }

    fn checkpoint(&self, pid: i32) -> Result<(), DriverError> {
        let meeting = self.inner.lock().unwrap().meeting.clone();
        if let Some(meeting) = meeting {
            meeting.wait();
        }
        self.change(
            "cuCheckpointProcessCheckpoint",
            pid,
            CudaState::Locked,
            CudaState::Checkpointed,
        )
    }

    fn restore(&self, pid: i32, pairs: &[GpuPair]) -> Result<(), DriverError> {
        self.change(
            "cuCheckpointProcessRestore",
            pid,
            CudaState::Checkpointed,
            CudaState::Locked,
        )?;
        self.inner.lock().unwrap().restored.push((pid, pairs.to_vec()));
        Ok(())
    }

    fn unlock(&self, pid: i32) -> Result<(), DriverError> {
        self.change(
            "cuCheckpointProcessUnlock",
            pid,
            CudaState::Locked,
            CudaState::Running,
        )
    }
}

impl Nvml for Fake {
    fn driver_version(&self) -> Result<String, NvmlError> {
        Ok(self.version.to_owned())
    }

    fn gpus(&self) -> Result<Vec<Result<Gpu, NvmlError>>, NvmlError> {
        let inner = self.inner.lock().unwrap();
        let gpu = |n: u8, persistence: bool| Gpu {
            uuid: GpuUuid::from_bytes([n; 16]),
            name: "NVIDIA H200".to_owned(),
            pci_device_id: 0x2335_10de,
            pci_address: format!("00000000:{n:02X}:00.0"),
            memory_total: 141 << 30,
            memory_free: 140 << 30,
            minor: u32::from(n),
            mig: false,
            persistence,
            node: None,
        };
        let mut gpus: Vec<_> = inner.persistence.iter().map(|(n, on)| Ok(gpu(*n, *on))).collect();
        if inner.a_gpu_is_lost {
            let call = "nvmlDeviceGetHandleByIndex_v2";
            gpus.insert(
                1,
                Err(NvmlError::Call {
                    call,
                    code: 15,
                    name: "NVML_ERROR_GPU_IS_LOST".to_owned(),
                }),
            );
        }
        Ok(gpus)
    }

    fn memory_in_use(&self) -> Result<BTreeMap<i32, GpuMemory>, NvmlError> {
        let on_gpu_1 = |bytes| GpuMemory::from([(GpuUuid::from_bytes([1; 16]), bytes)]);
        Ok(BTreeMap::from([(7, on_gpu_1(3 << 30))]))
    }

    fn links(&self) -> Vec<Link> {
        let uuid = |n: u8| GpuUuid::from_bytes([n; 16]);
        let mut joined = Link::between(uuid(2), uuid(1));
        joined.nvlinks = Some(18);
        vec![joined]
    }
}
