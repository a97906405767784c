//! TCP connections in an image that was just made: those that a restored container is to find closed, and
//! those that had ended before the dump. CRIU restores neither without an option: a socket that was reset
//! still has the address of its peer.
//!
//! CRIU continues either all connections or none. So a closed connection is made a socket without one, with
//! both directions shut down, which is what `criu restore --tcp-close` makes of all: reads return the end of
//! the file, writes fail with EPIPE. Such an image needs no option at its restore. The data that was queued
//! in the connection is removed from the image. Where bytes had arrived, and then the end of what was sent,
//! the reader must not take the one for the other: only the other direction is shut down, and reads fail with
//! ENOTCONN.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use firn_host::ordered::set_of;
use firn_host::{UnlessAbsent, atomic_file};

use super::files::{INET_SOCKET, MAGIC, NAME};
use super::wire::{self, Message, WireError};
use super::{COMMON_MAGIC, INVENTORY_MAGIC, Image, ImageFault, each_message, messages, missing};

/// Fields of `inet_sk_entry`.
mod field {
    pub(super) const INODE: u32 = 2;
    pub(super) const PROTOCOL: u32 = 5;
    pub(super) const STATE: u32 = 6;
    pub(super) const LOCAL_PORT: u32 = 7;
    pub(super) const REMOTE_PORT: u32 = 8;
    pub(super) const LOCAL: u32 = 11;
    pub(super) const REMOTE: u32 = 12;
    pub(super) const NAMESPACE: u32 = 18;
    pub(super) const SHUTDOWN: u32 = 19;
}

const IPPROTO_TCP: u32 = 6;

/// Of the files with what a connection holds.
const STREAM_MAGIC: u32 = 0x5146_5506;

/// The state of a socket without a connection.
const TCP_CLOSE: u32 = 7;

/// States in which the other end has sent its end: CLOSE, CLOSE_WAIT, LAST_ACK and CLOSING.
const ENDED_BY_PEER: [u32; 4] = [TCP_CLOSE, 8, 9, 11];

/// What is shut down: the direction of writes, or both.
const SHUTDOWN_WRITES: u32 = 2;
const SHUTDOWN_BOTH: u32 = 3;

/// What an image holds of TCP connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    /// Ends of connections that a restored container continues.
    pub kept: usize,
    /// Sockets that it finds closed.
    pub closed: usize,
}

/// Which connections a restored container continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continued {
    /// Those of which both ends are in the image.
    Inside,
    None,
}

/// An end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct End {
    namespace: Option<u32>,
    local: SocketAddr,
    remote: SocketAddr,
}

impl End {
    fn other(self) -> Self {
        Self {
            local: self.remote,
            remote: self.local,
            ..self
        }
    }
}

