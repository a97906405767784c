//! Mounts: those of the spec, as restricted as there, and no other that shows more.
//!
//! CRIU makes the mounts that the image lists. A container that may mount by itself (CAP_SYS_ADMIN, and no
//! user namespace) could make them too; of its mounts only the paths are checked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::wire::{Message, WireError};
use super::{Host, Image, ImageFault, clean, missing};
use firn_host::mountinfo::MountEntry;
use firn_oci::Spec;
use firn_oci::spec::{RESTRICTIONS, SpecMount};

const MAGIC: u32 = 0x5556_3928;

/// Kinds of file systems as CRIU numbers them.
const PROC: u32 = 1;
const SYSFS: u32 = 2;
const TMPFS: u32 = 5;
const DEVPTS: u32 = 6;
const CGROUP: u32 = 12;
/// A kind that has no number here.
const OTHER: u32 = 16;
const CGROUP2: u32 = 23;
const KINDS: [(&str, u32); 7] = [
    ("proc", PROC),
    ("sysfs", SYSFS),
    ("tmpfs", TMPFS),
    ("devpts", DEVPTS),
    ("mqueue", 14),
    ("cgroup", CGROUP),
    ("cgroup2", CGROUP2),
];

/// Restrictions of a mount ([`RESTRICTIONS`]).
const READ_ONLY: u32 = 1;
const ALL_RESTRICTIONS: u32 = 0xf;

/// How mounts that are made elsewhere appear in one, as specs name it.
const PRIVATE: [&str; 4] = ["private", "rprivate", "unbindable", "runbindable"];
const PROPAGATED: [&str; 4] = ["shared", "rshared", "slave", "rslave"];

/// By what name runc hands CRIU the file that hides others.
const NULL: &str = "/dev/null";

/// Devices that runc makes or mounts without being asked.
const DEVICES: [&str; 7] = ["console", "full", "null", "random", "tty", "urandom", "zero"];

struct Mount {
    kind: u32,
    id: u32,
    device: u32,
    parent: u32,
    flags: u32,
    /// Whether what is mounted elsewhere can appear below it.
    propagates: bool,
    root: PathBuf,
    point: PathBuf,
    /// What CRIU is to bind there, by the name that it has for CRIU's caller.
    external: Option<String>,
}

pub(super) fn check(spec: &Spec, image: &Image, namespaces: &[u32], host: &Host) -> Result<(), ImageFault> {
    for id in namespaces.iter().filter(|_| spec.has_namespace("mount")) {
        let name = format!("mountpoints-{id}.img");
        let mounts = image.read(&name, MAGIC, read)?.ok_or_else(|| missing(&name))?;
        let mounts: Option<Vec<Mount>> = mounts.into_iter().collect();
        let mounts =
            mounts.ok_or_else(|| ImageFault::malformed(&name, "a path that is relative or climbs"))?;
        if !spec.may_mount() {
            compare(&name, Known::of(spec, host)?, mounts, host)?;
        }
    }
    Ok(())
}

/// The same for existing mounts. The spec's entry for the mount point decides whether a mount is a bind
/// mount.
pub(super) fn check_made(
    spec: &Spec,
    name: &str,
    entries: &[MountEntry],
    host: &Host,
) -> Result<(), ImageFault> {
    if spec.may_mount() {
        return Ok(());
    }
    let known = Known::of(spec, host)?;
    let mounts = entries.iter().map(|entry| made(entry, &known)).collect();
    compare(name, known, mounts, host)
}

/// Flags of bind mounts and of the root that have to be set again. If another mount has the same source and
/// flags, CRIU loses all flags of the second: it takes it for the first, which it does not bind again. The
/// root is writable after a restore by CRIU 4.1.
pub(super) fn loosened(
    spec: &Spec,
    entries: &[MountEntry],
    host: &Host,
) -> Result<Vec<(PathBuf, u32)>, ImageFault> {
    /// noatime, nodiratime, relatime: they are lost where a new mount does not name them.
    const TIMES: [(&str, u32); 3] = [
        ("noatime", 1 << 10),
        ("nodiratime", 1 << 11),
        ("relatime", 1 << 21),
    ];
    let known = Known::of(spec, host)?;
    let read_only_root = known.read_only_root && !spec.may_mount();
    let mut all = Vec::new();
    for entry in entries {
        let of_spec = known.last_at(&entry.mount_point);
        let restrictions = match of_spec.filter(|of_spec| of_spec.is_bind()) {
            Some(of_spec) => of_spec.restrictions(),
            // Who may mount can have made it writable.
            None if read_only_root && entry.mount_point == Path::new("/") => READ_ONLY,
            None => continue,
        };
        let found = made(entry, &known).flags;
        let wanted = found | restrictions;
        if wanted != found {
            let has = |option: &str| entry.options.split(',').any(|word| word == option);
            let times = TIMES.iter().filter(|(name, _)| has(name));
            let times: u32 = times.map(|(_, flag)| flag).sum();
            all.push((entry.mount_point.clone(), wanted + times));
        }
    }
    Ok(all)
}

