//! The runc that is called.

use std::path::PathBuf;

use firn_config::{Config, find_runtime};

use crate::error::Trouble;

/// The runc that the configuration names, or the first one in PATH.
pub fn runc() -> Result<PathBuf, Trouble> {
    match Config::load()?.runc.path {
        Some(path) => Ok(path),
        None => find_runtime("runc").ok_or(Trouble::NoRunc),
    }
}
