//! Replaces the device rules of a container that exists.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use firn_gpu::NodeType;
use firn_oci::{Access, DeviceChange, DeviceRule};

use super::device_program::with_changes;
use super::{Cgroup, CgroupError, Version, read};
use crate::OrWarn;
use crate::sys::bpf;

/// The kernel's word for a cgroup that may use every device.
const ALL: &str = "a ";

impl Cgroup {
    /// Replaces the spec's rules `old` by `new`. Access changes for the devices that they name one by one;
    /// the runtime's own rules stay, and so do descriptors that are open.
    ///
    /// Only a frozen container sees the change as one step. After an error it has the old rules, unless the
    /// kernel refuses those as well: then there was a warning, and each device of the two lists may be open
    /// or not. No other device is affected, and at no time is access to all denied.
    ///
    /// Cgroups below the container's own, if it has made some, follow: in v2 by themselves; in v1 each gets
    /// what is new that had all of what goes.
    ///
    /// systemd keeps rules for its units: for a container in one of them call [`Cgroup::allow_in_unit`]
    /// first, or `daemon-reload` takes the new devices away.
    pub fn replace_device_rules(&self, old: &[DeviceRule], new: &[DeviceRule]) -> Result<(), CgroupError> {
        let changes = DeviceRule::changes(old, new).ok_or(CgroupError::DeviceRanges)?;
        let path = self.primary_dir();
        let dir = self.own_dir(self.dir("devices").ok_or(CgroupError::AnyDevice { path })?)?;
        if changes.is_empty() {
            return Ok(());
        }
        match self.version {
            Version::V1 => V1(&dir).replace(&changes),
            Version::V2 => V2::open(dir)?.replace(&changes),
        }
    }
}

/// The directory of a cgroup in the v1 hierarchy of devices.
struct V1<'a>(&'a Path);

impl V1<'_> {
    fn replace(&self, changes: &[DeviceChange]) -> Result<(), CgroupError> {
        if self.list()?.lines().any(|line| line.starts_with(ALL)) {
            return Err(CgroupError::AnyDevice {
                path: self.0.to_owned(),
            });
        }
        let replaced = self.apply(changes).and_then(|()| self.verify(changes));
        if replaced.is_err() {
            let reversed: Vec<_> = changes.iter().map(DeviceChange::reversed).collect();
            let reverted = self.apply(&reversed);
            let path = self.0.display();
            reverted.or_warn(format_args!("cannot write the old device rules of {path}"));
        }
        replaced
    }

    /// Order matters: what is new comes first, so that the kernel can refuse it while nothing is lost. What a
    /// cgroup is denied is denied to those below.
    fn apply(&self, changes: &[DeviceChange]) -> Result<(), CgroupError> {
        self.allow(changes)?;
        self.write("devices.deny", changes, DeviceChange::lost)
    }

    fn allow(&self, changes: &[DeviceChange]) -> Result<(), CgroupError> {
        self.write("devices.allow", changes, DeviceChange::gained)?;
        for child in read::children(self.0)? {
            let child = V1(&child);
            if child.has(changes, DeviceChange::lost)? {
                child.allow(changes)?;
            }
        }
        Ok(())
    }

    fn write(
        &self,
        file: &str,
        changes: &[DeviceChange],
        part: fn(&DeviceChange) -> Access,
    ) -> Result<(), CgroupError> {
        for change in changes.iter().filter(|change| !part(change).is_none()) {
            read::write(&self.0.join(file), &format!("{} {}", name(change), part(change)))?;
        }
        Ok(())
    }

    fn verify(&self, changes: &[DeviceChange]) -> Result<(), CgroupError> {
        let list = self.list()?;
        let is_right = |change: &DeviceChange| {
            let listed = listed(&list, change);
            (change.gained() & !listed).is_none() && (change.lost() & listed).is_none()
        };
        if changes.iter().all(is_right) {
            Ok(())
        } else {
            Err(CgroupError::DeviceRules {
                path: self.0.to_owned(),
            })
        }
    }

    /// Whether these parts of all changes are allowed.
    fn has(&self, changes: &[DeviceChange], part: fn(&DeviceChange) -> Access) -> Result<bool, CgroupError> {
        let list = self.list()?;
        Ok(changes
            .iter()
            .all(|change| (part(change) & !listed(&list, change)).is_none()))
    }

    fn list(&self) -> Result<String, CgroupError> {
        let list = read::text(&self.0.join("devices.list"))?;
        list.ok_or_else(|| CgroupError::Gone {
            path: self.0.to_owned(),
        })
    }
}

