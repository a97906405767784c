//! Bundle specs, GPU grants, device nodes and the checkpoint manifest.
//!
//! Everything here works on files and plain data: no container runtime is called and no driver is loaded. Whatever
//! comes from a checkpoint image or from inside a container is hostile until checked.
#![forbid(unsafe_code)]

mod ask;
mod atomic;
pub mod cgroups;
pub mod criu;
pub mod criu_image;
mod decide;
pub mod devnodes;
pub mod edit;
#[cfg(any(test, fuzzing))]
mod fixtures;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod gpu_path;
mod grant;
pub mod job;
pub mod manifest;
mod map;
pub mod mountinfo;
pub mod mounts;
pub mod nccl;
mod policy;
pub mod procfs;
mod regular;
pub mod script;
mod spec;
pub mod surroundings;
mod vendor;

pub use ask::{Ask, Form, KIND, RUNTIME_KIND, Request, Rules, asks_for_more, drop_mounting_hooks, settle};
pub use atomic::write as write_file;
pub use decide::{DecideError, Decision};
pub use gpu_path::{GpuPath, classify};
pub use grant::{Basis, Grant, GrantError};
pub use map::{GpuMap, MapError, MapOrigin};
pub use policy::PolicyError;
pub use regular::{open_regular, reopen_regular};
pub use spec::{DeviceRule, Spec, SpecDevice, SpecError, SpecMount};
pub use vendor::{OtherGpu, other_gpu};
