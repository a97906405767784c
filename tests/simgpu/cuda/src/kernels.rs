//! This library's own versions of the test workload's kernels, found by name in its PTX.

use crate::error::Error;
use crate::process::Process;

/// A kernel that can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// `firn_counter_fill(address, count, iteration)`
    Fill,
    /// `firn_counter_step(address, count, iteration, results)`
    Step,
}

/// Names of the entries of a PTX text; nothing when it is no PTX.
pub(crate) fn entries(image: &str) -> Option<Vec<Kernel>> {
    if !image.contains(".version") || !image.contains(".target") {
        return None;
    }
    let names = image.split(".entry").skip(1).map(|rest| {
        rest.trim_start()
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .next()
            .unwrap_or_default()
    });
    Some(names.filter_map(by_name).collect())
}

/// The kernel with this name.
pub(crate) fn by_name(name: &str) -> Option<Kernel> {
    match name {
        "firn_counter_fill" => Some(Kernel::Fill),
        "firn_counter_step" => Some(Kernel::Step),
        _ => None,
    }
}

/// Arguments of a launch, as the kernels above take them.
pub(crate) struct Arguments {
    pub(crate) address: u64,
    pub(crate) count: u64,
    pub(crate) iteration: u32,
    pub(crate) results: u64,
}

/// By how much the pattern's number grows from one element to the next.
const NEXT: u32 = 0x9e37_79b1;

/// How many elements a turn has: 4 GiB, where the upper half of a position changes, are whole turns.
const TURN: usize = 1024;

/// By how much it has grown at each element of a turn.
const STEPS: [u32; TURN] = {
    let mut steps = [0_u32; TURN];
    let mut at = 1;
    while at < TURN {
        steps[at] = steps[at - 1].wrapping_add(NEXT);
        at += 1;
    }
    steps
};

/// The memory that a launch works on, found before the kernel runs.
pub(crate) struct Launch {
    elements: *mut u32,
    count: usize,
    iteration: u32,
    results: Option<*mut u64>,
}

impl Kernel {
    /// Finds the memory that the arguments name.
    pub(crate) fn prepare(self, process: &Process, arguments: &Arguments) -> Result<Launch, Error> {
        let count = simgpu_model::index(arguments.count);
        let bytes = count
            .checked_mul(size_of::<u32>())
            .ok_or(Error::ILLEGAL_ADDRESS)?;
        let reach = |address, len, align| {
            let at = process.reach(address, len).map_err(|_| Error::ILLEGAL_ADDRESS)?;
            if address % align == 0 {
                Ok(at)
            } else {
                Err(Error::ILLEGAL_ADDRESS)
            }
        };
        let results = match self {
            Self::Fill => None,
            Self::Step => Some(reach(arguments.results, 2 * size_of::<u64>(), 8)?.cast()),
        };
        let elements = reach(arguments.address, bytes, 4)?.cast();
        Ok(Launch {
            elements,
            count,
            iteration: arguments.iteration,
            results,
        })
    }
}

impl Launch {
    /// Runs the kernel.
    pub(crate) fn run(self) {
        // SAFETY: `prepare` found `count` elements at this aligned address, in memory that stays mapped while
        // the call is under way; programs that race with their own kernels get what they deserve, as on a
        // GPU.
        let elements = unsafe { std::slice::from_raw_parts_mut(self.elements, self.count) };
        let Some(results) = self.results else {
            elements
                .iter_mut()
                .zip(0..)
                .for_each(|(element, at)| *element = pattern(at, self.iteration));
            return;
        };
        let (mut mismatches, mut checksum) = (0_u64, 0_u64);
        let next = self.iteration.wrapping_add(1);
        for (turn, first) in elements.chunks_mut(TURN).zip((0..).step_by(TURN)) {
            let (held, left) = (mixed(first, self.iteration), mixed(first, next));
            // Sums of 32 bits, which the processor makes of several elements at once.
            let (mut wrong, mut low, mut high) = (0_u32, 0_u32, 0_u32);
            for (element, step) in turn.iter_mut().zip(&STEPS) {
                wrong += u32::from(*element != folded(held.wrapping_add(*step)));
                low += *element & 0xffff;
                high += *element >> 16;
                *element = folded(left.wrapping_add(*step));
            }
            mismatches += u64::from(wrong);
            checksum = checksum.wrapping_add(u64::from(low) + (u64::from(high) << 16));
        }
        // SAFETY: `prepare` found two aligned words here.
        let results = unsafe { std::slice::from_raw_parts_mut(results, 2) };
        results[0] = results[0].wrapping_add(mismatches);
        results[1] = results[1].wrapping_add(checksum);
    }
}

/// What element `at` holds in `iteration`.
fn pattern(at: u64, iteration: u32) -> u32 {
    folded(mixed(at, iteration))
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the two halves of the position are mixed"
)]
fn mixed(at: u64, iteration: u32) -> u32 {
    (at as u32)
        .wrapping_mul(NEXT)
        .wrapping_add(((at >> 32) as u32).wrapping_mul(0x85eb_ca77))
        .wrapping_add(iteration.wrapping_mul(0xc2b2_ae3d))
}

fn folded(mixed: u32) -> u32 {
    mixed ^ (mixed >> 15)
}
