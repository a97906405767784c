//! Container specs: GPU requests, edits and mounts, CRIU's configuration, device nodes in /dev.
//!
//! The crate works on files and plain data: it calls no container runtime and loads no driver. Everything
//! that comes from inside a container is hostile until checked.
#![forbid(unsafe_code)]

pub mod amd;
pub mod annotations;
pub mod criu_config;
pub mod criu_script;
pub mod cuda;
pub mod dev_repair;
mod device_class;
pub mod edit;
#[cfg(any(test, fuzzing, feature = "fixtures"))]
#[doc(hidden)]
pub mod fixtures;
mod gpu_request;
pub mod job_hook;
pub mod mounts;
pub mod nccl;
pub mod spec;
mod vendor;

pub use device_class::{GpuPath, classify};
pub use gpu_request::{
    GpuRequest, KIND, NamedGpus, RUNTIME_KIND, RequestSource, Rules, drop_mounting_hooks, remove_requests,
    requests_beyond_gpus,
};
pub use spec::{Access, DeviceChange, DeviceRule, Spec, SpecDevice, SpecError, SpecMount};
pub use vendor::{OtherGpu, is_any_accelerator, other_gpu};