/// Whether the spec demands that no mount from elsewhere appears in this one. Without an option for it, the
/// runtime decides.
fn is_private(of_spec: &SpecMount) -> bool {
    let mut words = of_spec.options.iter().rev().map(|word| &**word);
    let last = words.find(|word| PRIVATE.contains(word) || PROPAGATED.contains(word));
    last.is_some_and(|word| PRIVATE.contains(&word))
}

fn compare(name: &str, known: Known, mounts: Vec<Mount>, host: &Host) -> Result<(), ImageFault> {
    let checked = Checked { known, mounts, host };
    checked.all().map_err(|(point, found, allowed)| {
        let what = format_args!("the mount {}", point.display());
        ImageFault::exceeds(name, what, found, allowed)
    })
}

fn kind_of(name: &str) -> Option<u32> {
    let kind = KINDS.iter().find(|(known, _)| *known == name);
    kind.map(|(_, kind)| *kind)
}

/// The number of its file system, as CRIU writes it.
pub(super) fn device(entry: &MountEntry) -> Option<u32> {
    let (major, minor) = entry.device.split_once(':')?;
    let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
    Some(major << 20 | minor)
}

fn made(entry: &MountEntry, known: &Known) -> Mount {
    let has = |option: &str| entry.options.split(',').any(|word| word == option);
    let flags = RESTRICTIONS.iter().filter(|(set, ..)| has(set));
    let point = &entry.mount_point;
    let is_bind = |of_spec: &SpecMount| of_spec.destination == *point && of_spec.is_bind();
    let is_null = entry.root.ends_with("null");
    let external = if known.masked.contains(point) {
        is_null.then(|| NULL.to_owned())
    } else if known.mounts.iter().any(is_bind) || known.devices.contains(point) {
        Some(point.to_string_lossy().into_owned())
    } else {
        None
    };
    Mount {
        kind: kind_of(&entry.fs_type).unwrap_or(OTHER),
        id: entry.id,
        device: device(entry).unwrap_or_default(),
        parent: entry.parent,
        flags: flags.map(|(.., flag)| flag).sum(),
        propagates: entry.propagates,
        root: entry.root.clone(),
        point: point.clone(),
        external,
    }
}

/// None for paths that lead elsewhere.
fn read(message: &Message<'_>) -> Result<Option<Mount>, WireError> {
    // Older CRIUs begin the mount point with a dot.
    let point = message.required_text(7)?;
    let point = clean(point.strip_prefix('.').unwrap_or(point));
    let (Some(point), Some(root)) = (point, clean(message.required_text(6)?)) else {
        return Ok(None);
    };
    let is_set = |field| Ok::<_, WireError>(message.number(field)?.is_some_and(|number: u32| number != 0));
    // Where older CRIUs name what is external.
    if is_set(13)? {
        return Err(WireError { field: 13 });
    }
    Ok(Some(Mount {
        kind: message.required(1)?,
        id: message.required(2)?,
        device: message.required(3)?,
        parent: message.required(4)?,
        flags: message.required(5)?,
        propagates: is_set(10)? || is_set(11)?,
        root,
        point,
        external: message.text(18)?.map(str::to_owned),
    }))
}

/// What the spec has for mount points.
struct Known {
    /// With the destinations that they have in the container, where links lead elsewhere.
    mounts: Vec<SpecMount>,
    /// By that destination: the last mount's as the spec names it. The runtime hands it to CRIU by this name.
    given: BTreeMap<PathBuf, PathBuf>,
    devices: Vec<PathBuf>,
    masked: Vec<PathBuf>,
    read_only: Vec<PathBuf>,
    read_only_root: bool,
}

impl Known {
    fn of(spec: &Spec, host: &Host) -> Result<Self, ImageFault> {
        let mut mounts = spec.mounts()?;
        let mut given = BTreeMap::new();
        for mount in &mut mounts {
            let named = mount.point();
            let placed = host.place(&named);
            mount.destination = placed.map_err(|error| {
                ImageFault::unreadable(&format!("the place {} in the root", named.display()), &error)
            })?;
            given.insert(mount.destination.clone(), named);
        }
        let mut devices: Vec<PathBuf> = DEVICES.iter().map(|name| Path::new("/dev").join(name)).collect();
        devices.extend(spec.devices()?.into_iter().map(|device| device.node.path));
        Ok(Self {
            mounts,
            given,
            devices,
            masked: spec.masked_paths(),
            read_only: spec.read_only_paths(),
            read_only_root: spec.is_root_read_only(),
        })
    }

