//! Container specs: how they request GPUs, their edits and mounts, CRIU's configuration, device nodes in /dev.
//!
//! Everything here works on files and plain data: no container runtime is called and no driver is loaded. Whatever
//! comes from inside a container is hostile until checked.
#![forbid(unsafe_code)]

pub mod criu_config;
pub mod criu_script;
pub mod dev_repair;
mod device_class;
pub mod edit;
#[cfg(any(test, fuzzing, feature = "fixtures"))]
#[doc(hidden)]
pub mod fixtures;
mod gpu_request;
pub mod mounts;
pub mod nccl;
pub mod spec;
mod vendor;

pub use device_class::{GpuPath, classify};
pub use gpu_request::{
    GpuRequest, KIND, NamedGpus, RUNTIME_KIND, RequestSource, Rules, drop_mounting_hooks, remove_requests,
    requests_beyond_gpus,
};
pub use spec::{DeviceRule, Spec, SpecDevice, SpecError, SpecMount};
pub use vendor::{OtherGpu, other_gpu};
