//! What firn reads of a process with the library, and what passes between the two.
//!
//! Everything that comes from the library is the container's: firn takes it as input.

use core::sync::atomic::{AtomicU64, Ordering};

/// "firncuda": at the begin of a beacon, and of each message.
const MAGIC: u64 = u64::from_le_bytes(*b"firncuda");

/// What both have to agree about.
pub const VERSION: u32 = 2;

/// What the library shows of its process. A process without contexts shows zero bytes, as does a forked
/// child.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Beacon {
    words: [AtomicU64; 8],
}

/// How firn reaches the library in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    pub version: u32,
    /// The descriptor of that process by which it is commanded: the far end of a socket pair.
    pub end: u32,
    /// The library's own thread, by its number in the process's namespace. It is never inside the gate.
    pub thread: u32,
}

impl Beacon {
    /// The bytes that firn reads.
    pub const SIZE: usize = 64;

    /// A beacon that shows nothing.
    pub const fn new() -> Self {
        Self {
            words: [const { AtomicU64::new(0) }; 8],
        }
    }

    /// Shows how the process is reached.
    pub fn show(&self, reach: Reach) {
        let Reach { version, end, thread } = reach;
        let [magic, first, second, ..] = &self.words;
        first.store(u64::from(version) | u64::from(end) << 32, Ordering::Relaxed);
        second.store(u64::from(thread), Ordering::Relaxed);
        magic.store(MAGIC.to_le(), Ordering::Release);
    }

    /// Shows that the process cannot be reached any more.
    pub fn hide(&self) {
        let [magic, ..] = &self.words;
        magic.store(0, Ordering::Release);
    }
}

/// Whether a beacon shows nothing now, and has shown something before.
pub fn is_hidden(beacon: &[u8; Beacon::SIZE]) -> bool {
    let [magic, first, ..] = words(beacon);
    magic == 0 && first != 0
}

impl Reach {
    /// What the bytes of a beacon show. None: that the process cannot be reached.
    pub fn of(beacon: &[u8; Beacon::SIZE]) -> Option<Self> {
        let [magic, first, second, ..] = words(beacon);
        (magic == MAGIC).then_some(Self {
            version: low(first),
            end: high(first),
            thread: low(second),
        })
    }
}

/// What firn wants of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To be answered: that is all.
    Hello,
    /// The gate shut, and answered when nobody is inside, or after so many milliseconds. It opens again by
    /// itself if no request comes for [`LEASE_SECONDS`] while all memory is in the process.
    Shut { wait: u32 },
    /// The gate open, if all memory is in the process.
    Open,
    /// Every context idle, and the driver ready to take memory out: tried with a piece that nobody has.
    Rehearse { wait: u32 },
    /// Descriptors of so many pieces, from this index of the table on. After the answer's bytes comes the
    /// size of each of them.
    Lend { wait: u32, from: u32, count: u32 },
    /// Every piece unmapped and released.
    Detach { wait: u32 },
    /// The pieces from this index on mapped again: the message has a descriptor for each.
    Attach { wait: u32, from: u32, count: u32 },
}

/// Pieces of one request at most: a message has no more descriptors.
pub const PIECES: u32 = 64;

/// Bytes of the longest answer: one with the sizes of all its pieces.
pub const LONGEST: usize = size_of::<Bytes>() + PIECES as usize * size_of::<u64>();

/// How long a gate stays shut of which firn asks nothing.
pub const LEASE_SECONDS: u32 = 15;

/// What the library answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is as was wanted.
    Done,
    /// The gate is shut, and this thread is inside, in a call of this row of the facts.
    Busy { tid: u32, row: u32 },
    /// It is done, and so many of the pieces count as those of another process from now on: there was no room
    /// for a copy of each.
    Imported { count: u32 },
    /// It could not be done: a number of errno.
    Failed { errno: u32 },
    /// The driver refuses it: a CUresult.
    Refused { status: u32 },
    /// It is not done yet, or something before it. Nothing but `Hello` and `Open` can be asked until it is.
    Working,
    /// Memory is out of the process, or may be: the gate stays shut.
    Away,
    /// The gate is open: memory stays where it is.
    Idle,
    /// The library does not know the request.
    Unknown,
}

/// A request or an answer, and its number: an answer has that of its request.
pub type Bytes = [u8; 64];

impl Request {
    pub fn to_bytes(self, number: u64) -> Bytes {
        let (kind, words) = match self {
            Self::Hello => (1, [0; 3]),
            Self::Shut { wait } => (2, [wait, 0, 0]),
            Self::Open => (3, [0; 3]),
            Self::Rehearse { wait } => (4, [wait, 0, 0]),
            Self::Lend { wait, from, count } => (5, [wait, from, count]),
            Self::Detach { wait } => (6, [wait, 0, 0]),
            Self::Attach { wait, from, count } => (7, [wait, from, count]),
        };
        message(number, kind, words)
    }

    /// How long it may take, in milliseconds.
    pub fn wait(self) -> u32 {
        match self {
            Self::Hello | Self::Open => 0,
            Self::Shut { wait }
            | Self::Rehearse { wait }
            | Self::Lend { wait, .. }
            | Self::Detach { wait }
            | Self::Attach { wait, .. } => wait,
        }
    }

    /// The number of a message and its request. None: it is no message of firn's; no request: it is one that
    /// this version does not know.
    pub fn of(bytes: &Bytes) -> Option<(u64, Option<Self>)> {
        let (number, kind, [wait, from, count]) = parts(bytes)?;
        let request = match kind {
            1 => Some(Self::Hello),
            2 => Some(Self::Shut { wait }),
            3 => Some(Self::Open),
            4 => Some(Self::Rehearse { wait }),
            5 => Some(Self::Lend { wait, from, count }),
            6 => Some(Self::Detach { wait }),
            7 => Some(Self::Attach { wait, from, count }),
            _ => None,
        };
        Some((number, request))
    }
}

