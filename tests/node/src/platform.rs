//! What a test node can be: a suite of Debian or Ubuntu, a cgroup version, and whether systemd is its init.

use std::fmt;

use crate::{Builder, Cgroup, Node, Suite};

/// A kind of node that tests run on. Its name is `forky`, `trixie v2`, `forky v2 systemd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Platform {
    /// Its containerd, runc and CRIU.
    pub suite: Suite,
    /// Its cgroup version; [`Cgroup::Auto`] is the one that has the resource controllers on this machine.
    pub cgroup: Cgroup,
    /// Whether systemd is its init and makes the cgroups.
    pub systemd: bool,
}

impl Platform {
    /// containerd 2.1.
    pub const FORKY: Self = Self::new(Suite::Forky, Cgroup::Auto);
    /// containerd 2.1 with cgroup v1.
    pub const FORKY_V1: Self = Self::new(Suite::Forky, Cgroup::V1);
    /// containerd 2.1 with cgroup v2.
    pub const FORKY_V2: Self = Self::new(Suite::Forky, Cgroup::V2);
    /// containerd 2.1 with cgroup v2 and systemd.
    pub const FORKY_SYSTEMD: Self = Self::FORKY_V2.with_systemd();
    /// containerd 1.7.
    pub const TRIXIE: Self = Self::new(Suite::Trixie, Cgroup::Auto);
    /// containerd 1.7 with cgroup v1.
    pub const TRIXIE_V1: Self = Self::new(Suite::Trixie, Cgroup::V1);
    /// containerd 1.7 with cgroup v2.
    pub const TRIXIE_V2: Self = Self::new(Suite::Trixie, Cgroup::V2);
    /// containerd 1.7 with cgroup v2 and systemd.
    pub const TRIXIE_SYSTEMD: Self = Self::TRIXIE_V2.with_systemd();
    /// Ubuntu 24.04, containerd 1.7 with cgroup v2.
    pub const NOBLE_V2: Self = Self::new(Suite::Noble, Cgroup::V2);

    /// A platform without systemd.
    pub const fn new(suite: Suite, cgroup: Cgroup) -> Self {
        Self {
            suite,
            cgroup,
            systemd: false,
        }
    }

    const fn with_systemd(self) -> Self {
        Self {
            systemd: true,
            ..self
        }
    }

    /// How such a node is made.
    pub fn node(self) -> Builder {
        Node::builder(self.suite)
            .cgroup(self.cgroup)
            .systemd(self.systemd)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.suite.as_str())?;
        f.write_str(match self.cgroup {
            Cgroup::Auto => "",
            Cgroup::V1 => " v1",
            Cgroup::V2 => " v2",
        })?;
        f.write_str(if self.systemd { " systemd" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_suite_cgroup_version_and_init() {
        let names = [
            Platform::FORKY,
            Platform::TRIXIE_V1,
            Platform::FORKY_V2,
            Platform::TRIXIE_SYSTEMD,
        ]
        .map(|platform| platform.to_string());
        assert_eq!(names, ["forky", "trixie v1", "forky v2", "trixie v2 systemd"]);
    }
}
