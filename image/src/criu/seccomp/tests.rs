//! Programs as libseccomp makes them, and as an attacker does.

use serde_json::{Value, json};

use super::*;

mod kernel;

const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
const TRACE: u32 = 0x7ff0_0000;
const NOTIFY: u32 = 0x7fc0_0000;
const ERRNO: u32 = 0x0005_0001;
const KILL: u32 = 0;
/// The kernel kills for it, unless another filter has a lower answer.
const UNKNOWN: u32 = 0x7ffd_0000;
const KILL_PROCESS: u32 = 0x8000_0000;

const OWN: u32 = ARCHS[0].audit;
const OTHER: u32 = ARCHS[1].audit;

type Instruction = (u16, u8, u8, u32);

/// `ld [offset]`.
const fn load(offset: u32) -> Instruction {
    (0x20, 0, 0, offset)
}

/// `jeq constant, over so many, over so many`.
const fn equal(constant: u32, yes: u8, no: u8) -> Instruction {
    (0x15, yes, no, constant)
}

const fn answer(answer: u32) -> Instruction {
    (0x06, 0, 0, answer)
}

fn program(instructions: &[Instruction]) -> Program {
    let bytes = |&(code, yes, no, constant): &Instruction| {
        let [a, b] = code.to_ne_bytes();
        let [c, d, e, f] = constant.to_ne_bytes();
        [a, b, yes, no, c, d, e, f]
    };
    let bytes: Vec<u8> = instructions.iter().flat_map(bytes).collect();
    Program::parse(&bytes).unwrap()
}

fn number(name: &str, arch: &Arch) -> u32 {
    let mut names = arch.calls.split_ascii_whitespace();
    names.position(|call| call == name).unwrap().try_into().unwrap()
}

fn calls(profile: Value) -> DeniedCalls {
    DeniedCalls::of(&Spec::from(json!({ "linux": { "seccomp": profile } })))
}

/// It permits `read` and, with some arguments, `clone`.
fn profile() -> Value {
    json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": ["read"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [{"index": 0}]},
    ]})
}

/// The profile as libseccomp makes it, with more instead of its last answer.
fn made(last: &[Instruction]) -> Program {
    let (read, clone) = (number("read", &ARCHS[0]), number("clone", &ARCHS[0]));
    let begins = [
        load(4),
        equal(OWN, 1, 0),
        answer(KILL),
        load(0),
        (0x35, 0, 1, X32),
        answer(KILL),
        equal(read, 3, 0),
        equal(clone, 0, 3),
        load(16),
        equal(0, 0, 1),
        answer(ALLOW),
    ];
    program(&[&begins, last].concat())
}

fn permitted(profile: Value, programs: &[&Program]) -> Option<String> {
    calls(profile).permitted(programs).map(ToString::to_string)
}

#[test]
fn the_filter_of_the_profile_is_taken_with_others_before_it() {
    let (own, all) = (made(&[answer(ERRNO)]), program(&[answer(ALLOW)]));
    assert_eq!(permitted(profile(), &[&own]), None);
    assert_eq!(permitted(profile(), &[&all, &own]), None);
    for kills in [KILL, KILL_PROCESS] {
        assert_eq!(permitted(profile(), &[&program(&[answer(kills)])]), None);
    }
    // Without a profile that denies anything there is nothing to compare.
    let nothing = json!({"defaultAction": "SCMP_ACT_ALLOW"});
    assert_eq!(permitted(nothing, &[&all]), None);
}

