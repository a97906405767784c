//! A program of classic BPF as the kernel takes it for seccomp, followed on all paths that it may take.

use std::collections::BTreeMap;

use firn_oci::spec::Asks;

/// Bytes of an instruction: code, two distances, a constant.
const INSTRUCTION: usize = 8;
/// Most instructions of a program.
const MOST: usize = 4096;
/// Words of its memory.
const MEMORY: usize = 16;
/// Size of what it reads: number, architecture, address, six arguments.
const DATA: u32 = 64;

/// The lowest answer that does not deny. Of the answers of several filters the lowest counts, as a number
/// with a sign: one above this denies nothing, also one that the kernel does not know.
const NOTIFY: i32 = 0x7fc0_0000;
const TRACE: i32 = 0x7ff0_0000;
const ANSWER: u32 = 0xffff_0000;

#[derive(Clone, Copy)]
struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    constant: u32,
}

/// A filter.
pub(in crate::criu) struct Program(Vec<Instruction>);

/// What the program has computed so far. None is a value that depends on what is unknown.
#[derive(Clone, Copy, PartialEq)]
struct State {
    accumulator: Option<u32>,
    index: Option<u32>,
    memory: [Option<u32>; MEMORY],
}

/// What an instruction leads to.
enum Next {
    To(State, [usize; 2]),
    /// The answer.
    Ends(Option<u32>),
    /// The kernel takes no such program.
    Wrong,
}

impl State {
    /// What is known on both paths.
    fn join(self, other: Self) -> Self {
        let same = |one: Option<u32>, other: Option<u32>| one.filter(|_| one == other);
        Self {
            accumulator: same(self.accumulator, other.accumulator),
            index: same(self.index, other.index),
            memory: std::array::from_fn(|at| same(self.memory[at], other.memory[at])),
        }
    }
}

impl Program {
    /// None if it is none that the kernel takes.
    pub(in crate::criu) fn parse(bytes: &[u8]) -> Option<Self> {
        let is_whole = bytes.len().is_multiple_of(INSTRUCTION) && bytes.len() / INSTRUCTION <= MOST;
        let (all, _) = bytes.as_chunks::<INSTRUCTION>();
        let read = |&[c, d, if_true, if_false, k @ ..]: &[u8; INSTRUCTION]| Instruction {
            code: u16::from_ne_bytes([c, d]),
            if_true,
            if_false,
            constant: u32::from_ne_bytes(k),
        };
        is_whole.then(|| Self(all.iter().map(read).collect()))
    }

    /// Number of its instructions.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it denies the call with any arguments. A program in which anything is unknown to this or wrong
    /// does not. One that lets another process decide does where the profile asks that one.
    pub(super) fn denies(&self, arch: u32, number: u32, asks: Asks) -> bool {
        let start = State {
            accumulator: Some(0),
            index: Some(0),
            memory: [None; MEMORY],
        };
        // Jumps lead forward only: when one is taken out, all that leads to it was followed.
        let mut open = BTreeMap::from([(0, start)]);
        while let Some((at, state)) = open.pop_first() {
            let Some(instruction) = self.0.get(at) else {
                return false;
            };
            match instruction.follow(at, state, arch, number) {
                Next::To(state, targets) => {
                    for target in targets {
                        let reached = open.entry(target).or_insert(state);
                        *reached = reached.join(state);
                    }
                }
                Next::Ends(Some(answer)) => {
                    let denies = match (answer & ANSWER).cast_signed() {
                        NOTIFY => asks.notify,
                        TRACE => asks.trace,
                        answer => answer < NOTIFY,
                    };
                    if !denies {
                        return false;
                    }
                }
                Next::Ends(None) | Next::Wrong => return false,
            }
        }
        true
    }
}

