//! Open descriptors in messages, over a socket that keeps the borders of messages.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors of one message at most.
pub const MOST: usize = 64;

const SPACE: usize = rustix::cmsg_space!(ScmRights(MOST));

/// Sends a message with descriptors, without waiting.
///
/// # Errors
/// There are more than [`MOST`], there is no room for the message, or the other end has gone.
pub fn send<T: AsFd>(socket: impl AsFd, bytes: &[u8], with: &[T]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = with.iter().map(AsFd::as_fd).collect();
    let rights = SendAncillaryMessage::ScmRights(&descriptors);
    if !with.is_empty() && (with.len() > MOST || !control.push(rights)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

/// Takes the next message, which is cut to the length of `bytes`, without waiting. Returns its length and its
/// descriptors, which are closed on exec. None: there is no message.
///
/// # Errors
/// The other end has gone ([`ErrorKind::UnexpectedEof`]), or this process has no room for all descriptors
/// ([`ErrorKind::QuotaExceeded`]): then none of them stays open.
pub fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags);
    let received = match received {
        Err(Errno::INTR | Errno::AGAIN) => return Ok(None),
        received => received?,
    };
    if received.bytes == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = rights.flatten().collect();
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(ErrorKind::QuotaExceeded.into());
    }
    Ok(Some((received.bytes, descriptors)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    #[test]
    fn descriptors_arrive_with_their_message() {
        let (near, far) = pair();
        let file = tempfile::tempdir().unwrap();
        let path = file.path().join("file");
        std::fs::write(&path, "text").unwrap();
        let opened: Vec<File> = (0..MOST).map(|_| File::open(&path).unwrap()).collect();
        let mut bytes = [0; 8];
        assert!(receive(&far, &mut bytes).unwrap().is_none());
        send(&near, b"all", &opened).unwrap();
        send(&near, b"none", &[] as &[File]).unwrap();
        let (length, descriptors) = receive(&far, &mut bytes).unwrap().unwrap();
        assert_eq!((&bytes[..length], descriptors.len()), (&b"all"[..], MOST));
        let mut text = String::new();
        let last = descriptors.into_iter().next_back().unwrap();
        File::from(last).read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        let (length, descriptors) = receive(&far, &mut bytes).unwrap().unwrap();
        assert_eq!((&bytes[..length], descriptors.len()), (&b"none"[..], 0));
        drop(near);
        let gone = receive(&far, &mut bytes).unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_message_has_so_many_descriptors_at_most() {
        let (near, _far) = pair();
        let file = tempfile::tempfile().unwrap();
        let many: Vec<File> = (0..=MOST).map(|_| file.try_clone().unwrap()).collect();
        let refused = send(&near, b"many", &many).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    }
}
