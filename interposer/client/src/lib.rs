//! Firn's side of the interposer: finds the library in a process, and asks it.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_host::{FileId, proc_maps};
use firn_interposer::abi::{Answer, Beacon, Bytes, Reach, Request};
use object::{Object, ObjectSymbol};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_peercred, socket_type};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// The symbol by which the library keeps the address of its area.
const AREA: &str = "firn_cuda_area";

/// How long an answer takes at most, apart from what the request waits for.
const LIMIT: Duration = Duration::from_secs(2);

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
    end: OwnedFd,
    number: u64,
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

    /// The process, if it has this file of the library and shows that it can be asked.
    ///
    /// # Errors
    /// The process cannot be read, as when it has ended.
    pub fn process(&self, pid: Pid) -> io::Result<Option<Process>> {
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
        let Some(reach) = Reach::of(&beacon) else {
            return Ok(None);
        };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let Ok(end) = i32::try_from(reach.end) else {
            return Ok(None);
        };
        match pidfd_getfd(process, end, PidfdGetfdFlags::empty()) {
            Ok(end) if is_pair(&end, pid)? => Ok(Some(Process {
                reach,
                end,
                number: 0,
            })),
            // The program has closed it; it may have something else by this number.
            Ok(_) | Err(Errno::BADF) => Ok(None),
            Err(error) => Err(error.into()),
        }
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
    /// Asks the library.
    ///
    /// # Errors
    /// It does not answer in time, or has gone.
    pub fn ask(&mut self, request: Request) -> io::Result<Answer> {
        let waits = match request {
            Request::Shut { wait } => Duration::from_millis(wait.into()),
            Request::Hello | Request::Open => Duration::ZERO,
        };
        self.number = self.number.wrapping_add(1);
        send(
            &self.end,
            &request.to_bytes(self.number),
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )?;
        // It looks at the gate so often, which takes longer than what it sleeps between.
        let end = Instant::now() + LIMIT + waits * 3;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if let Some((number, answer)) = Answer::of(&self.received(left)?)
                && number == self.number
            {
                return Ok(answer);
            }
        }
    }

    /// The next message, within this time.
    fn received(&self, limit: Duration) -> io::Result<Bytes> {
        let limit = Timespec::try_from(limit).map_err(|_| ErrorKind::InvalidInput)?;
        let mut ends = [PollFd::new(&self.end, PollFlags::IN)];
        if poll(&mut ends, Some(&limit))? == 0 {
            return Err(ErrorKind::TimedOut.into());
        }
        let mut bytes = [0; 64];
        let (_, length) = recv(&self.end, &mut bytes, RecvFlags::DONTWAIT)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }
}
