//! A buffer in GPU memory that changes and is checked, all of it, in every iteration.

use std::ffi::CString;

use crate::driver::{Argument, Driver, DriverError, Kernel};

const PTX: &str = include_str!("counter.ptx");
const BLOCKS: u32 = 1024;
const THREADS: u32 = 256;
const ELEMENT: usize = size_of::<u32>();

/// How many elements are looked at in a turn, and how far they are apart: more than an extent of a store.
const LOOKS: u64 = 64;
const STRIDE: u64 = 1_048_583;

/// GPU memory that does not hold what was left there.
#[derive(Debug, thiserror::Error)]
pub enum CounterError {
    /// A call into the driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The kernel found wrong elements.
    #[error("iteration {iteration}: {count} elements do not hold what they should")]
    Mismatch {
        /// When.
        iteration: u32,
        /// How many.
        count: u64,
    },
    /// The CPU finds another value than the GPU checked.
    #[error("iteration {iteration}: element {at} is {found:#x}, not {expected:#x}")]
    Element {
        /// When.
        iteration: u32,
        /// Which.
        at: u64,
        /// What it is.
        found: u32,
        /// What it should be.
        expected: u32,
    },
}

/// See the module head. Belongs to the thread whose context was current when it was made.
pub struct Counter<'a> {
    driver: &'a Driver,
    step: Kernel,
    address: u64,
    elements: u64,
    results: u64,
    iteration: u32,
}

impl<'a> Counter<'a> {
    /// Allocates and fills a buffer of this many bytes in the current context.
    pub fn new(driver: &'a Driver, bytes: usize, managed: bool) -> Result<Self, CounterError> {
        Self::at(driver, bytes, managed, 0)
    }

    /// As [`Counter::new`], filled as it is in an iteration.
    pub fn at(driver: &'a Driver, bytes: usize, managed: bool, iteration: u32) -> Result<Self, CounterError> {
        let ptx = CString::new(PTX).unwrap_or_default();
        let [fill, step] = driver.kernels(&ptx, ["firn_counter_fill", "firn_counter_step"])?;
        let address = if managed {
            driver.allocate_managed(bytes)?
        } else {
            driver.allocate(bytes)?
        };
        let elements = (bytes / ELEMENT) as u64;
        let results = driver.allocate(16)?;
        let arguments = [
            Argument::U64(address),
            Argument::U64(elements),
            Argument::U32(iteration),
        ];
        driver.launch(fill, BLOCKS, THREADS, &arguments)?;
        driver.synchronize()?;
        Ok(Self {
            driver,
            step,
            address,
            elements,
            results,
            iteration,
        })
    }

    /// Allocates a buffer in the current context that holds what a buffer held in an iteration.
    pub fn with(driver: &'a Driver, held: &[u8], iteration: u32) -> Result<Self, CounterError> {
        let made = Self::new(driver, held.len(), false)?;
        driver.write_all(made.address, held)?;
        Ok(Self { iteration, ..made })
    }

    /// Checks some elements, others with each turn, and changes nothing.
    pub fn look(&self, turn: u32) -> Result<(), CounterError> {
        (0..LOOKS).try_for_each(|number| {
            let at = (u64::from(turn) * LOOKS + number).wrapping_mul(STRIDE) % self.elements;
            self.expect(at, self.iteration)
        })
    }

    /// Reads the buffer, as the next step will find it.
    pub fn read(&self, into: &mut [u8]) -> Result<(), CounterError> {
        Ok(self.driver.read_all(self.address, into)?)
    }

    /// The buffer's address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The iteration that the next step checks.
    pub fn iteration(&self) -> u32 {
        self.iteration
    }

    /// Checks all elements and moves them on to the next iteration; gives the sum of what they were.
    pub fn step(&mut self) -> Result<u64, CounterError> {
        let iteration = self.iteration;
        self.driver.zero(self.results, 16)?;
        let arguments = [
            Argument::U64(self.address),
            Argument::U64(self.elements),
            Argument::U32(iteration),
            Argument::U64(self.results),
        ];
        self.driver.launch(self.step, BLOCKS, THREADS, &arguments)?;
        self.driver.synchronize()?;
        let count = u64::from_ne_bytes(self.driver.read(self.results)?);
        let checksum = u64::from_ne_bytes(self.driver.read(self.results + 8)?);
        if count > 0 {
            return Err(CounterError::Mismatch { iteration, count });
        }
        self.iteration = iteration.wrapping_add(1);
        for at in [0, self.elements / 2, self.elements - 1] {
            self.expect(at, iteration)?;
        }
        Ok(checksum)
    }

    fn expect(&self, at: u64, iteration: u32) -> Result<(), CounterError> {
        let found = u32::from_ne_bytes(self.driver.read(self.address + at * ELEMENT as u64)?);
        let expected = pattern(at, self.iteration);
        if found == expected {
            Ok(())
        } else {
            Err(CounterError::Element {
                iteration,
                at,
                found,
                expected,
            })
        }
    }
}

/// What element `at` holds in `iteration`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the two halves of the position are mixed"
)]
pub fn pattern(at: u64, iteration: u32) -> u32 {
    let (low, high) = (at as u32, (at >> 32) as u32);
    let mixed = low
        .wrapping_mul(0x9e37_79b1)
        .wrapping_add(high.wrapping_mul(0x85eb_ca77));
    let mixed = mixed.wrapping_add(iteration.wrapping_mul(0xc2b2_ae3d));
    mixed ^ (mixed >> 15)
}

/// The checksum that a step over `bytes` bytes gives in `iteration`.
pub fn checksum(bytes: usize, iteration: u32) -> u64 {
    (0..(bytes / ELEMENT) as u64)
        .map(|at| u64::from(pattern(at, iteration)))
        .sum()
}
