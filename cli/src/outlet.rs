//! A writer on a thread of its own. What it writes to may not answer for ever, and whoever waits for it can
//! be interrupted and has a limit; the thread is left behind then, and ends with the program.

use std::io::{self, ErrorKind, Write};
use std::thread;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

/// How many pieces may wait to be written.
const QUEUE: usize = 4;

pub struct Outlet {
    pieces: mpsc::Sender<Vec<u8>>,
    written: oneshot::Receiver<io::Result<()>>,
    limit: Duration,
}

impl Outlet {
    /// Writes to `to`, which has this long to take a piece, and to end. After the last piece it does `end`.
    pub fn new<W: Write + Send + 'static>(
        mut to: W,
        limit: Duration,
        end: impl FnOnce(W) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (pieces, mut queue) = mpsc::channel::<Vec<u8>>(QUEUE);
        let (ended, written) = oneshot::channel();
        thread::Builder::new().name("outlet".to_owned()).spawn(move || {
            let done = || {
                while let Some(piece) = queue.blocking_recv() {
                    to.write_all(&piece)?;
                }
                to.flush()?;
                end(to)
            };
            let _dropped = ended.send(done());
        })?;
        Ok(Self {
            pieces,
            written,
            limit,
        })
    }

    /// Fails with the error of what was written before, too.
    pub async fn write(&mut self, piece: Vec<u8>) -> io::Result<()> {
        match timeout(self.limit, self.pieces.send(piece)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_ended)) => Err(match (&mut self.written).await {
                Ok(Err(error)) => error,
                Ok(Ok(())) | Err(_) => ErrorKind::BrokenPipe.into(),
            }),
            Err(_late) => Err(late(self.limit)),
        }
    }

    /// Waits until all of it is written.
    pub async fn end(self) -> io::Result<()> {
        drop(self.pieces);
        match timeout(self.limit, self.written).await {
            Ok(ended) => ended.unwrap_or_else(|_| Err(ErrorKind::BrokenPipe.into())),
            Err(_late) => Err(late(self.limit)),
        }
    }
}

fn late(limit: Duration) -> io::Error {
    let message = format!("nothing was accepted for {} s", limit.as_secs());
    io::Error::new(ErrorKind::TimedOut, message)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Instant;

    use super::*;
    use crate::containerd::block_on;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn all_pieces_arrive_in_their_order_before_the_end() {
        let (mut from, to) = io::pipe().unwrap();
        let read = thread::spawn(move || {
            let mut text = String::new();
            from.read_to_string(&mut text).map(|_| text)
        });
        let written = block_on(async {
            let mut outlet = Outlet::new(to, LONG, |mut to| to.write_all(b"end"))?;
            for piece in 0..100 {
                outlet.write(format!("{piece} ").into_bytes()).await?;
            }
            outlet.end().await
        });
        written.unwrap().unwrap();
        let expected: String = (0..100).map(|piece| format!("{piece} ")).collect();
        assert_eq!(read.join().unwrap().unwrap(), expected + "end");
    }

    #[test]
    fn what_does_not_read_is_waited_for_no_longer_than_the_limit() {
        let (from, to) = io::pipe().unwrap();
        let (begun, limit) = (Instant::now(), Duration::from_millis(200));
        let written = block_on(async {
            let mut outlet = Outlet::new(to, limit, |_| Ok(()))?;
            loop {
                outlet.write(vec![0; 1 << 20]).await?;
            }
            #[expect(unreachable_code, reason = "the type of the block")]
            Ok::<(), io::Error>(())
        });
        assert_eq!(written.unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(begun.elapsed() < LONG);
        drop(from);
    }

    #[test]
    fn an_end_that_does_not_come_is_waited_for_no_longer_than_the_limit() {
        let (from, to) = io::pipe().unwrap();
        let limit = Duration::from_millis(200);
        let written = block_on(async {
            let mut outlet = Outlet::new(to, limit, |_| Ok(()))?;
            outlet.write(vec![0; 1 << 20]).await?;
            outlet.end().await
        });
        assert_eq!(written.unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        drop(from);
    }

    #[test]
    fn the_error_of_the_writer_is_the_error_of_a_later_piece() {
        let (from, to) = io::pipe().unwrap();
        drop(from);
        let written = block_on(async {
            let mut outlet = Outlet::new(to, LONG, |_| Ok(()))?;
            loop {
                outlet.write(vec![0; 1 << 20]).await?;
            }
            #[expect(unreachable_code, reason = "the type of the block")]
            Ok::<(), io::Error>(())
        });
        assert_eq!(written.unwrap().unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