impl Answer {
    pub fn to_bytes(self, number: u64) -> Bytes {
        let (kind, words) = match self {
            Self::Done => (1, [0; 3]),
            Self::Busy { tid, row } => (2, [tid, row, 0]),
            Self::Failed { errno } => (3, [errno, 0, 0]),
            Self::Unknown => (4, [0; 3]),
            Self::Refused { status } => (5, [status, 0, 0]),
            Self::Working => (6, [0; 3]),
            Self::Away => (7, [0; 3]),
            Self::Idle => (8, [0; 3]),
            Self::Imported { count } => (9, [count, 0, 0]),
        };
        message(number, kind, words)
    }

    /// The number of the request and the answer. None: it is no answer.
    pub fn of(bytes: &Bytes) -> Option<(u64, Self)> {
        let (number, kind, [first, second, _]) = parts(bytes)?;
        let answer = match kind {
            1 => Self::Done,
            2 => Self::Busy {
                tid: first,
                row: second,
            },
            3 => Self::Failed { errno: first },
            4 => Self::Unknown,
            5 => Self::Refused { status: first },
            6 => Self::Working,
            7 => Self::Away,
            8 => Self::Idle,
            9 => Self::Imported { count: first },
            _ => return None,
        };
        Some((number, answer))
    }
}

/// Writes the sizes of pieces to what follows the bytes of an answer. Returns how many bytes it then has.
pub fn put_sizes(rest: &mut [u8], sizes: impl Iterator<Item = u64>) -> usize {
    let mut written = 0;
    for (chunk, size) in rest.chunks_exact_mut(size_of::<u64>()).zip(sizes) {
        chunk.copy_from_slice(&size.to_le_bytes());
        written += size_of::<u64>();
    }
    written
}

/// The sizes of pieces in what follows the bytes of an answer.
pub fn sizes_in(rest: &[u8]) -> impl Iterator<Item = u64> {
    rest.as_chunks().0.iter().map(|chunk| u64::from_le_bytes(*chunk))
}

fn message(number: u64, kind: u32, [first, second, third]: [u32; 3]) -> Bytes {
    let words = [
        MAGIC,
        u64::from(VERSION) | u64::from(kind) << 32,
        number,
        u64::from(first) | u64::from(second) << 32,
        u64::from(third),
    ];
    let mut bytes = [0; 64];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn parts(bytes: &Bytes) -> Option<(u64, u32, [u32; 3])> {
    let [magic, kind, number, first, second, ..] = words(bytes);
    (magic == MAGIC).then(|| (number, high(kind), [low(first), high(first), low(second)]))
}

fn words(bytes: &Bytes) -> [u64; 8] {
    let mut words = [0; 8];
    for (word, chunk) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*chunk);
    }
    words
}

fn low(word: u64) -> u32 {
    high(word << 32)
}

fn high(word: u64) -> u32 {
    u32::try_from(word >> 32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (wait, from, count) = (70_000, 65_535, 64);
        for request in [
            Request::Hello,
            Request::Shut { wait },
            Request::Open,
            Request::Rehearse { wait },
            Request::Lend { wait, from, count },
            Request::Detach { wait },
            Request::Attach { wait, from, count },
        ] {
            assert_eq!(
                Request::of(&request.to_bytes(1 << 40)),
                Some((1 << 40, Some(request)))
            );
        }
        for answer in [
            Answer::Done,
            Answer::Busy {
                tid: 1 << 31,
                row: 722,
            },
            Answer::Failed { errno: 87 },
            Answer::Refused { status: 801 },
            Answer::Working,
            Answer::Away,
            Answer::Idle,
            Answer::Imported { count: 64 },
            Answer::Unknown,
        ] {
            assert_eq!(Answer::of(&answer.to_bytes(7)), Some((7, answer)));
        }
    }

    #[test]
    fn sizes_follow_an_answer() {
        let mut rest = [0; LONGEST - 64];
        let sizes = [2 << 20, u64::MAX];
        let written = put_sizes(&mut rest, sizes.into_iter());
        assert_eq!(written, 16);
        assert!(sizes_in(&rest[..written]).eq(sizes));
        assert_eq!(sizes_in(&rest[..15]).count(), 1);
        assert_eq!(put_sizes(&mut rest, (0..).take(100)), rest.len());
    }

    #[test]
    fn other_messages_are_none() {
        assert_eq!(Request::of(&[0; 64]), None);
        assert_eq!(Answer::of(&[0; 64]), None);
        let future = message(5, 99, [1, 2, 3]);
        assert_eq!(Request::of(&future), Some((5, None)));
        assert_eq!(Answer::of(&future), None);
    }

    #[test]
    fn a_beacon_shows_how_a_process_is_reached() {
        let beacon = Beacon::new();
        let bytes_of = |beacon: &Beacon| {
            let mut bytes = [0; Beacon::SIZE];
            for (chunk, word) in bytes.chunks_exact_mut(8).zip(&beacon.words) {
                chunk.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
            }
            bytes
        };
        let seen = || Reach::of(&bytes_of(&beacon));
        assert_eq!(seen(), None);
        let reach = Reach {
            version: VERSION,
            end: 1_048_575,
            thread: 4711,
        };
        beacon.show(reach);
        assert_eq!(seen(), Some(reach));
        beacon.hide();
        assert_eq!(seen(), None);
        assert!(is_hidden(&bytes_of(&beacon)) && !is_hidden(&[0; Beacon::SIZE]));
    }
}
