//! What a seccomp filter of the image lets through although the container's profile denies it.
//!
//! runc makes the filter of the profile with libseccomp: its bytes differ from version to version, and cannot
//! be compared. What is compared is the effect, for the system calls that the profile denies whatever their
//! arguments are. The filter is followed on all paths that it may take for such a call, with the arguments
//! unknown. No path may permit the call: where the arguments do not matter, a filter of libseccomp decides by
//! architecture and number alone.
//!
//! Not compared: calls that the profile permits for some arguments, and those that Linux has had since 5.1
//! only, apart from the ones that make mounts. Which of these a container's default profile denies depends on
//! the version of containerd and docker, and containers move between these.

mod filters;
mod program;

use firn_oci::Spec;
use firn_oci::spec::{Asks, Profile};

pub(super) use filters::Filters;
pub(super) use program::Program;

/// What comes before the numbers of x32.
const X32: u32 = 0x4000_0000;

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
        let archs = || ARCHS.iter().enumerate();
        let all = profile.map(|profile| {
            archs()
                .flat_map(|(at, arch)| denied(&profile, arch, at == 0))
                .collect()
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

/// A filter knows the architecture of the host and those that the profile names, and kills for others.
fn denied(profile: &Profile, arch: &Arch, is_own: bool) -> Vec<Denied> {
    let has = |name| profile.architectures.contains(name);
    let is_known = is_own || has(arch.name);
    let of_old = arch.calls.split_ascii_whitespace().zip(0..);
    let all = of_old.chain(MOUNTS).filter(|(name, _)| *name != "-");
    let all = all.filter(|(name, _)| !is_known || profile.denies(name));
    let mut found = Vec::new();
    for (name, number) in all {
        let call = |arch, number, asks| Denied {
            name,
            arch,
            audit: ARCHS[usize::from(!is_own)].audit,
            number,
            asks,
        };
        let asks = |is_known| match is_known {
            true => profile.asks(name),
            false => Asks::default(),
        };
        found.push(call(arch.name, number, asks(is_known)));
        if is_own && cfg!(target_arch = "x86_64") {
            let name = "SCMP_ARCH_X32";
            found.push(call(name, number | X32, asks(has(name))));
        }
    }
    found
}

#[cfg(test)]
mod tests;
