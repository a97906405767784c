//! Programs that enforce a cgroup's device rules (v2).
//!
//! The container's runtime has attached one that knows the spec's rules and the runtime's own, in which
//! runtimes and their versions differ. So firn copies it, and puts instructions before it that decide about
//! the devices that change and leave all others to it.

use firn_gpu::NodeType;
use firn_oci::{Access, DeviceChange};

use crate::sys::bpf::Instruction;

/// Registers: the result, the context (which the instructions leave as it is), and what they read from it.
const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;

/// `struct bpf_cgroup_dev_ctx`: the type in the low 16 bits and the access above them, major, minor.
const AT_ACCESS: i16 = 0;
const AT_MAJOR: i16 = 4;
const AT_MINOR: i16 = 8;

const LOAD_WORD: u8 = 0x61;
const SET: u8 = 0xb7;
const COPY: u8 = 0xbf;
const AND: u8 = 0x57;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP_IF_NOT: u8 = 0x55;
const JUMP_IF: u8 = 0x15;
const EXIT: u8 = 0x95;

/// The program before which instructions are put that decide about these devices.
///
/// A device that changes may be opened as the new rules allow. Whoever could make its node still can:
/// runtimes let a container make nodes of every device. Each further change makes the program longer, by 12
/// instructions for each device; the kernel takes a million.
pub(super) fn with_changes(changes: &[DeviceChange], program: &[Instruction]) -> Vec<Instruction> {
    let mut code = vec![
        op(LOAD_WORD, KIND, CONTEXT, AT_ACCESS, 0),
        op(COPY, ACCESS, KIND, 0, 0),
        op(AND, KIND, 0, 0, 0xffff),
        op(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        op(LOAD_WORD, MAJOR, CONTEXT, AT_MAJOR, 0),
        op(LOAD_WORD, MINOR, CONTEXT, AT_MINOR, 0),
    ];
    code.extend(changes.iter().filter_map(decide).flatten());
    code.extend(program);
    code
}

/// None for numbers that no device has.
fn decide(change: &DeviceChange) -> Option<[Instruction; 12]> {
    let kind = match change.kind {
        NodeType::Block => 1,
        NodeType::Char => 2,
    };
    let major = i32::try_from(change.major).ok()?;
    let minor = i32::try_from(change.minor).ok()?;
    let lost = change.lost() & (Access::READ | Access::WRITE);
    Some([
        op(JUMP_IF_NOT, KIND, 0, 11, kind),
        op(JUMP_IF_NOT, MAJOR, 0, 10, major),
        op(JUMP_IF_NOT, MINOR, 0, 9, minor),
        op(COPY, RESULT, ACCESS, 0, 0),
        op(AND, RESULT, 0, 0, (!change.after).bits().into()),
        op(JUMP_IF_NOT, RESULT, 0, 2, 0),
        op(SET, RESULT, 0, 0, 1),
        op(EXIT, 0, 0, 0, 0),
        op(AND, RESULT, 0, 0, lost.bits().into()),
        op(JUMP_IF, RESULT, 0, 2, 0),
        op(SET, RESULT, 0, 0, 0),
        op(EXIT, 0, 0, 0, 0),
    ])
}

fn op(code: u8, to: u8, from: u8, offset: i16, value: i32) -> Instruction {
    Instruction {
        code,
        registers: from << 4 | to,
        offset,
        value,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What a runtime attaches: nodes of all devices may be made, and these be opened.
    pub(in crate::cgroup) fn runtimes(devices: &[(i32, i32)]) -> Vec<Instruction> {
        let allow = [op(SET, RESULT, 0, 0, 1), op(EXIT, 0, 0, 0, 0)];
        let mut code = vec![
            op(LOAD_WORD, 2, CONTEXT, AT_ACCESS, 0),
            op(SHIFT_RIGHT, 2, 0, 0, 16),
            op(JUMP_IF_NOT, 2, 0, 2, 1),
        ];
        code.extend(allow);
        for (major, minor) in devices {
            code.extend([
                op(LOAD_WORD, 3, CONTEXT, AT_MAJOR, 0),
                op(JUMP_IF_NOT, 3, 0, 4, *major),
                op(LOAD_WORD, 3, CONTEXT, AT_MINOR, 0),
                op(JUMP_IF_NOT, 3, 0, 2, *minor),
            ]);
            code.extend(allow);
        }
        code.extend([op(SET, RESULT, 0, 0, 0), op(EXIT, 0, 0, 0, 0)]);
        code
    }

    /// Whether the program allows an access, as the kernel runs it.
    fn allows(code: &[Instruction], kind: NodeType, access: u8, major: u32, minor: u32) -> bool {
        let kind: u32 = if kind == NodeType::Block { 1 } else { 2 };
        let context = [u32::from(access) << 16 | kind, major, minor];
        let mut registers = [None::<u64>; 10];
        let mut at = 0_usize;
        loop {
            let Instruction {
                code: name,
                registers: both,
                offset,
                value,
            } = code[at];
            let (to, from) = (usize::from(both & 15), usize::from(both >> 4));
            let value = u64::from_ne_bytes(i64::from(value).to_ne_bytes());
            at += 1;
            let own = registers[to];
            match name {
                LOAD_WORD => {
                    assert_eq!((from, registers[1]), (1, None), "the context is lost");
                    registers[to] = Some(context[usize::try_from(offset).unwrap() / 4].into());
                }
                SET => registers[to] = Some(value),
                COPY => registers[to] = registers[from],
                AND => registers[to] = Some(own.unwrap() & value),
                SHIFT_RIGHT => registers[to] = Some(own.unwrap() >> value),
                JUMP_IF_NOT | JUMP_IF => {
                    if (own.unwrap() == value) == (name == JUMP_IF) {
                        at += usize::try_from(offset).unwrap();
                    }
                }
                EXIT => return registers[0].unwrap() == 1,
                _ => panic!("no such instruction: {name:#x}"),
            }
        }
    }

    fn access(bits: u8) -> Access {
        let all = [Access::MAKE, Access::READ, Access::WRITE];
        let wanted = all.into_iter().filter(|one| one.bits() & bits != 0);
        wanted.fold(Access::NONE, |all, one| all | one)
    }

    fn change(minor: u64, before: u8, after: u8) -> DeviceChange {
        let (before, after) = (access(before), access(after));
        DeviceChange {
            kind: NodeType::Char,
            major: 195,
            minor,
            before,
            after,
        }
    }

    /// The accesses for which the kernel asks: making a node, or opening one.
    const ASKED: [u8; 4] = [1, 2, 4, 6];

    #[test]
    fn a_changed_device_opens_as_the_new_rules_allow_and_no_other_does() {
        let runtime = runtimes(&[(195, 0), (195, 255)]);
        for before in 0..8 {
            for after in 0..8 {
                let first = with_changes(&[change(7, 0, before)], &runtime);
                let code = with_changes(&[change(7, before, after)], &first);
                for asked in ASKED {
                    let expected = asked == 1 || asked & !after == 0;
                    let what = format!("{before} to {after}, asked for {asked}");
                    assert_eq!(allows(&code, NodeType::Char, asked, 195, 7), expected, "{what}");
                    let others = [
                        (NodeType::Block, 195, 7),
                        (NodeType::Char, 7, 195),
                        (NodeType::Char, 195, 0),
                    ];
                    for (kind, major, minor) in others {
                        let expected = allows(&runtime, kind, asked, major, minor);
                        assert_eq!(allows(&code, kind, asked, major, minor), expected, "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn devices_may_come_and_go_many_times() {
        let mut code = runtimes(&[(195, 0), (195, 255)]);
        let open = |code: &[Instruction]| {
            let minors = [0, 1, 2, 255].into_iter();
            minors
                .filter(|minor| allows(code, NodeType::Char, 6, 195, *minor))
                .collect::<Vec<_>>()
        };
        assert_eq!(open(&code), [0, 255]);
        for _ in 0..2 {
            code = with_changes(&[change(1, 0, 7), change(0, 7, 0)], &code);
            assert_eq!(open(&code), [1, 255]);
            code = with_changes(&[change(0, 0, 7), change(1, 7, 0)], &code);
            assert_eq!(open(&code), [0, 255]);
        }
    }

    #[test]
    fn numbers_that_no_device_has_change_nothing() {
        let runtime = runtimes(&[]);
        let huge = DeviceChange {
            minor: 1 << 40,
            ..change(0, 0, 7)
        };
        assert_eq!(with_changes(&[huge], &runtime), with_changes(&[], &runtime));
    }
}