    /// The spec's mount that shows there: the last of one destination lies above the others.
    fn last_at(&self, point: &Path) -> Option<&SpecMount> {
        self.mounts.iter().rfind(|mount| mount.destination == point)
    }
}

/// What the spec has at paths that no process may change.
const HIDDEN: &str = "a path that is masked or read-only";

/// A mount point, what is wrong there, and what the spec has.
type Wrong<'a> = (&'a Path, &'static str, &'static str);

struct Checked<'a> {
    known: Known,
    mounts: Vec<Mount>,
    host: &'a Host,
}

impl Checked<'_> {
    fn all(&self) -> Result<(), Wrong<'_>> {
        let mut points: BTreeMap<&Path, usize> = BTreeMap::new();
        for mount in &self.mounts {
            *points.entry(&mount.point).or_default() += 1;
        }
        for (point, count) in points {
            let of_spec = |mount: &&SpecMount| mount.destination == point;
            // One over the other would show it without what is mounted below the other.
            if count > self.known.mounts.iter().filter(of_spec).count().max(1) {
                return Err((point, "mounted more than once", "one mount"));
            }
        }
        self.mounts.iter().try_for_each(|mount| self.one(mount))?;
        self.none_is_of_outside()?;
        let hidden = self.known.masked.iter().chain(&self.known.read_only);
        hidden.into_iter().try_for_each(|path| self.is_hidden(path))
    }

    /// CRIU binds mounts of the same device from each other, whatever their kinds. So no other mount may show
    /// less restricted what a mount from outside shows.
    fn none_is_of_outside(&self) -> Result<(), Wrong<'_>> {
        // Files: no directory is bound from them.
        let is_file =
            |point: &PathBuf| self.known.masked.contains(point) || self.known.devices.contains(point);
        let outside = |mount: &&Mount| mount.external.is_some() && !is_file(&mount.point);
        let outside: Vec<&Mount> = self.mounts.iter().filter(outside).collect();
        let is_less = |mount: &Mount, other: &Mount| {
            mount.device == other.device && other.flags & ALL_RESTRICTIONS & !mount.flags != 0
        };
        // The root is made first, of what the runtime passes.
        let found = self.mounts.iter().find(|mount| {
            mount.external.is_none()
                && mount.point != Path::new("/")
                && outside.iter().any(|other| is_less(mount, other))
        });
        let wrong = "of the device of a mount that is more restricted";
        found.map_or(Ok(()), |mount| Err((&*mount.point, wrong, "one of its own")))
    }

    /// A mount that the spec has, or one that shows nothing more.
    fn one<'a>(&'a self, mount: &'a Mount) -> Result<(), Wrong<'a>> {
        let point = &*mount.point;
        let is_read_only = mount.flags & READ_ONLY != 0;
        if point == Path::new("/") {
            let is_fit = is_read_only || !self.known.read_only_root;
            let wrong = (point, "writable", "a root that is read-only");
            return is_fit.then_some(()).ok_or(wrong);
        }
        if self.known.masked.iter().any(|path| path == point) {
            let hides = match &mount.external {
                // By its own name the runtime mounts there what it masks with: crun until 1.21.
                Some(key) => key == NULL || Path::new(key) == point,
                None => mount.kind == TMPFS && is_read_only && self.is_alone(mount),
            };
            let wrong = (point, "what shows something", "a path that is masked");
            return hides.then_some(()).ok_or(wrong);
        }
        if self.known.read_only.iter().any(|path| path == point) {
            let is_part = self
                .parent(point)
                .is_some_and(|parent| parent.device == mount.device && shows(parent, mount));
            let is_fit = is_read_only && is_part && mount.external.is_none();
            let wrong = (point, "writable, or of another place", "a path that is read-only");
            return is_fit.then_some(()).ok_or(wrong);
        }
        if let Some(of_spec) = self.known.last_at(point) {
            return self.as_in_spec(mount, of_spec);
        }
        let is_fit = self.is_of_cgroups(mount) || self.is_device(mount) || self.is_alone(mount);
        is_fit.then_some(()).ok_or((point, "there", "no such mount"))
    }

    fn as_in_spec<'a>(&self, mount: &'a Mount, of_spec: &SpecMount) -> Result<(), Wrong<'a>> {
        let point = &*mount.point;
        let kind = kind_of(&of_spec.kind);
        let is_cgroup = |kind| matches!(kind, CGROUP | CGROUP2);
        let is_same = match &mount.external {
            Some(key) => {
                let key: PathBuf = Path::new(key).components().collect();
                key == point || self.known.given.get(point) == Some(&key)
            }
            // An empty one shows less than what the spec binds there.
            None if of_spec.is_bind() => self.is_alone(mount),
            None => {
                // Under v1, cgroups are a tmpfs with a mount for each hierarchy.
                let same = kind == Some(mount.kind)
                    || kind.is_some_and(is_cgroup) && (is_cgroup(mount.kind) || mount.kind == TMPFS);
                let is_whole = mount.root == Path::new("/") || kind.is_some_and(is_cgroup);
                same && is_whole
            }
        };
        if !is_same {
            return Err((point, "another mount", "a mount of its own there"));
        }
        if kind.is_some_and(is_cgroup) && mount.kind == TMPFS {
            // runc leaves it writable, whatever the spec sets. The hierarchies in it are not.
            return Ok(());
        }
        if of_spec.restrictions() & !mount.flags != 0 {
            return Err((point, "less restricted", "ro, nosuid, nodev or noexec there"));
        }
        if mount.propagates && is_private(of_spec) {
            let found = "where the host's later mounts appear";
            return Err((point, found, "a private one there"));
        }
        Ok(())
    }

    /// A hierarchy below the spec's mount of cgroups.
    fn is_of_cgroups(&self, mount: &Mount) -> bool {
        let above = self.known.mounts.iter().find(|of_spec| {
            of_spec.kind.starts_with("cgroup") && mount.point.starts_with(&of_spec.destination)
        });
        let Some(above) = above else {
            return false;
        };
        let is_read_only = above.options.iter().any(|option| option == "ro");
        let is_own = match &mount.external {
            Some(key) => Path::new(key).starts_with(&above.destination),
            None => matches!(mount.kind, CGROUP | CGROUP2),
        };
        is_own && (!is_read_only || mount.flags & READ_ONLY != 0)
    }

    fn is_device(&self, mount: &Mount) -> bool {
        let is_known = self.known.devices.contains(&mount.point);
        is_known
            && match &mount.external {
                Some(key) => Path::new(key) == mount.point || key == NULL,
                // The terminal.
                None => mount.kind == DEVPTS,
            }
    }

    /// A tmpfs, or a part of one, of which nothing is mounted that the container or this node has from
    /// outside; or a part of the root.
    fn is_alone(&self, mount: &Mount) -> bool {
        let same = || self.mounts.iter().filter(|other| other.device == mount.device);
        let of_root = |root: &Mount| {
            root.point == Path::new("/")
                && mount.root.starts_with(&root.root)
                && (!self.known.read_only_root || mount.flags & READ_ONLY != 0)
        };
        let is_inner = |other: &Mount| other.kind == TMPFS && (other.external.is_none() || is_null(other));
        let is_own = !self.host.mounted.contains(&mount.device) && same().all(is_inner);
        mount.external.is_none() && (is_own || same().any(of_root))
    }

    /// A path that the spec hides or makes read-only is so, if the container can see it.
    fn is_hidden<'a>(&'a self, path: &'a Path) -> Result<(), Wrong<'a>> {
        let Some(above) = self.parent(path) else {
            return Ok(());
        };
        if let Some(mount) = self.mounts.iter().find(|mount| mount.point == path) {
            let wrong = (path, "mounted over", HIDDEN);
            return (mount.parent == above.id).then_some(()).ok_or(wrong);
        }
        let of_host = match above.kind {
            PROC => "/proc",
            SYSFS => "/sys",
            _ => return Ok(()),
        };
        let below = path.strip_prefix(&above.point).unwrap_or(Path::new(""));
        let below = above.root.strip_prefix("/").unwrap_or(Path::new("")).join(below);
        // A mask of one above hides it too.
        let is_masked = self.known.masked.contains(&above.point);
        let is_fit = is_masked || !(self.host.exists)(&Path::new(of_host).join(below));
        is_fit.then_some(()).ok_or((path, "open", HIDDEN))
    }

    /// The mount in which a path lies.
    fn parent(&self, path: &Path) -> Option<&Mount> {
        let above = self
            .mounts
            .iter()
            .filter(|mount| path != mount.point && path.starts_with(&mount.point));
        above.max_by_key(|mount| mount.point.components().count())
    }
}

fn is_null(mount: &Mount) -> bool {
    mount.external.as_deref() == Some(NULL)
}

/// Whether a mount shows what lies at its mount point in the mount above.
fn shows(above: &Mount, mount: &Mount) -> bool {
    let below = mount.point.strip_prefix(&above.point);
    below.is_ok_and(|below| above.root.join(below) == mount.root)
}

#[cfg(test)]
mod tests;
