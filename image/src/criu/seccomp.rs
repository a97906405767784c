//! What a seccomp filter of the image lets through although the container's profile denies it.
//!
//! runc makes the filter of the profile with libseccomp: its bytes differ from version to version, and cannot
//! be compared. What is compared is the effect, for the system calls that the profile denies whatever their
//! arguments are. The filter is followed on all paths that it may take for such a call, with the arguments
//! unknown. No path may permit the call: where the arguments do not matter, a filter of libseccomp decides by
//! architecture and number alone.
//!
//! Not compared: calls that the profile permits for some arguments, who is asked where the profile leaves the
//! answer to somebody else (CRIU restores no listener), and calls that Linux has had since 5.1
//! only, apart from the ones that make mounts. Which of these a container's default profile denies depends on
//! the version of containerd and docker, and containers move between these.

mod filters;
mod program;

use firn_oci::Spec;
use firn_oci::spec::{Asks, Profile};

pub(super) use filters::{Filters, Seccomp};
pub(super) use program::Program;

/// What comes before the numbers of x32.
const X32: u32 = 0x4000_0000;

/// The system calls for which x32 has numbers of its own, from [`X32_FIRST`] on.
const X32_CALLS: &str = include_str!("seccomp/x32.txt");

const X32_FIRST: u32 = 512;

/// Those that x32 does not have: libseccomp makes no rule for them.
const NOT_OF_X32: [&str; 8] = [
    "uselib",
    "_sysctl",
    "nfsservctl",
    "set_thread_area",
    "get_thread_area",
    "epoll_ctl_old",
    "epoll_wait_old",
    "vserver",
];

/// The same numbers on all architectures.
const MOUNTS: [(&str, u32); 6] = [
    ("open_tree", 428),
    ("move_mount", 429),
    ("fsopen", 430),
    ("fsconfig", 431),
    ("fsmount", 432),
    ("mount_setattr", 442),
];

/// An architecture for which the kernel runs programs.
struct Arch {
    /// As a profile names it.
    name: &'static str,
    /// As a filter sees it.
    audit: u32,
    /// The names of its system calls in the order of their numbers. `-` stands for one that is not compared.
    calls: &'static str,
}

/// The first is that of this firn.
const ARCHS: [Arch; 2] = if cfg!(target_arch = "aarch64") {
    [
        Arch {
            name: "SCMP_ARCH_AARCH64",
            audit: 0xc000_00b7,
            calls: include_str!("seccomp/aarch64.txt"),
        },
        Arch {
            name: "SCMP_ARCH_ARM",
            audit: 0x4000_0028,
            calls: include_str!("seccomp/arm.txt"),
        },
    ]
} else {
    [
        Arch {
            name: "SCMP_ARCH_X86_64",
            audit: 0xc000_003e,
            calls: include_str!("seccomp/x86_64.txt"),
        },
        // Without those that are parts of `socketcall` and `ipc`, for which libseccomp has rules of its own.
        Arch {
            name: "SCMP_ARCH_X86",
            audit: 0x4000_0003,
            calls: include_str!("seccomp/x86.txt"),
        },
    ]
};

/// A system call that the profile denies.
pub(super) struct Denied {
    name: &'static str,
    arch: &'static str,
    audit: u32,
    number: u32,
    asks: Asks,
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.name, self.arch)
    }
}

/// The system calls that a spec's profile denies.
pub(super) struct DeniedCalls(Vec<Denied>);

impl DeniedCalls {
    pub(super) fn of(spec: &Spec) -> Self {
        let profile = spec.seccomp().filter(|_| spec.has_seccomp());
        let all = profile.map(|profile| {
            let [own, other] = &ARCHS;
            let mut all = denied(&profile, own.name, own.audit, numbers(own));
            all.extend(denied(&profile, other.name, other.audit, numbers(other)));
            if cfg!(target_arch = "x86_64") {
                all.extend(denied(&profile, "SCMP_ARCH_X32", own.audit, numbers_of_x32()));
            }
            all
        });
        Self(all.unwrap_or_default())
    }

    /// The first that none of the programs denies. All of them decide about a process.
    pub(super) fn permitted(&self, programs: &[&Program]) -> Option<&Denied> {
        let denies = |program: &Program, call: &Denied| program.denies(call.audit, call.number, call.asks);
        let mut calls = self.0.iter();
        calls.find(|call| !programs.iter().any(|program| denies(program, call)))
    }
}

type Call = (&'static str, u32);

fn numbers(arch: &Arch) -> impl Iterator<Item = Call> + use<> {
    let of_old = arch.calls.split_ascii_whitespace().zip(0..);
    of_old.chain(MOUNTS).filter(|(name, _)| *name != "-")
}

fn numbers_of_x32() -> impl Iterator<Item = Call> {
    let own = || X32_CALLS.split_ascii_whitespace();
    let is_common = move |name: &str| !NOT_OF_X32.contains(&name) && !own().any(|other| other == name);
    let common = numbers(&ARCHS[0]).filter(move |(name, _)| is_common(name));
    let all = common.chain(own().zip(X32_FIRST..));
    all.map(|(name, number)| (name, number | X32))
}

/// A filter knows the architecture of the host and those that the profile names, and kills for others.
fn denied(
    profile: &Profile,
    arch: &'static str,
    audit: u32,
    calls: impl Iterator<Item = Call>,
) -> Vec<Denied> {
    let is_known = arch == ARCHS[0].name || profile.architectures.contains(arch);
    let denied = calls.filter(|(name, _)| !is_known || profile.denies(name));
    let with_asks = denied.map(|(name, number)| Denied {
        name,
        arch,
        audit,
        number,
        asks: if is_known {
            profile.asks(name)
        } else {
            Asks::default()
        },
    });
    with_asks.collect()
}

#[cfg(test)]
mod tests;
