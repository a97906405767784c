//! Programs as the kernel takes them and runs them.

use super::*;

#[test]
fn what_the_kernel_does_not_take_denies_nothing() {
    assert!(Program::parse(b"filter").is_none());
    assert!(Program::parse(&[0; 8 * 4097]).is_none());
    assert_eq!(Program::parse(&[0; 8 * 4096]).map(|most| most.len()), Some(4096));
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
        (0x44, 0xfff0, 0xf0),
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
fn the_index_is_kept_in_a_word_and_the_answer_may_be_what_was_computed() {
    let kept = [
        (0x01, 0, 0, 7),
        (0x00, 0, 0, 5),
        (0x03, 0, 0, 0),
        (0x60, 0, 0, 0),
        equal(7, 0, 1),
        answer(ERRNO),
        answer(ALLOW),
    ];
    assert!(program_denies(&kept));
    // The answer is what was computed.
    for (computed, denies) in [(ERRNO, true), (ALLOW, false)] {
        assert_eq!(program_denies(&[(0x00, 0, 0, computed), (0x16, 0, 0, 0)]), denies);
    }
}

#[test]
fn a_condition_of_what_is_known_leads_one_way() {
    for (code, constant, smaller, equal, larger) in [
        (0x15, 6, false, true, false),
        (0x25, 6, false, false, true),
        (0x35, 6, false, true, true),
        // A bit in common.
        (0x45, 6, true, true, true),
        (0x45, 2, false, true, true),
    ] {
        for (known, holds) in [(5, smaller), (6, equal), (7, larger)] {
            let one_way = |yes, no| {
                let jump = (code, 0, 1, constant);
                program_denies(&[(0x00, 0, 0, known), jump, answer(yes), answer(no)])
            };
            assert_eq!(one_way(ERRNO, ALLOW), holds, "{code:x} {known}");
            assert_eq!(one_way(ALLOW, ERRNO), !holds, "{code:x} {known}");
        }
    }
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