impl Instruction {
    fn follow(self, at: usize, mut state: State, arch: u32, number: u32) -> Next {
        let k = self.constant;
        let next = at + 1;
        let slot = usize::try_from(k).unwrap_or(usize::MAX);
        let loaded = |memory: &[Option<u32>; MEMORY]| memory.get(slot).copied();
        let data = |offset: u32| match offset {
            0 => Some(Some(number)),
            4 => Some(Some(arch)),
            _ if offset < DATA && offset.is_multiple_of(4) => Some(None),
            _ => None,
        };
        match self.code {
            // Loads: a word of the data, the length, a constant, a word of the memory.
            0x20 => match data(k) {
                Some(value) => state.accumulator = value,
                None => return Next::Wrong,
            },
            0x80 => state.accumulator = Some(DATA),
            0x81 => state.index = Some(DATA),
            0x00 => state.accumulator = Some(k),
            0x01 => state.index = Some(k),
            0x60 | 0x61 => match loaded(&state.memory) {
                Some(value) if self.code == 0x60 => state.accumulator = value,
                Some(value) => state.index = value,
                None => return Next::Wrong,
            },
            0x02 | 0x03 => match state.memory.get_mut(slot) {
                Some(word) if self.code == 0x02 => *word = state.accumulator,
                Some(word) => *word = state.index,
                None => return Next::Wrong,
            },
            0x07 => state.index = state.accumulator,
            0x87 => state.accumulator = state.index,
            0x06 => return Next::Ends(Some(k)),
            0x16 => return Next::Ends(state.accumulator),
            0x05 => return Next::To(state, [next.saturating_add(slot); 2]),
            0x84 => state.accumulator = state.accumulator.map(u32::wrapping_neg),
            code if code & 7 == 4 => match computed(code, state, k) {
                Some(value) => state.accumulator = value,
                None => return Next::Wrong,
            },
            code if code & 7 == 5 => {
                let (yes, no) = (
                    next + usize::from(self.if_true),
                    next + usize::from(self.if_false),
                );
                return match compared(code, state, k) {
                    Some(Some(true)) => Next::To(state, [yes; 2]),
                    Some(Some(false)) => Next::To(state, [no; 2]),
                    Some(None) => Next::To(state, [yes, no]),
                    None => Next::Wrong,
                };
            }
            _ => return Next::Wrong,
        }
        Next::To(state, [next; 2])
    }
}

/// The other operand: the constant, or the index.
fn operand(code: u16, state: State, k: u32) -> Option<u32> {
    if code & 8 == 0 { Some(k) } else { state.index }
}

/// The accumulator after an operation. None if there is no such operation.
fn computed(code: u16, state: State, k: u32) -> Option<Option<u32>> {
    type Operation = fn(u32, u32) -> Option<u32>;
    let operation: Operation = match code & !8 {
        0x04 => |a, b| Some(a.wrapping_add(b)),
        0x14 => |a, b| Some(a.wrapping_sub(b)),
        0x24 => |a, b| Some(a.wrapping_mul(b)),
        // By 0: the kernel ends the program, and denies.
        0x34 => u32::checked_div,
        0x44 => |a, b| Some(a | b),
        0x54 => |a, b| Some(a & b),
        0x64 => u32::checked_shl,
        0x74 => u32::checked_shr,
        0xa4 => |a, b| Some(a ^ b),
        _ => return None,
    };
    let operands = state.accumulator.zip(operand(code, state, k));
    Some(operands.and_then(|(a, b)| operation(a, b)))
}

/// Whether a jump's condition holds, as far as that is known. None if there is no such condition.
fn compared(code: u16, state: State, k: u32) -> Option<Option<bool>> {
    let condition: fn(&u32, &u32) -> bool = match code & !8 {
        0x15 => u32::eq,
        0x25 => u32::gt,
        0x35 => u32::ge,
        0x45 => |a, b| a & b != 0,
        _ => return None,
    };
    let operands = state.accumulator.zip(operand(code, state, k));
    Some(operands.map(|(a, b)| condition(&a, &b)))
}
