//! Programs as libseccomp makes them, and as an attacker does.

use serde_json::{Value, json};

use super::*;

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
        // Another filter of the same process leaves it to the process that has its listener.
        let both = permitted(only("mount"), &[&of(code), &of(NOTIFY)]);
        assert_eq!(both.is_some(), code == TRACE, "{action}");
        assert!(
            permitted(only("mount"), &[&of(TRACE + NOTIFY - code)]).is_some(),
            "{action}"
        );
    }
}

#[test]
fn what_the_kernel_does_not_take_denies_nothing() {
    assert!(Program::parse(b"filter").is_none());
    assert!(Program::parse(&[0; 8 * 4097]).is_none());
    for wrong in [
        &[][..],
        &[load(0)],
        &[load(3), answer(ERRNO)],
        &[load(64), answer(ERRNO)],
        &[equal(0, 9, 9), answer(ERRNO)],
        &[(0x05, 0, 0, u32::MAX), answer(ERRNO)],
        &[(0x60, 0, 0, 16), answer(ERRNO)],
        &[(0x02, 0, 0, 16), answer(ERRNO)],
        // A byte of the data, a remainder, an unknown jump.
        &[(0x30, 0, 0, 0), answer(ERRNO)],
        &[(0x94, 0, 0, 3), answer(ERRNO)],
        &[(0x55, 0, 0, 3), answer(ERRNO)],
    ] {
        assert!(!program(wrong).denies(OWN, 1, Asks::default()), "{wrong:?}");
    }
}

#[test]
fn what_is_computed_is_as_in_the_kernel() {
    let result = |code: u16, a: u32, k: u32| {
        let program = [
            (0x00, 0, 0, a),
            (code, 0, 0, k),
            equal(0xfff0, 0, 1),
            answer(ERRNO),
            answer(ALLOW),
        ];
        program_denies(&program)
    };
    for (code, a, k) in [
        (0x04, 0xffef, 1),
        (0x04, 0xffff_fff0, 0x1_0000),
        (0x14, 0xfff1, 1),
        (0x24, 0x7ff8, 2),
        (0x34, 0x1_ffe0, 2),
        (0x44, 0xff00, 0xf0),
        (0x54, 0xffff_ffff, 0xfff0),
        (0x64, 0xfff, 4),
        (0x74, 0xf_ff00, 4),
        (0xa4, 0xff0f, 0xff),
    ] {
        assert!(result(code, a, k), "{code:x}");
        assert!(!result(code, a, k ^ 8), "{code:x}");
    }
    let negative = [
        (0x00, 0, 0, 0xffff_0010),
        (0x84, 0, 0, 0),
        equal(0xfff0, 0, 1),
        answer(ERRNO),
        answer(ALLOW),
    ];
    assert!(program_denies(&negative));
    // By 0, and by more bits than there are: unknown.
    assert!(!result(0x34, 0xfff0, 0) && !result(0x64, 0xfff0, 32));
    // The index is the other operand; so is the length.
    let index = [
        (0x01, 0, 0, 7),
        (0x00, 0, 0, 5),
        (0x1d, 1, 0, 0),
        answer(ERRNO),
        answer(ALLOW),
    ];
    assert!(program_denies(&index));
    let length = [
        (0x80, 0, 0, 0),
        (0x81, 0, 0, 0),
        (0x1d, 0, 1, 0),
        answer(ERRNO),
        answer(ALLOW),
    ];
    assert!(program_denies(&length));
}

