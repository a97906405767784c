//! Firn's side of the interposer: finds the library in a process, and asks it.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_host::descriptors::{receive, send};
use firn_host::{FileId, proc_maps};
use firn_interposer::abi::{self, Answer, Beacon, Bytes, PIECES, Reach, Request};
use object::{Object, ObjectSymbol};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_peercred, socket_type};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

/// The symbol by which the library keeps the address of its area.
const AREA: &str = "firn_cuda_area";

/// Of a message without descriptors.
const NONE: &[OwnedFd] = &[];

/// How long an answer may take, apart from what the request waits for.
const LIMIT: Duration = Duration::from_secs(5);

/// A file of the library.
#[derive(Debug)]
pub struct Library {
    /// The end of the path by which programs have it mapped.
    name: Vec<u8>,
    file: FileId,
    /// Of [`AREA`], from where the file's begin is mapped.
    area: u64,
}

/// A process that can be asked.
#[derive(Debug)]
pub struct Process {
    /// What the process shows.
    pub reach: Reach,
    /// How long an answer may take, apart from what the request waits for.
    pub limit: Duration,
    end: OwnedFd,
    number: u64,
}

/// A piece of GPU memory that a process has lent.
#[derive(Debug)]
pub struct Lent {
    /// As the process reports.
    pub bytes: u64,
    pub descriptor: OwnedFd,
}

