//! What a cgroup used and may use, as the message that containerd expects for this kind of host.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;
mod v1;
mod v2;

use std::path::Path;

use firn_host::cgroup_mounts::Version;
use firn_transaction::cgroup::{Cgroup, CgroupError};
use protobuf::well_known_types::any::Any;

/// The metrics of a cgroup that is there.
pub(crate) fn of(cgroup: &Cgroup) -> Result<Any, CgroupError> {
    if !cgroup.exists() {
        return Err(cgroup.gone());
    }
    match cgroup.version() {
        Version::V1 => v1::metrics(cgroup),
        Version::V2 => v2::metrics(&cgroup.primary_dir(), Path::new(v2::HUGE_PAGES)),
    }
}
