//! The libraries loaded into one process: forked children, and what NVML shows.
//!
//! The environment that names a node's directories belongs to a process, so each test runs its body in a
//! process of its own: this program again, with one ignored test.

mod support;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::process::Command;

use libloading::{Library, Symbol};
use support::{Node, TWO, missing};

/// Runs an ignored test of this program in the environment of `node`.
fn within(node: &Node, body: &str, variables: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().expect("a test has a program"));
    node.enter(&mut command);
    command
        .args(["--exact", body, "--ignored", "--nocapture"])
        .envs(variables.iter().copied());
    let output = command.output().expect("this program can be started");
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("run by `within`, which sets {name}"))
}

#[test]
fn a_forked_child_has_no_driver() {
    require!(missing());
    within(&Node::new(TWO), "forks", &[]);
}

#[test]
#[ignore = "body of a_forked_child_has_no_driver"]
fn forks() {
    const NOT_INITIALIZED: c_int = 3;
    // SAFETY: the simulated library's constructors do nothing.
    let library = unsafe { Library::new("libcuda.so.1") }.unwrap();
    // SAFETY: the type is the function's.
    let init: Symbol<'_, extern "C" fn(u32) -> c_int> = unsafe { library.get("cuInit") }.unwrap();
    // SAFETY: the type is the function's.
    let count: Symbol<'_, extern "C" fn(*mut c_int) -> c_int> =
        unsafe { library.get("cuDeviceGetCount") }.unwrap();
    let mut devices = 0;
    assert_eq!(count(&raw mut devices), NOT_INITIALIZED);
    assert_eq!((init(0), count(&raw mut devices), devices), (0, 0, 2));
    // SAFETY: the child makes one driver call and ends.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let code = count(&raw mut devices);
            // SAFETY: ends the child without running the test harness's destructors in it.
            unsafe { libc::_exit(code) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let ended = nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(ended, nix::sys::wait::WaitStatus::Exited(child, NOT_INITIALIZED));
        }
    }
}

#[test]
fn nvml_shows_the_gpus_and_who_uses_them() {
    require!(missing());
    let gpu = "name=NVIDIA H100,mem=128M,minor=3,pci=00000000:AB:00.0,device=233010de,mig=on,persistence=off";
    let node = Node::new(&["mem=256M", gpu]);
    let counter = node.busy_counter(&["--mib", "16", "--gpu", "1"]);
    let pid = counter.pid().to_string();
    within(
        &node,
        "asks_nvml",
        &[("TEST_UUID", &node.uuids[1]), ("TEST_PID", &pid)],
    );
    assert_eq!(
        node.step("lock,checkpoint,restore,unlock", counter.pid(), &[]),
        ["SUCCESS"; 4]
    );
    within(
        &node,
        "asks_nvml",
        &[("TEST_UUID", &node.uuids[1]), ("TEST_PID", &pid)],
    );
}

#[test]
#[ignore = "body of nvml_shows_the_gpus_and_who_uses_them"]
fn asks_nvml() {
    let nvml = Nvml::open();
    assert_eq!(
        nvml.number("nvmlDeviceGetCount_v2", None),
        Err(1),
        "uninitialized"
    );
    assert_eq!(nvml.plain("nvmlInit_v2"), 0);
    assert_eq!(nvml.number("nvmlDeviceGetCount_v2", None), Ok(2));
    assert_eq!(nvml.number("nvmlSystemGetCudaDriverVersion_v2", None), Ok(13000));
    let device = nvml.device(1);
    assert_eq!(nvml.text("nvmlDeviceGetUUID", device), variable("TEST_UUID"));
    assert_eq!(nvml.text("nvmlDeviceGetName", device), "NVIDIA H100");
    assert_eq!(nvml.number("nvmlDeviceGetMinorNumber", Some(device)), Ok(3));
    assert_eq!(nvml.number("nvmlDeviceGetPersistenceMode", Some(device)), Ok(0));

    let mut pci = Pci::default();
    assert_eq!(nvml.fill("nvmlDeviceGetPciInfo_v3", device, &mut pci), 0);
    assert_eq!(
        (pci.domain, pci.bus, pci.device, pci.pci_device_id),
        (0, 0xab, 0, 0x2330_10de)
    );
    assert_eq!(
        CStr::from_bytes_until_nul(&pci.bus_id).unwrap(),
        c"00000000:AB:00.0"
    );
    assert_eq!(
        CStr::from_bytes_until_nul(&pci.bus_id_legacy).unwrap(),
        c"0000:AB:00.0"
    );

    let mut memory = [0_u64; 3];
    assert_eq!(nvml.fill("nvmlDeviceGetMemoryInfo", device, &mut memory), 0);
    assert_eq!(memory, [128 << 20, 108 << 20, 20 << 20], "total, free, used");

    let mut none = 0_u32;
    assert_eq!(nvml.processes(device, &mut none, None), 7, "insufficient size");
    let (mut count, mut process) = (1, Process::default());
    assert_eq!(nvml.processes(device, &mut count, Some(&mut process)), 0);
    assert_eq!(
        (count, process.pid.to_string(), process.used),
        (1, variable("TEST_PID"), 20 << 20)
    );
    assert_eq!(nvml.processes(nvml.device(0), &mut count, Some(&mut process)), 0);
    assert_eq!(count, 0);

    assert_eq!(nvml.plain("nvmlShutdown"), 0);
    assert_eq!(nvml.plain("nvmlShutdown"), 1);
}