/// Whether the image has an established TCP connection, which a restore has to be asked for.
pub fn has_connections(image: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(image)? {
        if entry?.file_name().as_encoded_bytes().starts_with(b"tcp-stream-") {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Closes the connections in the image at `dir`, which nobody else may write to, but those that are
/// continued. `read`: inodes of sockets of which all was read, if CRIU has not written down what they hold.
pub fn close_connections(
    dir: &Path,
    continued: Continued,
    read: Option<&BTreeSet<u64>>,
) -> Result<Connections, ImageFault> {
    let image = Image::open(dir)?;
    let bytes = image.bytes(NAME)?.ok_or_else(|| missing(NAME))?;
    let malformed = |error: WireError| ImageFault::malformed(NAME, error);
    let files = messages(NAME, MAGIC, &bytes)?;
    let ends = files
        .iter()
        .map(|file| socket(file))
        .collect::<Result<Vec<_>, _>>();
    let ends = ends.map_err(malformed)?;
    let live = ends.iter().flatten().filter(|socket| !socket.has_ended);
    let live = set_of(live.map(|socket| socket.end));
    let continues = |socket: &Socket| {
        continued == Continued::Inside && !socket.has_ended && live.contains(&socket.end.other())
    };
    let mut found = Connections::default();
    let (mut edited, mut is_edited) = (Vec::new(), false);
    for (file, end) in files.into_iter().zip(ends) {
        match end {
            None => edited.push(Cow::Borrowed(file)),
            Some(socket) if continues(&socket) => {
                found.kept += 1;
                edited.push(Cow::Borrowed(file));
            }
            Some(Socket {
                inode,
                has_ended,
                is_ended_by_peer,
                ..
            }) => {
                found.closed += usize::from(!has_ended);
                is_edited = true;
                let stream = format!("tcp-stream-{inode:x}.img");
                let is_unread = match read {
                    _ if !is_ended_by_peer => false,
                    None => received(dir, &stream)? > 0,
                    // Where both sides have ended it, nothing shows any more what it held.
                    Some(read) => !has_ended && !read.contains(&inode.into()),
                };
                let shutdown = if is_unread { SHUTDOWN_WRITES } else { SHUTDOWN_BOTH };
                empty(dir, &stream)?;
                edited.push(Cow::Owned(close(file, shutdown).map_err(malformed)?));
            }
        }
    }
    if is_edited {
        write(dir, NAME, MAGIC, &edited)?;
    }
    need_no_option(dir, &image)?;
    Ok(found)
}

/// How many bytes a connection had received that no process had read; none if CRIU has not written it down.
fn received(dir: &Path, name: &str) -> Result<u32, ImageFault> {
    /// Of its head: a few numbers.
    const MOST: u64 = 4096;
    const RECEIVED: u32 = 1;
    let unreadable = |source| ImageFault::unreadable(name, &source);
    let mut bytes = Vec::new();
    let file = match File::open(dir.join(name)).if_present().map_err(unreadable)? {
        Some(file) => file,
        None => return Ok(0),
    };
    file.take(MOST).read_to_end(&mut bytes).map_err(unreadable)?;
    // A second call has emptied it.
    if bytes.is_empty() {
        return Ok(0);
    }
    let head = each_message(name, STREAM_MAGIC, &bytes)?.next();
    let head = head.ok_or_else(|| ImageFault::malformed(name, "it has no head"))??;
    let received = Message::parse(head).and_then(|head| head.required(RECEIVED));
    received.map_err(|error| ImageFault::malformed(name, error))
}

/// Removes the content of a file, if it is there. The file stays: firn sees by a missing one that another
/// program clears the image.
fn empty(dir: &Path, name: &str) -> Result<(), ImageFault> {
    let emptied = File::options().write(true).truncate(true).open(dir.join(name));
    let emptied = emptied.map(drop).unless_absent();
    emptied.map_err(|source| ImageFault::unreadable(name, &source))
}

/// Removes the mark of a dump with `--tcp-close`, without which CRIU refuses a restore without that option.
fn need_no_option(dir: &Path, image: &Image) -> Result<(), ImageFault> {
    const NAME: &str = "inventory.img";
    const TCP_CLOSE: u32 = 10;
    let bytes = image.bytes(NAME)?.ok_or_else(|| missing(NAME))?;
    let unmarked = |message: &[u8]| wire::without(message, |field| field == TCP_CLOSE);
    let all = messages(NAME, INVENTORY_MAGIC, &bytes)?;
    let edited = all.iter().map(|message| unmarked(message));
    let edited = edited.collect::<Result<Vec<_>, _>>();
    let edited = edited.map_err(|error| ImageFault::malformed(NAME, error))?;
    if edited == all {
        Ok(())
    } else {
        write(dir, NAME, INVENTORY_MAGIC, &edited)
    }
}

pub(super) fn write(
    dir: &Path,
    name: &str,
    magic: u32,
    messages: &[impl AsRef<[u8]>],
) -> Result<(), ImageFault> {
    let common = (magic != INVENTORY_MAGIC).then(|| COMMON_MAGIC.to_le_bytes());
    let mut bytes: Vec<u8> = common.into_iter().flatten().chain(magic.to_le_bytes()).collect();
    for message in messages.iter().map(AsRef::as_ref) {
        bytes.extend(u32::try_from(message.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend_from_slice(message);
    }
    let written = atomic_file::write(dir, name, &bytes, 0o600);
    written.map_err(|source| ImageFault::unreadable(name, &source))
}

/// A TCP socket that has a peer.
struct Socket {
    end: End,
    inode: u32,
    /// Its connection has ended: it was reset, or both sides have closed it.
    has_ended: bool,
    /// The same, or its other end has closed it.
    is_ended_by_peer: bool,
}

/// The TCP socket with a peer that this open file is.
fn socket(file: &[u8]) -> Result<Option<Socket>, WireError> {
    let Some(socket) = Message::parse(file)?.message(INET_SOCKET)? else {
        return Ok(None);
    };
    // CRIU takes the same sockets for connections.
    if socket.required(field::PROTOCOL)? != IPPROTO_TCP || socket.required(field::REMOTE_PORT)? == 0 {
        return Ok(None);
    }
    let end = End {
        namespace: socket.number(field::NAMESPACE)?,
        local: address(&socket, field::LOCAL, field::LOCAL_PORT)?,
        remote: address(&socket, field::REMOTE, field::REMOTE_PORT)?,
    };
    Ok(Some(Socket {
        end,
        inode: socket.required(field::INODE)?,
        has_ended: socket.required(field::STATE)? == TCP_CLOSE,
        is_ended_by_peer: ENDED_BY_PEER.contains(&socket.required(field::STATE)?),
    }))
}

/// An IPv4 address in an IPv6 one is given as IPv4: its other end may be a socket of IPv4.
fn address(socket: &Message<'_>, address: u32, port: u32) -> Result<SocketAddr, WireError> {
    let words = socket.numbers(address)?;
    let bytes = words
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect::<Vec<u8>>();
    let unknown = |_| WireError { field: address };
    let ip = match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(bytes) => IpAddr::from(Ipv4Addr::from(bytes)),
        Err(_) => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..]).map_err(unknown)?)),
    };
    let number = u16::try_from(socket.required(port)?).map_err(|_| WireError { field: port })?;
    Ok(SocketAddr::new(ip.to_canonical(), number))
}

/// The same open file as a socket without a connection.
fn close(file: &[u8], shutdown: u32) -> Result<Vec<u8>, WireError> {
    use field::{LOCAL, LOCAL_PORT, REMOTE, REMOTE_PORT, SHUTDOWN, STATE};
    let message = Message::parse(file)?;
    let socket = message.bytes(INET_SOCKET)?.unwrap_or_default();
    let words = Message::parse(socket)?.numbers(LOCAL)?.len();
    let changed = [STATE, LOCAL_PORT, REMOTE_PORT, LOCAL, REMOTE, SHUTDOWN];
    let mut closed = wire::without(socket, |field| changed.contains(&field))?;
    for (field, number) in [
        (STATE, TCP_CLOSE),
        (LOCAL_PORT, 0),
        (REMOTE_PORT, 0),
        (SHUTDOWN, shutdown),
    ] {
        wire::push_number(&mut closed, field, number.into());
    }
    for _ in 0..words {
        wire::push_number(&mut closed, LOCAL, 0);
        wire::push_number(&mut closed, REMOTE, 0);
    }
    let mut file = wire::without(file, |field| field == INET_SOCKET)?;
    wire::push_bytes(&mut file, INET_SOCKET, &closed);
    Ok(file)
}

#[cfg(test)]
mod tests;
