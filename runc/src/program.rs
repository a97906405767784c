//! The runc that is called.

use std::path::PathBuf;

use firn_config::{Config, ConfigError, Keys, find_runtime};

use crate::error::Trouble;

/// The runc that the configuration names, or the first one in PATH, also where a mistake hides the name: no
/// container may become unreachable by that.
pub fn runc() -> Result<PathBuf, Trouble> {
    match Config::load_what_is_valid().0.runc.path {
        Some(path) => Ok(path),
        None => find_runtime("runc").ok_or(Trouble::NoRunc),
    }
}

/// Fails where the configuration may name another runc than [`runc`] returns.
pub fn expect_configured() -> Result<(), ConfigError> {
    Config::load(Keys::RUNC).map(drop)
}
