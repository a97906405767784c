//! The suites of Debian and Ubuntu that nodes are made of, the packages in them, and everything in which they
//! differ.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;
use serde::{Deserialize, Serialize};

/// Packages of every node of Debian in addition to the minimal base. tini is the node's init, or systemd
/// where that is asked for; CRIU locks networks with iptables; crun loads libcriu when it wants to dump.
const PACKAGES: &[&str] = &[
    "busybox-static",
    "ca-certificates",
    "containerd",
    "criu",
    "crun",
    "iptables",
    "iproute2",
    "libcriu2",
    "procps",
    "runc",
    "systemd",
    "tini",
];

/// As `PACKAGES`, of Ubuntu 24.04, and the libraries that CRIU needs. CRIU is not in it.
const UBUNTU_PACKAGES: &[&str] = &[
    "busybox-static",
    "ca-certificates",
    "containerd",
    "crun",
    "iptables",
    "iproute2",
    "libbsd0",
    "libgnutls30t64",
    "libnet1",
    "libnftables1",
    "libnl-3-200",
    "libprotobuf-c1",
    "procps",
    "runc",
    "systemd",
    "tini",
];

/// A suite of Debian or Ubuntu, chosen for the containerd in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Suite {
    /// containerd 1.7, runc 1.1, CRIU 4.1.
    Trixie,
    /// containerd 2.1, runc 1.3, CRIU 4.2.
    Forky,
    /// Ubuntu 24.04: containerd 1.7, runc 1.1, and trixie's CRIU, because it has none.
    Noble,
}

impl Suite {
    /// Every suite, oldest first.
    pub const ALL: [Self; 3] = [Self::Noble, Self::Trixie, Self::Forky];

    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trixie => "trixie",
            Self::Forky => "forky",
            Self::Noble => "noble",
        }
    }

    /// The packages of every node.
    pub(crate) fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Trixie | Self::Forky => PACKAGES,
            Self::Noble => UBUNTU_PACKAGES,
        }
    }

    /// Packages of another suite that every node has, too.
    pub(crate) fn borrowed(self) -> Option<(Self, &'static [&'static str])> {
        match self {
            Self::Trixie | Self::Forky => None,
            Self::Noble => Some((Self::Trixie, &["criu", "libcompel1"])),
        }
    }

    /// Whether its ctr passes CDI device names on (`--device nvidia.com/gpu=0`). The older one takes device
    /// nodes only.
    pub fn ctr_knows_cdi(self) -> bool {
        self == Self::Forky
    }

    /// Whether its ctr sends checkpoint options (end the container with the dump, or not) to a runtime of any
    /// name. The older one sends them to `io.containerd.runc.v2` alone: there firn has to stand in under that
    /// name.
    pub fn ctr_sends_checkpoint_options(self) -> bool {
        self == Self::Forky
    }

    /// Whether its containerd passes the image to restore from to a runtime of any name. The older one knows
    /// two names; a runtime of another name starts the container afresh.
    pub fn restores_by_any_runtime(self) -> bool {
        self == Self::Forky
    }

    /// Whether its containerd serves `CheckpointContainer` to Kubernetes.
    pub fn has_cri_checkpoint(self) -> bool {
        self == Self::Forky
    }

    /// Whether its containerd gives pods user namespaces, and reports it to the kubelet.
    pub fn has_cri_user_namespaces(self) -> bool {
        self == Self::Forky
    }

    /// Version of its containerd's configuration file.
    pub fn config_version(self) -> u32 {
        match self {
            Self::Trixie | Self::Noble => 2,
            Self::Forky => 3,
        }
    }

    /// The plugin of its containerd that has the runtimes of Kubernetes.
    pub fn cri_plugin(self) -> &'static str {
        match self {
            Self::Trixie | Self::Noble => "io.containerd.grpc.v1.cri",
            Self::Forky => "io.containerd.cri.v1.runtime",
        }
    }

    /// Configuration of its containerd for pods: the image of their sandboxes, and CDI devices. Ends within
    /// the table of [`Self::cri_plugin`].
    pub fn cri_config(self, sandbox_image: &str) -> String {
        let cri = self.cri_plugin();
        match self {
            Self::Trixie | Self::Noble => {
                format!("[plugins.{cri:?}]\nsandbox_image = {sandbox_image:?}\nenable_cdi = true\n")
            }
            Self::Forky => format!(
                "[plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = {sandbox_image:?}\n\
                 [plugins.{cri:?}]\n"
            ),
        }
    }

    /// `config.toml` of the suite's containerd. Drop-ins go to `/etc/containerd/conf.d`.
    pub(crate) fn containerd_config(self, cri: bool) -> String {
        let version = self.config_version();
        let cri_plugins: &[&str] = match self {
            Self::Trixie | Self::Noble => &["io.containerd.grpc.v1.cri"],
            Self::Forky => &[
                "io.containerd.grpc.v1.cri",
                "io.containerd.cri.v1.images",
                "io.containerd.cri.v1.runtime",
                "io.containerd.podsandbox.controller.v1.podsandbox",
            ],
        };
        let disabled = if cri { &[] } else { cri_plugins };
        format!(
            "version = {version}\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n\
             disabled_plugins = {disabled:?}\n"
        )
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Suite {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match Self::ALL.into_iter().find(|suite| suite.as_str() == text) {
            Some(suite) => Ok(suite),
            None => bail!(
                "no such suite: {text:?}\nhint: trixie or noble (containerd 1.7), forky (containerd 2.1)"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for suite in Suite::ALL {
            assert_eq!(suite.to_string().parse::<Suite>().unwrap(), suite);
        }
        assert!("bookworm".parse::<Suite>().is_err());
    }

    #[test]
    fn cri_is_disabled_unless_asked_for() {
        for suite in Suite::ALL {
            assert!(
                suite
                    .containerd_config(false)
                    .contains("\"io.containerd.grpc.v1.cri\"")
            );
            assert!(suite.containerd_config(true).contains("disabled_plugins = []"));
        }
    }
}