#[test]
fn without_devices_there_is_no_driver() {
    require!(missing());
    let node = Node::new(TWO);
    node.simgpu(&["teardown"]);
    within(&node, "finds_nothing", &[]);
    let (status, errors) = node.counter(&[]).end();
    assert!(!status.success());
    assert!(errors.contains("CUDA_ERROR_NO_DEVICE"), "{errors}");
}

#[test]
#[ignore = "body of without_devices_there_is_no_driver"]
fn finds_nothing() {
    assert_eq!(Nvml::open().plain("nvmlInit_v2"), 9, "driver not loaded");
}

#[repr(C)]
#[derive(Default)]
struct Pci {
    bus_id_legacy: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    pci_device_id: u32,
    pci_subsystem_id: u32,
    bus_id: [u8; 32],
}

#[repr(C)]
#[derive(Default)]
struct Process {
    pid: u32,
    used: u64,
    instances: [u32; 2],
}

type Device = *mut c_void;

struct Nvml(Library);

impl Nvml {
    fn open() -> Self {
        // SAFETY: the simulated library's constructors do nothing.
        Self(unsafe { Library::new("libnvidia-ml.so.1") }.unwrap_or_else(|error| panic!("{error}")))
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers below give the types of NVML's header.
        *unsafe { self.0.get::<T>(name) }.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn plain(&self, name: &str) -> c_int {
        self.function::<extern "C" fn() -> c_int>(name)()
    }

    fn number(&self, name: &str, device: Option<Device>) -> Result<u32, c_int> {
        let mut value = 0;
        let code = match device {
            Some(device) => {
                self.function::<extern "C" fn(Device, *mut u32) -> c_int>(name)(device, &raw mut value)
            }
            None => self.function::<extern "C" fn(*mut u32) -> c_int>(name)(&raw mut value),
        };
        if code == 0 { Ok(value) } else { Err(code) }
    }

    fn device(&self, index: u32) -> Device {
        let mut device = std::ptr::null_mut();
        let get: extern "C" fn(u32, *mut Device) -> c_int = self.function("nvmlDeviceGetHandleByIndex_v2");
        assert_eq!(get(index, &raw mut device), 0);
        device
    }

    fn text(&self, name: &str, device: Device) -> String {
        let mut text = [0_u8; 96];
        let get: extern "C" fn(Device, *mut c_char, u32) -> c_int = self.function(name);
        assert_eq!(get(device, text.as_mut_ptr().cast(), 96), 0);
        CStr::from_bytes_until_nul(&text)
            .map(|text| text.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    fn fill<T>(&self, name: &str, device: Device, into: &mut T) -> c_int {
        self.function::<extern "C" fn(Device, *mut T) -> c_int>(name)(device, into)
    }

    fn processes(&self, device: Device, count: &mut u32, into: Option<&mut Process>) -> c_int {
        let get: extern "C" fn(Device, *mut u32, *mut Process) -> c_int =
            self.function("nvmlDeviceGetComputeRunningProcesses_v3");
        get(device, count, into.map_or(std::ptr::null_mut(), |into| into))
    }
}
