//! Unix sockets in an image that was just made which were connected to a process outside: a restored
//! container finds them closed.
//!
//! firn's plugin lets CRIU dump such a socket and its other end, which would be connected again by a plugin.
//! Both are made what CRIU writes for a socket whose peer has closed it, so that every restore takes the
//! image: a stream can be read to the end of what had arrived, and then returns the end of the file; a write
//! fails with EPIPE. A datagram socket has no peer any more, and can be connected again.

use std::borrow::Cow;
use std::path::Path;

use firn_host::ordered::set_of;

use super::connections::write;
use super::files::{MAGIC, NAME, UNIX_SOCKET};
use super::wire::{self, Message, WireError};
use super::{Image, ImageFault, messages, missing};

/// Fields of `unix_sk_entry`.
mod field {
    pub(super) const INODE: u32 = 2;
    pub(super) const TYPE: u32 = 3;
    pub(super) const STATE: u32 = 4;
    pub(super) const FLAGS_OF_CRIU: u32 = 6;
    pub(super) const PEER: u32 = 8;
    pub(super) const SHUTDOWN: u32 = 12;
}

/// Among CRIU's flags: the socket is the other end, of which nothing else is in the image.
const EXTERNAL: u32 = 1;

/// A plugin has let CRIU dump it.
const BY_PLUGIN: u32 = 4;

const DATAGRAM: u32 = 2;

/// States, as of TCP sockets.
const ESTABLISHED: u32 = 1;
const CLOSE: u32 = 7;

/// Both directions are shut down.
const SHUTDOWN_BOTH: u32 = 3;

/// A Unix socket of the image.
struct Socket {
    inode: u32,
    flags: u32,
    peer: u32,
}

/// Closes the sockets that firn's plugin has let CRIU dump into the image at `dir`, which nobody else may
/// write to.
pub fn close_unix_sockets(dir: &Path) -> Result<(), ImageFault> {
    let image = Image::open(dir)?;
    let bytes = image.bytes(NAME)?.ok_or_else(|| missing(NAME))?;
    let malformed = |error: WireError| ImageFault::malformed(NAME, error);
    let files = messages(NAME, MAGIC, &bytes)?;
    let sockets = files.iter().map(|file| socket(file));
    let sockets = sockets.collect::<Result<Vec<_>, _>>().map_err(malformed)?;
    let is_closed = |socket: &&Socket| socket.flags & BY_PLUGIN != 0;
    let peers_of = |closed: bool| {
        let all = sockets.iter().flatten();
        set_of(
            all.filter(|socket| is_closed(socket) == closed)
                .map(|socket| socket.peer),
        )
    };
    // CRIU itself connects some sockets again to their other ends.
    let (dropped, needed) = (peers_of(true), peers_of(false));
    let mut edited = Vec::new();
    for (file, socket) in files.iter().zip(&sockets) {
        match socket {
            Some(socket) if is_closed(&socket) => {
                edited.push(Cow::Owned(close(file).map_err(malformed)?));
            }
            Some(Socket { inode, flags, .. })
                if flags & EXTERNAL != 0 && dropped.contains(inode) && !needed.contains(inode) => {}
            _ => edited.push(Cow::Borrowed(*file)),
        }
    }
    if sockets.iter().flatten().any(|socket| is_closed(&socket)) {
        write(dir, NAME, MAGIC, &edited)
    } else {
        Ok(())
    }
}

/// The Unix socket that this open file is.
fn socket(file: &[u8]) -> Result<Option<Socket>, WireError> {
    let Some(socket) = Message::parse(file)?.message(UNIX_SOCKET)? else {
        return Ok(None);
    };
    Ok(Some(Socket {
        inode: socket.required(field::INODE)?,
        flags: socket.required(field::FLAGS_OF_CRIU)?,
        peer: socket.required(field::PEER)?,
    }))
}

/// The same open file as a socket whose peer has gone.
fn close(file: &[u8]) -> Result<Vec<u8>, WireError> {
    use field::{FLAGS_OF_CRIU, PEER, SHUTDOWN, STATE, TYPE};
    let socket = Message::parse(file)?.bytes(UNIX_SOCKET)?.unwrap_or_default();
    let is_datagram = Message::parse(socket)?.required(TYPE)? == DATAGRAM;
    let changed = |field| match field {
        STATE | FLAGS_OF_CRIU | PEER => true,
        SHUTDOWN => !is_datagram,
        _ => false,
    };
    let mut closed = wire::without(socket, changed)?;
    let state = if is_datagram { CLOSE } else { ESTABLISHED };
    for (field, number) in [(STATE, state), (FLAGS_OF_CRIU, 0), (PEER, 0)] {
        wire::push_number(&mut closed, field, number.into());
    }
    if !is_datagram {
        wire::push_number(&mut closed, SHUTDOWN, SHUTDOWN_BOTH.into());
    }
    let mut file = wire::without(file, |field| field == UNIX_SOCKET)?;
    wire::push_bytes(&mut file, UNIX_SOCKET, &closed);
    Ok(file)
}

#[cfg(test)]
mod tests;