#[test]
fn where_paths_meet_only_what_is_the_same_is_known() {
    // The accumulator, the index and a word of the memory are 1 on one path and 2 on the other.
    for (set, get) in [(0x00, 0x07), (0x01, 0x87), (0x02, 0x60)] {
        let set = |value: u32| match set {
            0x02 => [(0x00, 0, 0, value), (0x02, 0, 0, 0)],
            set => [(set, 0, 0, value), (set, 0, 0, value)],
        };
        let branches = |one: u32, other: u32| {
            let ([a, b], [c, d]) = (set(one), set(other));
            let begins = [
                load(16),
                equal(0, 0, 3),
                a,
                b,
                (0x05, 0, 0, 2),
                c,
                d,
                (get, 0, 0, 0),
            ];
            let begins = match get {
                0x07 => [&begins[..], &[(0x87, 0, 0, 0)]].concat(),
                _ => begins.to_vec(),
            };
            program_denies(&[&begins[..], &[equal(1, 0, 1), answer(ERRNO), answer(ALLOW)]].concat())
        };
        assert!(branches(1, 1), "{get:x}");
        assert!(!branches(1, 2) && !branches(2, 1), "{get:x}");
    }
}

fn program_denies(instructions: &[Instruction]) -> bool {
    program(instructions).denies(OWN, 1, Asks::default())
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

/// The answer of a program to known data; none if it ends in no answer.
fn run(program: &[Instruction], data: &[u32; 16]) -> Option<u32> {
    let (mut a, mut x, mut memory, mut at) = (0_u32, 0_u32, [0_u32; 16], 0);
    loop {
        let (code, yes, no, k) = *program.get(at)?;
        let slot = usize::try_from(k).unwrap();
        let b = if code & 8 == 0 { k } else { x };
        at += 1;
        match code {
            0x20 => a = *data.get(slot / 4)?,
            0x00 => a = k,
            0x01 => x = k,
            0x60 => a = *memory.get(slot)?,
            0x02 => *memory.get_mut(slot)? = a,
            0x07 => x = a,
            0x87 => a = x,
            0x04 | 0x0c => a = a.wrapping_add(b),
            0x54 | 0x5c => a &= b,
            0x74 | 0x7c => a = a.wrapping_shr(b),
            0x15 | 0x1d => at += usize::from(if a == b { yes } else { no }),
            0x25 | 0x2d => at += usize::from(if a > b { yes } else { no }),
            0x45 | 0x4d => at += usize::from(if a & b != 0 { yes } else { no }),
            0x06 => return Some(k),
            0x16 => return Some(a),
            _ => unreachable!(),
        }
    }
}

#[test]
fn what_counts_as_denied_is_permitted_with_no_arguments() {
    const CODES: [u16; 19] = [
        0x20, 0x20, 0x20, 0x00, 0x01, 0x60, 0x02, 0x07, 0x87, 0x0c, 0x54, 0x74, 0x15, 0x15, 0x1d, 0x25, 0x45,
        0x06, 0x16,
    ];
    let mut seed = 1_u64;
    let mut random = |below: u32| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        u32::try_from(seed >> 33).unwrap() % below
    };
    let (mut denied, mut taken) = (0, 0);
    for _ in 0..20_000 {
        let mut made = Vec::new();
        for _ in 0..random(12) {
            let code = CODES[usize::try_from(random(19)).unwrap()];
            let answers = [ALLOW, LOG, ERRNO, KILL, TRACE, UNKNOWN];
            let k = match code {
                0x20 => 4 * random(16),
                0x60 | 0x02 => random(3),
                0x06 => answers[usize::try_from(random(6)).unwrap()],
                _ => random(4),
            };
            let distance = |random: u32| u8::try_from(random).unwrap();
            made.push((code, distance(random(3)), distance(random(3)), k));
        }
        made.extend([answer(ERRNO), answer(KILL), answer(ERRNO)]);
        if !program(&made).denies(OWN, 1, Asks::default()) {
            continue;
        }
        denied += 1;
        for _ in 0..50 {
            let mut data = [0; 16].map(|_: u32| random(4));
            (data[0], data[1]) = (1, OWN);
            let Some(found) = run(&made, &data) else {
                continue;
            };
            taken += 1;
            let found = (found & 0xffff_0000).cast_signed();
            assert!(found < NOTIFY.cast_signed(), "{made:?} {data:?}");
        }
    }
    assert!(denied > 1000 && taken > 50_000, "{denied} denied, {taken} runs");
}
