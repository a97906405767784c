//! What a spec permits the processes of its container.

use std::collections::BTreeSet;
use std::path::PathBuf;

use caps::Capability;
use firn_host::ordered;
use oci_spec::runtime::{LinuxIdMapping, PosixRlimit, User};
use serde::Deserialize;
use serde_json::Value;

use super::{Spec, SpecError};

/// Bit of a capability; 0 for a name that the kernel does not know, which runc ignores.
pub fn capability(name: &str) -> u64 {
    name.parse::<Capability>()
        .map_or(0, |capability| capability.bitmask())
}

/// A seccomp profile, as far as it decides about a system call whatever its arguments are.
#[derive(Debug, PartialEq, Eq)]
pub struct Profile {
    /// Names of the architectures, in addition to that of the host.
    pub architectures: BTreeSet<String>,
    /// Whether it permits what it does not name.
    pub permits_others: bool,
    /// Who else may decide about what it does not name.
    others_ask: Asks,
    /// About which system calls a process that has the filter's descriptor decides, and a tracer.
    notified: BTreeSet<String>,
    traced: BTreeSet<String>,
    /// Permitted, at least with some arguments.
    permitted: BTreeSet<String>,
    /// Denied with all arguments.
    denied: BTreeSet<String>,
}

/// Who may decide instead of a filter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// A process that has the filter's descriptor.
    pub notify: bool,
    /// A tracer.
    pub trace: bool,
}

impl Asks {
    fn of(action: &Value) -> Self {
        Self {
            notify: action == "SCMP_ACT_NOTIFY",
            trace: action == "SCMP_ACT_TRACE",
        }
    }
}

impl Profile {
    /// Who may decide about the system call of this name.
    pub fn asks(&self, name: &str) -> Asks {
        let is_other = !self.permitted.contains(name) && !self.denied.contains(name);
        Asks {
            notify: self.notified.contains(name) || is_other && self.others_ask.notify,
            trace: self.traced.contains(name) || is_other && self.others_ask.trace,
        }
    }

    /// Whether the system call of this name is denied, whatever its arguments are.
    pub fn denies(&self, name: &str) -> bool {
        !self.permitted.contains(name) && (!self.permits_others || self.denied.contains(name))
    }
}

fn permits(action: &Value) -> bool {
    action == "SCMP_ACT_ALLOW" || action == "SCMP_ACT_LOG"
}

impl Spec {
    /// A set of capabilities as a bit mask: `bounding`, `permitted` and so on. 0 when the spec has none.
    pub fn capabilities(&self, set: &str) -> u64 {
        let names = self.array(&format!("/process/capabilities/{set}"));
        let names = names.iter().filter_map(Value::as_str);
        names.fold(0, |all, name| all | capability(name))
    }

    /// Whether processes of the container may make mounts of their own.
    pub fn may_mount(&self) -> bool {
        self.has_sys_admin() && !self.has_namespace("user")
    }

    /// Whether CAP_SYS_ADMIN is in the bounding set.
    pub(crate) fn has_sys_admin(&self) -> bool {
        self.capabilities("bounding") & Capability::CAP_SYS_ADMIN.bitmask() != 0
    }

    pub fn no_new_privs(&self) -> bool {
        self.is_set("/process/noNewPrivileges")
    }

    /// Whether the runtime loads a seccomp filter that denies something. Only the actions matter here:
    /// oci-spec refuses a profile with an architecture or a flag that is newer than oci-spec.
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

    /// Whether its seccomp profile lets a process outside of the container decide about system calls.
    pub fn has_seccomp_agent(&self) -> bool {
        let notifies = |action: &Value| Asks::of(action).notify;
        let default = self.at("/linux/seccomp/defaultAction");
        let rules = self.array("/linux/seccomp/syscalls").iter();
        default.is_some_and(notifies) || rules.into_iter().any(|rule| notifies(&rule["action"]))
    }