/// What a `devices.list` allows with this very device.
fn listed(list: &str, change: &DeviceChange) -> Access {
    let name = name(change);
    let lines = list
        .lines()
        .filter_map(|line| line.strip_prefix(&name)?.strip_prefix(' '));
    lines.fold(Access::NONE, |all, letters| all | Access::of_letters(letters))
}

/// The device in the form of the v1 files.
fn name(change: &DeviceChange) -> String {
    let kind = match change.kind {
        NodeType::Block => 'b',
        NodeType::Char => 'c',
    };
    format!("{kind} {}:{}", change.major, change.minor)
}

/// A v2 cgroup.
struct V2 {
    path: PathBuf,
    cgroup: File,
}

impl V2 {
    fn open(path: PathBuf) -> Result<Self, CgroupError> {
        match File::open(&path) {
            Ok(cgroup) => Ok(Self { path, cgroup }),
            Err(source) => Err(CgroupError::Read { path, source }),
        }
    }

    /// Puts each attached program's successor in its place, in one step for each: an access needs the
    /// consent of all.
    fn replace(&self, changes: &[DeviceChange]) -> Result<(), CgroupError> {
        let (ids, flags) = self.attached()?;
        if ids.is_empty() {
            return Err(CgroupError::AnyDevice {
                path: self.path.clone(),
            });
        }
        let pairs = ids.iter().map(|id| self.successor(*id, changes));
        let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
        let mut done = 0;
        let swap = |(old, new, _): &(OwnedFd, OwnedFd, u32)| {
            self.swap(old, new, flags)?;
            done += 1;
            Ok(())
        };
        let replaced = pairs.iter().try_for_each(swap).and_then(|()| self.verify(&pairs));
        if replaced.is_err() {
            for (old, new, _) in &pairs[..done] {
                let reverted = self.swap(new, old, flags);
                reverted.or_warn(format_args!("cannot attach the old device program again"));
            }
        }
        replaced
    }

    fn verify(&self, pairs: &[(OwnedFd, OwnedFd, u32)]) -> Result<(), CgroupError> {
        let (ids, _) = self.attached()?;
        if pairs.iter().map(|(_, _, id)| *id).eq(ids) {
            Ok(())
        } else {
            Err(CgroupError::DeviceRules {
                path: self.path.clone(),
            })
        }
    }

    fn attached(&self) -> Result<(Vec<u32>, u32), CgroupError> {
        bpf::attached(&self.cgroup).map_err(self.failed("list the"))
    }

    /// The program with this id, the one that takes its place, and that one's id.
    fn successor(&self, id: u32, changes: &[DeviceChange]) -> Result<(OwnedFd, OwnedFd, u32), CgroupError> {
        let old = bpf::by_id(id).map_err(self.failed("open a"))?;
        let (_, code) = bpf::instructions(&old).map_err(self.failed("read a"))?;
        let new = bpf::load(&with_changes(changes, &code)).map_err(self.failed("load a"))?;
        let (id, _) = bpf::instructions(&new).map_err(self.failed("read a"))?;
        Ok((old, new, id))
    }

    fn swap(&self, old: &OwnedFd, new: &OwnedFd, flags: u32) -> Result<(), CgroupError> {
        bpf::attach(&self.cgroup, new, flags, Some(old)).map_err(self.failed("replace a"))
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> CgroupError {
        let path = self.path.clone();
        move |source| CgroupError::DeviceProgram { action, path, source }
    }
}

#[cfg(test)]
mod tests;