#[test]
fn a_filter_that_permits_what_is_denied_is_found() {
    let mount = number("mount", &ARCHS[0]);
    let first = |last: &[Instruction]| permitted(profile(), &[&made(last)]).unwrap_or_default();
    for all in [ALLOW, LOG, TRACE, NOTIFY, UNKNOWN] {
        assert!(!first(&[answer(all)]).is_empty(), "{all:x}");
    }
    // The lower answer counts, which permits.
    let (unknown, log) = (made(&[answer(UNKNOWN)]), program(&[answer(LOG)]));
    assert!(permitted(profile(), &[&unknown, &log]).is_some());
    for (what, tricky) in [
        (
            "by number",
            &[equal(mount, 0, 1), answer(ALLOW), answer(ERRNO)][..],
        ),
        (
            "with some arguments",
            &[
                equal(mount, 0, 3),
                load(24),
                equal(0, 1, 0),
                answer(ALLOW),
                answer(ERRNO),
            ],
        ),
        (
            "from some addresses, by way of the memory",
            &[
                equal(mount, 0, 6),
                load(8),
                (0x02, 0, 0, 3),
                (0x61, 0, 0, 3),
                (0x87, 0, 0, 0),
                (0x45, 0, 1, 1),
                answer(ALLOW),
                answer(ERRNO),
            ],
        ),
        (
            "with an answer that is computed",
            &[
                equal(mount, 0, 3),
                (0x00, 0, 0, ALLOW - 1),
                (0x04, 0, 0, 1),
                (0x16, 0, 0, 0),
                answer(ERRNO),
            ],
        ),
        (
            "with an answer that is not known",
            &[equal(mount, 0, 2), load(24), (0x16, 0, 0, 0), answer(ERRNO)],
        ),
    ] {
        assert!(
            first(tricky).starts_with("mount (SCMP_ARCH_"),
            "{what}: {}",
            first(tricky)
        );
    }
    assert_eq!(
        first(&[equal(428, 0, 1), answer(ALLOW), answer(ERRNO)]),
        format!("open_tree ({})", ARCHS[0].name)
    );
}

#[test]
fn a_filter_is_followed_for_every_architecture() {
    let of = |arch: u32| program(&[load(4), equal(arch, 0, 1), answer(ERRNO), answer(ALLOW)]);
    let only_own = permitted(profile(), &[&of(OWN)]).unwrap();
    assert!(only_own.ends_with(&format!("({})", ARCHS[1].name)), "{only_own}");
    assert!(permitted(profile(), &[&of(OTHER)]).is_some());
    assert_eq!(permitted(profile(), &[&of(OWN), &of(OTHER)]), None);
    // The other one's `read` has the number of another call of this one.
    let mut both = profile();
    both["architectures"] = json!([ARCHS[1].name]);
    let read = number("read", &ARCHS[1]);
    let other = [
        load(4),
        equal(OTHER, 0, 3),
        load(0),
        equal(read, 0, 1),
        answer(ALLOW),
        answer(ERRNO),
    ];
    let other = program(&other);
    assert_eq!(permitted(both, &[&other]), None);
    assert!(
        permitted(profile(), &[&other]).is_some(),
        "the profile does not have it"
    );
    if cfg!(target_arch = "x86_64") {
        let x32 = [
            load(4),
            equal(OWN, 0, 3),
            load(0),
            (0x35, 0, 1, X32),
            answer(ALLOW),
            answer(ERRNO),
        ];
        let x32 = permitted(profile(), &[&program(&x32)]).unwrap();
        assert!(x32.ends_with("(SCMP_ARCH_X32)"), "{x32}");
    }
}

#[test]
fn a_profile_that_permits_the_others_denies_what_it_names() {
    let list = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        {"names": ["mount"], "action": "SCMP_ACT_ERRNO"},
        {"names": ["socket"], "action": "SCMP_ACT_ERRNO", "args": [{"index": 0}]},
    ]});
    let mount = number("mount", &ARCHS[0]);
    let with = |other: u32, x32: u32| {
        let denies = [
            load(4),
            equal(OWN, 0, 3),
            load(0),
            (0x35, 2, 0, X32),
            equal(mount, 2, 0),
            answer(ALLOW),
            answer(x32),
            answer(ERRNO),
        ];
        let other = [equal(OWN, 0, 1), answer(ALLOW), answer(other)];
        let unless_own = program(&[&[load(4)][..], &other].concat());
        permitted(list.clone(), &[&program(&denies), &unless_own])
    };
    assert_eq!(with(KILL, KILL), None);
    // It does not name these: for them libseccomp kills.
    let other = with(ALLOW, KILL).unwrap_or_default();
    assert!(other.ends_with(&format!("({})", ARCHS[1].name)), "{other}");
    if cfg!(target_arch = "x86_64") {
        let x32 = with(KILL, ALLOW).unwrap_or_default();
        assert!(x32.ends_with("(SCMP_ARCH_X32)"), "{x32}");
    }
    let all = program(&[answer(ALLOW)]);
    assert_eq!(
        permitted(list, &[&all]),
        Some(format!("mount ({})", ARCHS[0].name))
    );
}

