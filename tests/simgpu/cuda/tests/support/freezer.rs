//! A control group for one process: frozen, or denied a device. Works with the v1 hierarchies and freezes
//! with v2.

use std::fs;
use std::path::{Path, PathBuf};

use super::eventually;

/// A cgroup of one controller; the process goes back to the root and the group away when dropped.
pub struct Group {
    dir: PathBuf,
    v2: bool,
}

const V1: &str = "/sys/fs/cgroup";

/// The reason why a process cannot be frozen here.
pub fn no_freezer() -> Option<&'static str> {
    (root("freezer").is_none()).then_some("needs a cgroup freezer")
}

/// The reason why a device cannot be denied here: cgroup v2 does that by BPF only.
pub fn no_device_rules() -> Option<&'static str> {
    (!Path::new(V1).join("devices/devices.deny").exists()
        && !Path::new(V1).join("devices/cgroup.procs").exists())
    .then_some("needs the device controller of cgroup v1")
}

fn root(controller: &str) -> Option<(PathBuf, bool)> {
    let v1 = Path::new(V1).join(controller);
    if v1.join("cgroup.procs").exists() {
        return Some((v1, false));
    }
    let v2 = Path::new(V1);
    v2.join("cgroup.controllers")
        .exists()
        .then(|| (v2.to_owned(), true))
}

impl Group {
    /// A group of `controller` with process `pid` in it.
    pub fn with(controller: &str, pid: i32) -> Self {
        let (root, v2) = root(controller).unwrap();
        let dir = root.join(format!("simgpu-test-{pid}"));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("cgroup.procs"), pid.to_string()).unwrap();
        Self { dir, v2 }
    }

    /// Freezes the process and waits until it is frozen.
    pub fn freeze(&self) {
        self.set(true);
    }

    /// Thaws it.
    pub fn thaw(&self) {
        self.set(false);
    }

    fn set(&self, frozen: bool) {
        let (file, on, off) = if self.v2 {
            ("cgroup.freeze", "1", "0")
        } else {
            ("freezer.state", "FROZEN", "THAWED")
        };
        let word = if frozen { on } else { off };
        fs::write(self.dir.join(file), word).unwrap();
        let (file, expected) = if self.v2 {
            ("cgroup.events", format!("frozen {word}"))
        } else {
            (file, word.into())
        };
        eventually("the freezer", || {
            fs::read_to_string(self.dir.join(file))
                .unwrap()
                .contains(&expected)
                .then_some(())
        });
    }

    /// Denies the device that the node at `path` opens.
    pub fn deny(&self, path: &Path) {
        use std::os::unix::fs::MetadataExt;
        let device = fs::metadata(path).unwrap().rdev();
        let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
        fs::write(self.dir.join("devices.deny"), format!("b {major}:{minor} rwm")).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.dir.join("freezer.state").exists() || self.v2 {
            self.thaw();
        }
        let parent = self.dir.parent().unwrap().join("cgroup.procs");
        for pid in fs::read_to_string(self.dir.join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
        {
            // It may end meanwhile.
            let _ = fs::write(&parent, pid);
        }
        eventually("the group's end", || fs::remove_dir(&self.dir).ok());
    }
}