impl AsFd for Lent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Library {
    /// Reads a file of the library.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn read(path: &Path) -> io::Result<Self> {
        let invalid = |text: String| io::Error::new(ErrorKind::InvalidData, text);
        let named = |error: object::Error| invalid(format!("{}: {error}", path.display()));
        let bytes = fs::read(path)?;
        let file = object::File::parse(&*bytes).map_err(named)?;
        let mut symbols = file.dynamic_symbols();
        let symbol = symbols.find(|symbol| symbol.name() == Ok(AREA));
        let symbol = symbol.ok_or_else(|| invalid(format!("{}: no symbol {AREA}", path.display())))?;
        let name = path.file_name().unwrap_or_default();
        Ok(Self {
            name: name.as_encoded_bytes().to_owned(),
            file: FileId::of(&fs::metadata(path)?),
            area: symbol.address(),
        })
    }

    /// The process, if it has this file of the library, of this version, and shows that it can be asked.
    ///
    /// # Errors
    /// The process cannot be read, as when it has ended.
    pub fn process(&self, pid: Pid) -> io::Result<Option<Process>> {
        let Some(beacon) = self.beacon(pid)? else {
            return Ok(None);
        };
        let Some(reach) = Reach::of(&beacon).filter(|reach| reach.version == abi::VERSION) else {
            return Ok(None);
        };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let Ok(end) = i32::try_from(reach.end) else {
            return Ok(None);
        };
        match pidfd_getfd(process, end, PidfdGetfdFlags::empty()) {
            Ok(end) if is_pair(&end, pid)? => Ok(Some(Process::new(reach, end)?)),
            // The program has closed it; it may have something else by this number.
            Ok(_) | Err(Errno::BADF) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the process has this file of the library and could be asked before, but cannot now.
    ///
    /// # Errors
    /// As [`Self::process`].
    pub fn is_hidden(&self, pid: Pid) -> io::Result<bool> {
        let beacon = self.beacon(pid)?;
        Ok(beacon.is_some_and(|beacon| abi::is_hidden(&beacon)))
    }

    /// What the library shows, if the process has this file of it.
    fn beacon(&self, pid: Pid) -> io::Result<Option<[u8; Beacon::SIZE]>> {
        let Some(base) = self.base(pid)? else {
            return Ok(None);
        };
        let memory = File::open(proc(pid, "mem"))?;
        let mut area = [0; 8];
        memory.read_exact_at(&mut area, base.saturating_add(self.area))?;
        let area = u64::from_ne_bytes(area);
        // The library has none there.
        if area < 2 {
            return Ok(None);
        }
        let mut beacon = [0; Beacon::SIZE];
        memory.read_exact_at(&mut beacon, area)?;
        Ok(Some(beacon))
    }

    /// Whether the process has this file of the library and can be asked.
    pub fn is_in(&self, pid: i32) -> bool {
        let found = Pid::from_raw(pid).map(|pid| self.process(pid));
        matches!(found, Some(Ok(Some(_))))
    }

    /// Where the begin of the file is mapped.
    fn base(&self, pid: Pid) -> io::Result<Option<u64>> {
        let mut named = Vec::new();
        proc_maps::each(Path::new("/proc"), pid.as_raw_pid(), |mapping| {
            if mapping.offset == 0 && mapping.file_name() == self.name {
                named.push((mapping.start, mapping.end));
            }
            ControlFlow::Continue(())
        })?;
        for (start, end) in named {
            // The device of a line is not that of the file on every file system.
            let file = fs::metadata(proc(pid, &format!("map_files/{start:x}-{end:x}")))?;
            if FileId::of(&file) == self.file {
                return Ok(Some(start));
            }
        }
        Ok(None)
    }
}

fn proc(pid: Pid, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{}/{name}", pid.as_raw_pid()))
}

/// Whether it is an end of a pair of sockets that the process has with itself.
fn is_pair(end: &OwnedFd, pid: Pid) -> io::Result<bool> {
    let is_socket = match socket_domain(end) {
        Ok(domain) => domain == AddressFamily::UNIX,
        Err(Errno::NOTSOCK) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    Ok(is_socket && socket_type(end)? == SocketType::SEQPACKET && socket_peercred(end)?.pid == pid)
}

impl Process {
    /// Another one may have asked before, and answers to it may still come: no number is used twice.
    fn new(reach: Reach, end: OwnedFd) -> io::Result<Self> {
        let mut number = [0; 8];
        getrandom(&mut number, GetRandomFlags::empty())?;
        let number = u64::from_ne_bytes(number);
        Ok(Self {
            reach,
            limit: LIMIT,
            end,
            number,
        })
    }

    /// Asks the library for something that needs no descriptors.
    ///
    /// # Errors
    /// It does not answer in time, or has gone.
    pub fn ask(&mut self, request: Request) -> io::Result<Answer> {
        Ok(self.exchange(request, NONE)?.answer)
    }

    /// Pieces of its memory, from this index of the table on; at its end there are fewer than [`PIECES`].
    ///
    /// # Errors
    /// As [`Self::ask`]; what it answers else is in the result.
    pub fn lend(&mut self, from: u32, wait: u32) -> io::Result<Result<Vec<Lent>, Answer>> {
        let count = PIECES;
        let message = self.exchange(Request::Lend { wait, from, count }, NONE)?;
        if message.answer != Answer::Done {
            return Ok(Err(message.answer));
        }
        if message.sizes.len() != message.descriptors.len() {
            return Err(ErrorKind::InvalidData.into());
        }
        let pieces = message.sizes.into_iter().zip(message.descriptors);
        let lent = |(bytes, descriptor)| Lent { bytes, descriptor };
        Ok(Ok(pieces.map(lent).collect()))
    }

    /// Gives pieces of its memory back, of which the first has this index.
    ///
    /// # Errors
    /// As [`Self::ask`], and more than [`PIECES`] of them.
    pub fn attach<T: AsFd>(&mut self, from: u32, pieces: &[T], wait: u32) -> io::Result<Answer> {
        let count = u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let request = Request::Attach { wait, from, count };
        Ok(self.exchange(request, pieces)?.answer)
    }

    fn exchange<T: AsFd>(&mut self, request: Request, with: &[T]) -> io::Result<Message> {
        self.number = self.number.wrapping_add(1);
        send(&self.end, &request.to_bytes(self.number), with)?;
        // What it sleeps between looks takes longer than it asks for.
        let end = Instant::now() + self.limit + 3 * Duration::from_millis(request.wait().into());
        loop {
            let left = end.saturating_duration_since(Instant::now());
            // Also where messages come all the time.
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            if let Some((number, message)) = self.receive(left)?
                && number == self.number
            {
                return Ok(message);
            }
        }
    }

    /// The next message and its number, within this time. None: it is none of the library's, look again.
    fn receive(&self, limit: Duration) -> io::Result<Option<(u64, Message)>> {
        let limit = Timespec::try_from(limit).map_err(|_| ErrorKind::InvalidInput)?;
        let mut ends = [PollFd::new(&self.end, PollFlags::IN)];
        match poll(&mut ends, Some(&limit)) {
            Ok(0) => return Err(ErrorKind::TimedOut.into()),
            Err(Errno::INTR) => return Ok(None),
            polled => polled?,
        };
        let mut bytes = [0; abi::LONGEST];
        let Some((length, descriptors)) = receive(&self.end, &mut bytes)? else {
            return Ok(None);
        };
        let message = bytes.get(..length).and_then(<[u8]>::split_first_chunk);
        let answer = message.and_then(|(head, rest): (&Bytes, _)| Some((Answer::of(head)?, rest)));
        Ok(answer.map(|((number, answer), rest)| {
            let message = Message {
                answer,
                sizes: abi::sizes_in(rest).collect(),
                descriptors,
            };
            (number, message)
        }))
    }
}

/// What the library has answered.
struct Message {
    answer: Answer,
    sizes: Vec<u64>,
    descriptors: Vec<OwnedFd>,
}