    /// What its seccomp profile decides; none if it has no profile.
    pub fn seccomp(&self) -> Option<Profile> {
        let seccomp = self.at("/linux/seccomp").filter(|seccomp| seccomp.is_object())?;
        let texts = |value: &Value| {
            let texts = value.as_array().into_iter().flatten().filter_map(Value::as_str);
            texts.map(str::to_owned).collect::<Vec<String>>()
        };
        let mut profile = Profile {
            architectures: ordered::set_of(texts(&seccomp["architectures"])),
            permits_others: permits(&seccomp["defaultAction"]),
            others_ask: Asks::of(&seccomp["defaultAction"]),
            notified: BTreeSet::new(),
            traced: BTreeSet::new(),
            permitted: BTreeSet::new(),
            denied: BTreeSet::new(),
        };
        for rule in self.array("/linux/seccomp/syscalls") {
            let names = texts(&rule["names"]);
            let is_for_all = rule["args"].as_array().is_none_or(Vec::is_empty);
            let Asks { notify, trace } = Asks::of(&rule["action"]);
            for (asked, by) in [(notify, &mut profile.notified), (trace, &mut profile.traced)] {
                by.extend(names.iter().filter(|_| asked).cloned());
            }
            if permits(&rule["action"]) {
                profile.permitted.extend(names);
            } else if is_for_all {
                profile.denied.extend(names);
            }
        }
        Some(profile)
    }

    /// The label with which AppArmor or SELinux confines the container.
    pub fn label(&self) -> Option<&str> {
        let labels = ["/process/apparmorProfile", "/process/selinuxLabel"];
        let mut labels = labels.into_iter().filter_map(|label| self.at(label)?.as_str());
        labels.find(|label| !matches!(*label, "" | "unconfined"))
    }

    /// The profile of AppArmor that confines the container.
    pub fn apparmor_profile(&self) -> Option<&str> {
        let profile = self.at("/process/apparmorProfile")?.as_str()?;
        (!matches!(profile, "" | "unconfined")).then_some(profile)
    }

    /// The resource limits that the spec sets: number of the resource, hard limit, name.
    pub fn rlimits(&self) -> Vec<(usize, u64, String)> {
        let limits = self.well_formed::<PosixRlimit>("/process/rlimits");
        // oci-spec lists the resources in the order of the kernel's numbers.
        let number_hard_name =
            |limit: PosixRlimit| (limit.typ() as usize, limit.hard(), limit.typ().to_string());
        limits.map(number_hard_name).collect()
    }

    pub fn oom_score_adj(&self) -> Option<i32> {
        let score = self.at("/process/oomScoreAdj")?.as_i64()?;
        score.try_into().ok()
    }

    /// The user, if the spec names one, and the groups of the container's process.
    pub fn user(&self) -> (Option<u32>, Vec<u32>) {
        let Some(user) = self
            .at("/process/user")
            .and_then(|user| User::deserialize(user).ok())
        else {
            return (None, vec![0]);
        };
        let mut groups = user.additional_gids().clone().unwrap_or_default();
        groups.push(user.gid());
        (Some(user.uid()), groups)
    }

