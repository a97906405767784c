//! What a spec lets the container's processes do.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;

use super::{Spec, SpecError};

/// Capabilities in the order of the kernel's numbers.
pub const CAPABILITIES: [&str; 41] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];

/// Limits in the order of the kernel's numbers.
const RLIMITS: [&str; 16] = [
    "RLIMIT_CPU",
    "RLIMIT_FSIZE",
    "RLIMIT_DATA",
    "RLIMIT_STACK",
    "RLIMIT_CORE",
    "RLIMIT_RSS",
    "RLIMIT_NPROC",
    "RLIMIT_NOFILE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_AS",
    "RLIMIT_LOCKS",
    "RLIMIT_SIGPENDING",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
];

/// Bit of a capability; none for a name that the kernel does not know.
pub fn capability(name: &str) -> u64 {
    let number = CAPABILITIES.iter().position(|known| *known == name);
    number.map_or(0, |number| 1 << number)
}

impl Spec {
    /// A set of capabilities: `bounding`, `permitted` and so on. Nothing when the spec has none.
    pub fn capabilities(&self, set: &str) -> u64 {
        let names = self.array(&format!("/process/capabilities/{set}"));
        let names = names.iter().filter_map(Value::as_str);
        names.fold(0, |all, name| all | capability(name))
    }

    /// Whether processes of the container may mount what they like.
    pub fn may_mount(&self) -> bool {
        self.capabilities("bounding") & capability("CAP_SYS_ADMIN") != 0 && !self.has_namespace("user")
    }

    pub fn no_new_privs(&self) -> bool {
        self.at("/process/noNewPrivileges").and_then(Value::as_bool) == Some(true)
    }

    /// Whether the runtime loads a seccomp filter that denies something.
    pub fn has_seccomp(&self) -> bool {
        let allows = |action: &Value| action == "SCMP_ACT_ALLOW";
        let denies = |rule: &Value| !allows(&rule["action"]);
        match self.at("/linux/seccomp") {
            Some(seccomp) if seccomp.is_object() => {
                !allows(&seccomp["defaultAction"]) || self.array("/linux/seccomp/syscalls").iter().any(denies)
            }
            _ => false,
        }
    }

    /// The label of the security module that confines the container.
    pub fn label(&self) -> Option<&str> {
        let labels = ["/process/apparmorProfile", "/process/selinuxLabel"];
        let mut labels = labels.into_iter().filter_map(|label| self.at(label)?.as_str());
        labels.find(|label| !matches!(*label, "" | "unconfined"))
    }

    /// Number, hard value and name of the limits that the spec sets.
    pub fn rlimits(&self) -> Vec<(usize, u64, String)> {
        let limits = self.array("/process/rlimits").iter();
        let known = limits.filter_map(|limit| {
            let name = limit["type"].as_str()?;
            let number = RLIMITS.iter().position(|known| *known == name)?;
            Some((number, limit["hard"].as_u64()?, name.to_owned()))
        });
        known.collect()
    }

    pub fn oom_score_adj(&self) -> Option<i32> {
        let score = self.at("/process/oomScoreAdj")?.as_i64()?;
        score.try_into().ok()
    }

    /// The user, if the spec names one, and the groups of the container's process.
    pub fn user(&self) -> (Option<u32>, Vec<u32>) {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let user = self.at("/process/user");
        let beside = self.array("/process/user/additionalGids").iter();
        let own = user.and_then(|user| id(&user["gid"])).unwrap_or(0);
        let groups = beside.filter_map(id).chain([own]).collect();
        (user.map(|user| id(&user["uid"]).unwrap_or(0)), groups)
    }

    /// Map of a new user namespace: first id inside, first outside, and how many. `kind` is `uid` or `gid`.
    pub fn id_map(&self, kind: &str) -> Result<Vec<[u32; 3]>, SpecError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Extent {
            #[serde(default, rename = "containerID")]
            container_id: u32,
            #[serde(default, rename = "hostID")]
            host_id: u32,
            #[serde(default)]
            size: u32,
        }
        let extents: Vec<Extent> = self.list(
            &format!("/linux/{kind}Mappings"),
            "linux.uidMappings or gidMappings",
        )?;
        let extents = extents.into_iter();
        Ok(extents
            .map(|extent| [extent.container_id, extent.host_id, extent.size])
            .collect())
    }

    /// Paths that the runtime hides by a mount each.
    pub fn masked_paths(&self) -> Vec<PathBuf> {
        self.paths("/linux/maskedPaths")
    }

    /// Paths that the runtime makes read-only by a mount each.
    pub fn read_only_paths(&self) -> Vec<PathBuf> {
        self.paths("/linux/readonlyPaths")
    }

    pub fn is_root_read_only(&self) -> bool {
        self.at("/root/readonly").and_then(Value::as_bool) == Some(true)
    }

    fn paths(&self, pointer: &str) -> Vec<PathBuf> {
        let paths = self.array(pointer).iter().filter_map(Value::as_str);
        // Without a slash at the end, as the kernel lists mounts.
        paths
            .map(|path| PathBuf::from(path).components().collect())
            .collect()
    }

    fn at(&self, pointer: &str) -> Option<&Value> {
        self.value.pointer(pointer).filter(|value| !value.is_null())
    }
}
