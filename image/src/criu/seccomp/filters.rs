//! The seccomp filters of an image, and which of them apply to a thread.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::{DeniedCalls, Program};
use crate::criu::{Image, ImageFault};

const SECCOMP_MAGIC: u32 = 0x6441_3049;

/// Seccomp with a filter, as the kernel numbers it.
const FILTER: u32 = 2;

/// Most instructions of the filters that apply to a thread: the kernel counts four more for each.
const MOST: usize = 32_768;
const FOR_EACH: usize = 4;

/// Seccomp of a thread.
#[derive(Clone, Copy)]
pub(in crate::criu) struct Seccomp {
    /// As the kernel numbers it; 0: none.
    pub mode: u32,
    /// Number of the last of its filters.
    pub filter: Option<u32>,
}

/// The seccomp filters of an image, or of the kernel.
pub(in crate::criu) struct Filters {
    all: Vec<Filter>,
    /// What those that apply together let through, by the last of them.
    permitted: RefCell<BTreeMap<u32, Option<String>>>,
}

struct Filter {
    program: Option<Program>,
    /// The filter that applies as well.
    before: Option<u32>,
    /// CRIU gives it to all threads of the process at once, and the image has it with the first thread alone.
    is_for_all: bool,
    /// Flags that no dump has: a listener of its own would decide what the profile leaves to somebody else.
    has_others: bool,
}

impl Filters {
    pub(in crate::criu) fn read(image: &Image) -> Result<Self, ImageFault> {
        const NAME: &str = "seccomp.img";
        const FOR_ALL: u32 = 1;
        const LOGS: u32 = 2;
        let malformed = |what| ImageFault::malformed(NAME, what);
        let all = image.read_one(NAME, SECCOMP_MAGIC, |message| {
            message.each(1, |filter| {
                let flags = filter.number(3)?.unwrap_or(0);
                Ok(Filter {
                    program: Program::parse(filter.bytes(1)?.unwrap_or_default()),
                    before: filter.number(2)?,
                    is_for_all: flags & FOR_ALL != 0,
                    has_others: flags & !(FOR_ALL | LOGS) != 0,
                })
            })
        })?;
        let all = all.unwrap_or_default();
        if all.iter().any(|filter| filter.program.is_none()) {
            return Err(malformed("a filter that the kernel does not take"));
        }
        if all.iter().any(|filter| filter.has_others) {
            return Err(malformed(
                "a filter with flags that neither the kernel reports nor CRIU adds",
            ));
        }
        Ok(Self::of(all))
    }

    /// As the kernel reports them: whether there is one.
    pub(in crate::criu) fn of_kernel() -> Self {
        Self::of(vec![Filter {
            program: None,
            before: None,
            is_for_all: false,
            has_others: false,
        }])
    }

    fn of(all: Vec<Filter>) -> Self {
        let permitted = RefCell::default();
        Self { all, permitted }
    }

    fn get(&self, number: u32) -> Option<&Filter> {
        self.all.get(usize::try_from(number).ok()?)
    }

    /// All that apply with this one, the last one first. None if there are more than the kernel takes, if one
    /// is missing or if they lead in a circle.
    fn chain(&self, last: u32) -> Option<Vec<&Filter>> {
        let (mut found, mut next, mut left) = (Vec::new(), Some(last), MOST);
        while let Some(number) = next {
            let filter = self.get(number)?;
            let length = filter.program.as_ref().map_or(0, Program::len);
            left = left.checked_sub(length + FOR_EACH)?;
            found.push(filter);
            next = filter.before;
        }
        Some(found)
    }

    /// Whether a thread that has these filters gives them to the others of its process.
    pub(in crate::criu) fn are_for_all(&self, thread: Seccomp) -> bool {
        let chain = thread
            .filter
            .filter(|_| thread.mode == FILTER)
            .and_then(|last| self.chain(last));
        chain.is_some_and(|chain| chain.iter().all(|filter| filter.is_for_all))
    }

    /// Whether a thread has a filter, and if so what its filters let through that is denied.
    pub(in crate::criu) fn permitted(&self, thread: Seccomp, denied: &DeniedCalls) -> Option<Option<String>> {
        let last = thread.filter.filter(|_| thread.mode == FILTER)?;
        if let Some(known) = self.permitted.borrow().get(&last) {
            return Some(known.clone());
        }
        let chain = self.chain(last)?;
        let programs: Option<Vec<&Program>> = chain.iter().map(|filter| filter.program.as_ref()).collect();
        let found = programs.and_then(|programs| denied.permitted(&programs).map(ToString::to_string));
        self.permitted.borrow_mut().insert(last, found.clone());
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_apply_together_as_the_kernel_takes() {
        let answer = [6, 0, 0, 0, 0, 0, 0, 0];
        let chained = |count: u32, first: Option<u32>| {
            let filter = |number: u32| Filter {
                program: Program::parse(&answer),
                before: number.checked_sub(1).or(first),
                is_for_all: false,
                has_others: false,
            };
            let all = Filters::of((0..count).map(filter).collect());
            all.chain(count - 1).map(|chain| chain.len())
        };
        assert_eq!(chained(1, None), Some(1));
        // Each counts for five instructions.
        assert_eq!(chained(6553, None), Some(6553));
        assert_eq!(chained(6554, None), None);
        assert_eq!(chained(2, Some(2)), None, "one is missing");
        assert_eq!(chained(2, Some(1)), None, "a circle");
    }
}
