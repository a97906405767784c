//! Namespaces: a task that the spec puts into a namespace must not stay in the runtime's.

use std::path::Path;

use super::tasks::Task;
use super::wire::{Message, WireError};
use super::{Host, Image, ImageFault, Inventory, numbers};
use firn_oci::Spec;

const IDS_MAGIC: u32 = 0x5443_2030;
const USERNS_MAGIC: u32 = 0x5547_4906;

/// Kinds as a spec names them, as /proc does, and the field of CRIU's ids.
const KINDS: [(&str, &str, u32); 8] = [
    ("pid", "pid", 5),
    ("network", "net", 6),
    ("ipc", "ipc", 7),
    ("uts", "uts", 8),
    ("mount", "mnt", 9),
    ("user", "user", 10),
    ("cgroup", "cgroup", 11),
    ("time", "time", 12),
];
const MOUNT: usize = 4;
const USER: usize = 5;

/// CRIU's ids of namespaces, in the order of [`KINDS`]; 0 for a kind that CRIU did not dump. A task without
/// an id of a kind gets its parent's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ids([u32; KINDS.len()]);

impl Ids {
    pub(super) fn read(message: &Message<'_>) -> Result<Self, WireError> {
        let mut ids = Self::default();
        for (id, (.., field)) in ids.0.iter_mut().zip(KINDS) {
            *id = message.number(field)?.unwrap_or(0);
        }
        Ok(ids)
    }
}

/// Ids of the mount namespaces, that of init first.
pub(super) fn check(
    spec: &Spec,
    image: &Image,
    inventory: &Inventory,
    tasks: &[Task],
    host: &Host,
) -> Result<Vec<u32>, ImageFault> {
    let (mut mounts, mut users) = (Vec::new(), Vec::new());
    for task in tasks.iter().filter(|task| task.is_alive) {
        let name = format!("ids-{}.img", task.pid);
        let ids = image.required(&name, IDS_MAGIC, Ids::read)?;
        for ((kind, file, _), (id, criu)) in KINDS.into_iter().zip(ids.0.into_iter().zip(inventory.criu.0)) {
            if is_own(spec, kind, file, host) && (id == 0 || id == criu) {
                let what = format_args!("the {kind} namespace of process {}", task.pid);
                let own = "one of the container's own";
                return Err(ImageFault::exceeds(&name, what, "the host's", own));
            }
        }
        mounts.push(ids.0[MOUNT]);
        users.push(ids.0[USER]);
    }
    mounts.dedup();
    users.dedup();
    if let Some(other) = mounts[..].get(1).filter(|_| !spec.may_mount()) {
        return Err(ImageFault::exceeds(
            format_args!("mountpoints-{other}.img"),
            "the number of mount namespaces",
            mounts.len(),
            "one, and no CAP_SYS_ADMIN",
        ));
    }
    for id in users.into_iter().filter(|id| *id != inventory.criu.0[USER]) {
        user_map(spec, image, id)?;
    }
    Ok(mounts)
}

/// The tasks are in the namespaces of the spec. `init` is the first.
pub(super) fn check_made(spec: &Spec, init: i32, pid: i32, host: &Host) -> Result<(), ImageFault> {
    let name = format!("process {pid}");
    let of = |pid: i32, file: &str| (host.namespace)(Path::new(&format!("/proc/{pid}/ns/{file}")));
    for (kind, file, _) in KINDS {
        if !spec.has_namespace(kind) {
            continue;
        }
        let Some(found) = of(pid, file) else {
            let reason = format!("its {kind} namespace cannot be looked at");
            return Err(ImageFault::Unreadable { file: name, reason });
        };
        let exceeds = |found, allowed| {
            let what = format_args!("the {kind} namespace");
            Err(ImageFault::exceeds(&name, what, found, allowed))
        };
        if is_own(spec, kind, file, host)
            && (host.namespace)(&Path::new("/proc/self/ns").join(file)) == Some(found)
        {
            return exceeds("the host's", "one of the container's own");
        }
        let joined = spec.namespace_path(kind).and_then(|path| (host.namespace)(path));
        if joined.is_some_and(|joined| joined != found) {
            return exceeds("another", "one that is joined");
        }
        if kind == "mount" && !spec.may_mount() && of(init, file) != Some(found) {
            return exceeds("one of its own", "that of the container");
        }
    }
    Ok(())
}

/// Ids of the host that stand for ids of the container, as a file of /proc lists them.
pub(super) fn check_made_map(spec: &Spec, init: i32) -> Result<(), ImageFault> {
    if !spec.makes_user_namespace() {
        return Ok(());
    }
    for kind in ["uid", "gid"] {
        let file = format!("/proc/{init}/{kind}_map");
        let text = std::fs::read_to_string(&file).map_err(|source| ImageFault::unreadable(&file, &source))?;
        let extent = |line: &str| numbers(line).try_into().unwrap_or([u32::MAX; 3]);
        check_map(spec, &format!("process {init}"), kind, text.lines().map(extent))?;
    }
    Ok(())
}

/// Every id of a user namespace that the spec makes stands for the same id of the host as in the spec's map.
fn check_map(
    spec: &Spec,
    name: &str,
    kind: &str,
    mut extents: impl Iterator<Item = [u32; 3]>,
) -> Result<(), ImageFault> {
    let allowed = spec.id_map(kind)?;
    let Some([inner, outer, count]) = extents.find(|extent| !is_within(*extent, &allowed)) else {
        return Ok(());
    };
    let (found, allowed) = (format!("{inner} {outer} {count}"), format!("{allowed:?}"));
    Err(ImageFault::exceeds(
        name,
        format!("the {kind} map"),
        found,
        allowed,
    ))
}

/// Whether the spec gives the container another namespace of this kind than the runtime's.
fn is_own(spec: &Spec, kind: &str, file: &str, host: &Host) -> bool {
    let of_runtime = Path::new("/proc/self/ns").join(file);
    let is_runtimes = |path: &Path| match ((host.namespace)(path), (host.namespace)(&of_runtime)) {
        (Some(joined), Some(own)) => joined == own,
        _ => false,
    };
    spec.has_namespace(kind) && !spec.namespace_path(kind).is_some_and(is_runtimes)
}

fn user_map(spec: &Spec, image: &Image, id: u32) -> Result<(), ImageFault> {
    // Else it is joined, or is more than the spec asks for.
    if !spec.makes_user_namespace() {
        return Ok(());
    }
    let name = format!("userns-{id}.img");
    let extent = |of: &Message<'_>| Ok([of.required(1)?, of.required(2)?, of.required(3)?]);
    let maps = image.required(&name, USERNS_MAGIC, |message| {
        Ok([
            ("uid", message.each(1, extent)?),
            ("gid", message.each(2, extent)?),
        ])
    })?;
    for (kind, extents) in maps {
        check_map(spec, &name, kind, extents.into_iter())?;
    }
    Ok(())
}

fn is_within([inner, outer, count]: [u32; 3], allowed: &[[u32; 3]]) -> bool {
    allowed.iter().any(|[first, lower, all]| {
        let Some(from) = inner.checked_sub(*first) else {
            return false;
        };
        u64::from(from) + u64::from(count) <= u64::from(*all)
            && u64::from(*lower) + u64::from(from) == u64::from(outer)
    })
}
