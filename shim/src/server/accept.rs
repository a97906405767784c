//! Connections from the listener, those of other users refused.

use std::future::Future;
use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use nix::unistd::Uid;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Sleep, sleep};
use ttrpc::r#async::transport::Listener;

/// How long to wait after a failed accept (out of descriptors), which would otherwise fail again at once.
const PAUSE: Duration = Duration::from_millis(100);

/// The listener as the RPC library takes it, for clients that run as `user`.
pub(super) fn listener(listener: StdListener, user: Uid) -> io::Result<Listener> {
    listener.set_nonblocking(true)?;
    Ok(Listener::new(SameUser {
        listener: UnixListener::from_std(listener)?,
        user,
        pause: None,
    }))
}

struct SameUser {
    listener: UnixListener,
    user: Uid,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Stream for SameUser {
    type Item = io::Result<UnixStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok((stream, _)) if is_user(&stream, self.user) => return Poll::Ready(Some(Ok(stream))),
                Ok(_) => {}
                Err(error) => {
                    log::warn!("cannot accept a connection: {error}");
                    self.pause = Some(Box::pin(sleep(PAUSE)));
                }
            }
        }
    }
}

fn is_user(stream: &UnixStream, user: Uid) -> bool {
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == user.as_raw() => true,
        Ok(peer) => {
            log::warn!("refused a connection from user {}", peer.uid());
            false
        }
        Err(error) => {
            log::warn!("refused a connection: cannot read its user: {error}");
            false
        }
    }
}
