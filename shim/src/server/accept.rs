//! Connections from the listener, those of other users refused.

use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::time::Duration;

use async_stream::stream;
use nix::unistd::Uid;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;
use ttrpc::r#async::transport::Listener;

/// How long to wait after a failed accept (out of descriptors), which would otherwise fail again at once.
const PAUSE: Duration = Duration::from_millis(100);

/// The listener as the RPC library takes it, for clients that run as `user`.
pub(super) fn listener(listener: StdListener, user: Uid) -> io::Result<Listener> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    Ok(Listener::new(Box::pin(stream! {
        loop {
            match listener.accept().await {
                Ok((stream, _)) if is_user(&stream, user) => yield io::Result::Ok(stream),
                Ok(_) => {}
                Err(error) => {
                    log::warn!("cannot accept a connection: {error}");
                    sleep(PAUSE).await;
                }
            }
        }
    })))
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
