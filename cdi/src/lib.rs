//! The Container Device Interface: reads CDI files and adds their edits to a container's spec.
//!
//! Follows version 1.1.0 of the CDI specification, without the edits `netDevices` and `intelRdt`, and reads
//! files of 0.3.0 and later. Specs are edited as the JSON that containerd wrote, so that unknown fields
//! survive. Only short-lived helpers and the command line use this crate: the shim must not link a YAML
//! parser.
#![forbid(unsafe_code)]

mod bounded;
mod convert;
mod error;
mod file;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod inject;
pub mod ldcache;
mod names;
mod parse;
mod registry;
mod without_nodes;

pub use convert::{ConvertError, Converted, convert, convert_bundle, convert_by};
pub use error::{CdiError, FileError};
pub use file::{CdiFile, Device, DeviceNode, Edits, Hook, Mount};
pub use firn_oci::KIND;
pub use names::{BadName, DeviceName};
pub use registry::Registry;
