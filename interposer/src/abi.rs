//! What firn reads of a process with the library, and what passes between the two.
//!
//! Everything that comes from the library is the container's: firn takes it as input.

use core::sync::atomic::{AtomicU64, Ordering};

/// "firncuda": at the begin of a beacon, and of each message.
const MAGIC: u64 = u64::from_le_bytes(*b"firncuda");

/// What both have to agree about.
pub const VERSION: u32 = 1;

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
    /// itself if no request comes for [`LEASE_SECONDS`].
    Shut { wait: u32 },
    /// The gate open.
    Open,
}

/// How long a gate stays shut of which firn asks nothing.
pub const LEASE_SECONDS: u32 = 15;

/// What the library answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is as was wanted.
    Done,
    /// The gate is shut, and this thread is inside, in a call of this row of the facts.
    Busy { tid: u32, row: u32 },
    /// It could not be done: a number of errno.
    Failed { errno: u32 },
    /// The library does not know the request.
    Unknown,
}

/// A request or an answer, and its number: an answer has that of its request.
pub type Bytes = [u8; 64];

impl Request {
    pub fn to_bytes(self, number: u64) -> Bytes {
        let (kind, wait) = match self {
            Self::Hello => (1, 0),
            Self::Shut { wait } => (2, wait),
            Self::Open => (3, 0),
        };
        message(number, kind, [wait, 0])
    }

    /// The number of a message and its request. None: it is no message of firn's; no request: it is one that
    /// this version does not know.
    pub fn of(bytes: &Bytes) -> Option<(u64, Option<Self>)> {
        let (number, kind, [wait, _]) = parts(bytes)?;
        let request = match kind {
            1 => Some(Self::Hello),
            2 => Some(Self::Shut { wait }),
            3 => Some(Self::Open),
            _ => None,
        };
        Some((number, request))
    }
}

impl Answer {
    pub fn to_bytes(self, number: u64) -> Bytes {
        let (kind, words) = match self {
            Self::Done => (1, [0, 0]),
            Self::Busy { tid, row } => (2, [tid, row]),
            Self::Failed { errno } => (3, [errno, 0]),
            Self::Unknown => (4, [0, 0]),
        };
        message(number, kind, words)
    }

    /// The number of the request and the answer. None: it is no answer.
    pub fn of(bytes: &Bytes) -> Option<(u64, Self)> {
        let (number, kind, [first, second]) = parts(bytes)?;
        let answer = match kind {
            1 => Self::Done,
            2 => Self::Busy {
                tid: first,
                row: second,
            },
            3 => Self::Failed { errno: first },
            4 => Self::Unknown,
            _ => return None,
        };
        Some((number, answer))
    }
}

fn message(number: u64, kind: u32, [first, second]: [u32; 2]) -> Bytes {
    let words = [
        MAGIC,
        u64::from(VERSION) | u64::from(kind) << 32,
        number,
        u64::from(first) | u64::from(second) << 32,
    ];
    let mut bytes = [0; 64];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn parts(bytes: &Bytes) -> Option<(u64, u32, [u32; 2])> {
    let [magic, kind, number, of_kind, ..] = words(bytes);
    (magic == MAGIC).then(|| (number, high(kind), [low(of_kind), high(of_kind)]))
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
        for request in [Request::Hello, Request::Shut { wait: 70_000 }, Request::Open] {
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
            Answer::Unknown,
        ] {
            assert_eq!(Answer::of(&answer.to_bytes(7)), Some((7, answer)));
        }
    }

    #[test]
    fn other_messages_are_none() {
        assert_eq!(Request::of(&[0; 64]), None);
        assert_eq!(Answer::of(&[0; 64]), None);
        let future = message(5, 99, [1, 2]);
        assert_eq!(Request::of(&future), Some((5, None)));
        assert_eq!(Answer::of(&future), None);
    }

    #[test]
    fn a_beacon_shows_how_a_process_is_reached() {
        let beacon = Beacon::new();
        let seen = || {
            let mut bytes = [0; Beacon::SIZE];
            for (chunk, word) in bytes.chunks_exact_mut(8).zip(&beacon.words) {
                chunk.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
            }
            Reach::of(&bytes)
        };
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
    }
}