#[test]
#[cfg(target_arch = "x86_64")]
fn x32_has_numbers_of_its_own() {
    let list = json!({"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X32"], "syscalls": [
        {"names": ["ptrace", "mount", "uselib"], "action": "SCMP_ACT_ERRNO"},
    ]});
    let [ptrace, mount, uselib] = ["ptrace", "mount", "uselib"].map(|name| number(name, &ARCHS[0]));
    // As libseccomp 2.5.4 makes it: `ptrace` is 521 there, and nobody has `uselib`.
    let with = |mount_of_x32: u32, ptrace_of_x32: u32| {
        let denies = [
            load(4),
            equal(OWN, 1, 0),
            answer(KILL),
            load(0),
            equal(ptrace, 4, 0),
            equal(mount, 3, 0),
            equal(uselib, 2, 0),
            equal(mount_of_x32, 1, 0),
            equal(ptrace_of_x32, 0, 1),
            answer(ERRNO),
            answer(ALLOW),
        ];
        permitted(list.clone(), &[&program(&denies)])
    };
    assert_eq!(with(mount | X32, 521 | X32), None);
    let permits = |name: &str| Some(format!("{name} (SCMP_ARCH_X32)"));
    assert_eq!(with(mount | X32, ptrace | X32), permits("ptrace"));
    assert_eq!(with(mount, 521 | X32), permits("mount"));
}

#[test]
fn another_process_decides_only_where_the_profile_lets_it() {
    for (action, code) in [("SCMP_ACT_TRACE", TRACE), ("SCMP_ACT_NOTIFY", NOTIFY)] {
        let asked = json!({ "defaultAction": action });
        let own = [
            load(4),
            equal(OWN, 0, 3),
            load(0),
            (0x35, 1, 0, X32),
            answer(code),
            answer(KILL),
        ];
        assert_eq!(permitted(asked.clone(), &[&program(&own)]), None);
        assert!(permitted(asked, &[&program(&[answer(ALLOW)])]).is_some());
        // About the one call, and by the one that it names.
        let names = ["mount", "ptrace"];
        let only = |name: &str| {
            json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
                {"names": names, "action": "SCMP_ACT_ERRNO"},
                {"names": [name], "action": action, "args": [{"index": 0}]},
            ]})
        };
        let of = |code: u32| {
            let mount = number("mount", &ARCHS[0]);
            let asks = [
                load(4),
                equal(OWN, 0, 3),
                load(0),
                equal(mount, 0, 1),
                answer(code),
                answer(ERRNO),
            ];
            program(&asks)
        };
        assert_eq!(permitted(only("mount"), &[&of(code)]), None, "{action}");
        assert!(permitted(only("ptrace"), &[&of(code)]).is_some(), "{action}");
        // Filters of the program itself change nothing.
        assert_eq!(
            permitted(only("mount"), &[&of(code), &of(ALLOW)]),
            None,
            "{action}"
        );
        assert!(
            permitted(only("mount"), &[&of(TRACE + NOTIFY - code)]).is_some(),
            "{action}"
        );
    }
}

#[test]
fn the_tables_have_the_kernels_numbers() {
    let numbers = |arch: usize| ["read", "mount", "ptrace", "bpf"].map(|name| number(name, &ARCHS[arch]));
    if cfg!(target_arch = "x86_64") {
        assert_eq!((numbers(0), numbers(1)), ([0, 165, 101, 321], [3, 21, 26, 357]));
    }
    if cfg!(target_arch = "aarch64") {
        assert_eq!((numbers(0), numbers(1)), ([63, 40, 117, 280], [3, 21, 26, 386]));
    }
}
