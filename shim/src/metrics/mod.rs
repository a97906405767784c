//! What a cgroup used and may use, as the message that containerd expects for this kind of host.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod tests;

use std::path::Path;

use firn_host::cgroup_mounts::Version;
use firn_process::cgroup::{Cgroup, CgroupError, read};
use protobuf::Message;
use protobuf::well_known_types::any::Any;

/// A message whose fields have the values of keys in a file of the kernel. A key is named only where it is
/// not the field's name.
macro_rules! from_keys {
    ($message:ident, $file:expr, { $($field:ident $(= $key:literal)?),* }) => {{
        let mut message = $message::default();
        $(message.$field = $file.get(from_keys!(@key $field $($key)?));)*
        message
    }};
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:literal) => { $key };
}

/// The entries of a file about RDMA devices; none if there is no such file. Both versions have a message of
/// this name.
macro_rules! rdma_entries {
    ($path:expr) => {
        read::text(&$path)?.map(|text| {
            let lines = text.lines().filter_map(NestedLine::parse);
            let entry = |line: NestedLine<'_>| RdmaEntry {
                device: line.name.to_owned(),
                hca_handles: read::saturate(line.get("hca_handle")),
                hca_objects: read::saturate(line.get("hca_object")),
                ..RdmaEntry::default()
            };
            lines.map(entry).collect()
        })
    };
}

mod v1;
mod v2;

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

fn encoded(type_url: &str, metrics: &impl Message) -> Any {
    let value = metrics.write_to_bytes();
    Any {
        type_url: type_url.to_owned(),
        value: value.expect("a message without required fields is always complete"),
        ..Any::default()
    }
}

/// 0 where the file does not exist.
fn number(dir: &Path, file: &str) -> Result<u64, CgroupError> {
    Ok(read::number(&dir.join(file))?.unwrap_or_default())
}