    /// Map of a new user namespace: first id in the container, first id on the host, number of ids. `kind` is
    /// `uid` or `gid`.
    pub fn id_map(&self, kind: &str) -> Result<Vec<[u32; 3]>, SpecError> {
        let mappings: Vec<LinuxIdMapping> = self.list(
            &format!("/linux/{kind}Mappings"),
            "linux.uidMappings or gidMappings",
        )?;
        let mappings = mappings.into_iter();
        Ok(mappings
            .map(|ids| [ids.container_id(), ids.host_id(), ids.size()])
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
        self.is_set("/root/readonly")
    }

    fn paths(&self, pointer: &str) -> Vec<PathBuf> {
        let paths = self.array(pointer).iter().filter_map(Value::as_str);
        // Without a trailing slash, as the kernel lists mounts.
        paths
            .map(|path| PathBuf::from(path).components().collect())
            .collect()
    }

    fn at(&self, pointer: &str) -> Option<&Value> {
        self.value.pointer(pointer).filter(|value| !value.is_null())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn process(process: Value) -> Spec {
        Spec::from(json!({ "process": process }))
    }

    #[test]
    fn a_capability_has_the_kernels_bit_and_an_unknown_name_has_none() {
        let names = json!([
            "CAP_CHOWN",
            "CAP_CHECKPOINT_RESTORE",
            "CAP_FUTURE",
            "chown",
            "KILL",
            5
        ]);
        let spec = process(json!({"capabilities": {"bounding": names}}));
        assert_eq!(spec.capabilities("bounding"), 1 | 1 << 40);
        assert_eq!(spec.capabilities("permitted"), 0);
        assert!(!spec.has_sys_admin() && !spec.may_mount());
    }

    #[test]
    fn a_profile_denies_what_no_rule_permits() {
        let spec = |default: &str| {
            Spec::from(json!({"linux": {"seccomp": {
                "defaultAction": default,
                "architectures": ["SCMP_ARCH_X86"],
                "syscalls": [
                    {"names": ["read", "clone"], "action": "SCMP_ACT_ALLOW", "args": []},
                    {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0}]},
                    {"names": ["mount", "clone"], "action": "SCMP_ACT_ERRNO"},
                    {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 0}]},
                ],
            }}}))
        };
        let denied = |default| {
            let profile = spec(default).seccomp().unwrap();
            assert!(profile.architectures.contains("SCMP_ARCH_X86"));
            assert_eq!(profile.asks("mount"), Asks::default());
            let names = ["read", "clone", "personality", "mount", "socket", "bpf"];
            names
                .into_iter()
                .filter(|name| profile.denies(name))
                .collect::<Vec<_>>()
        };
        assert_eq!(denied("SCMP_ACT_ERRNO"), ["mount", "socket", "bpf"]);
        assert_eq!(denied("SCMP_ACT_ALLOW"), ["mount"]);
        let notifies = spec("SCMP_ACT_NOTIFY").seccomp().unwrap();
        let notify = Asks {
            notify: true,
            trace: false,
        };
        assert_eq!(
            ["bpf", "mount", "read"].map(|name| notifies.asks(name)),
            [notify, Asks::default(), Asks::default()]
        );
        assert_eq!(process(json!({})).seccomp(), None);
    }

    #[test]
    fn an_agent_is_asked_by_default_or_by_a_rule() {
        let of = |default: &str, action: &str| {
            let rules = json!([{"names": ["mknodat"], "action": action}]);
            Spec::from(json!({"linux": {"seccomp": {"defaultAction": default, "syscalls": rules}}}))
                .has_seccomp_agent()
        };
        assert!(of("SCMP_ACT_NOTIFY", "SCMP_ACT_ALLOW") && of("SCMP_ACT_ALLOW", "SCMP_ACT_NOTIFY"));
        assert!(!of("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"));
        assert!(!Spec::from(json!({})).has_seccomp_agent());
    }

    #[test]
    fn limits_have_the_kernels_numbers() {
        let names = [
            "CPU",
            "FSIZE",
            "DATA",
            "STACK",
            "CORE",
            "RSS",
            "NPROC",
            "NOFILE",
            "MEMLOCK",
            "AS",
            "LOCKS",
            "SIGPENDING",
            "MSGQUEUE",
            "NICE",
            "RTPRIO",
            "RTTIME",
        ];
        let names = names.map(|name| format!("RLIMIT_{name}"));
        let limits = names
            .iter()
            .map(|name| json!({"type": name, "hard": 7, "soft": 3}));
        let spec = process(json!({"rlimits": limits.collect::<Vec<_>>()}));
        let expected: Vec<_> = names
            .into_iter()
            .enumerate()
            .map(|(at, name)| (at, 7, name))
            .collect();
        assert_eq!(spec.rlimits(), expected);
    }

    #[test]
    fn a_user_that_is_not_named_is_none_and_its_group_is_0() {
        assert_eq!(process(json!({})).user(), (None, vec![0]));
        let user = json!({"uid": 7, "gid": 8, "additionalGids": [9]});
        assert_eq!(process(json!({ "user": user })).user(), (Some(7), vec![9, 8]));
    }
}
