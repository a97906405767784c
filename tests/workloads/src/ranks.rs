//! The ranks of `--ranks`: processes that compute on a GPU each and report every iteration to each other over
//! TCP, as the ranks of a training do.
//!
//! Rank 0 listens where `MASTER_ADDR` and `MASTER_PORT` set; the others connect to it once. Nobody connects
//! again: a connection that breaks ends its rank, and with it the job.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// How long the other ranks may take to start.
const START: Duration = Duration::from_secs(60);

/// The connections of one rank.
pub struct Ranks {
    rank: usize,
    peers: Vec<TcpStream>,
}

impl Ranks {
    /// Joins the job as this rank of so many.
    pub fn join(rank: usize, count: usize) -> Result<Self> {
        let master = address();
        let peers = match rank {
            0 => {
                let listener =
                    TcpListener::bind(&master).with_context(|| format!("cannot listen on {master}"))?;
                (1..count)
                    .map(|_| Ok(listener.accept()?.0))
                    .collect::<Result<_>>()
                    .context("cannot accept the other ranks")?
            }
            _ => vec![connect(&master)?],
        };
        Ok(Self { rank, peers })
    }

    /// Makes sure that all ranks are at the same iteration.
    pub fn agree(&mut self, iteration: u32) -> Result<()> {
        let reported = |peer: &mut TcpStream| {
            let mut bytes = [0; 4];
            peer.read_exact(&mut bytes)
                .context("the connection to another rank has broken")?;
            let other = u32::from_le_bytes(bytes);
            ensure!(
                other == iteration,
                "another rank is at iteration {other}, this one at {iteration}"
            );
            Ok(())
        };
        let report = |peer: &mut TcpStream| {
            peer.write_all(&iteration.to_le_bytes())
                .context("the connection to another rank has broken")
        };
        // Rank 0 answers when all are there: nobody runs ahead.
        if self.rank == 0 {
            self.peers.iter_mut().try_for_each(reported)?;
            self.peers.iter_mut().try_for_each(report)
        } else {
            self.peers.iter_mut().try_for_each(report)?;
            self.peers.iter_mut().try_for_each(reported)
        }
    }
}

fn address() -> String {
    let variable = |name, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    format!(
        "{}:{}",
        variable("MASTER_ADDR", "127.0.0.1"),
        variable("MASTER_PORT", "29500")
    )
}

fn connect(master: &str) -> Result<TcpStream> {
    let begun = Instant::now();
    loop {
        match TcpStream::connect(master) {
            Ok(stream) => return Ok(stream),
            Err(error) if begun.elapsed() > START => {
                return Err(error).with_context(|| format!("cannot connect to {master}"));
            }
            // Rank 0 does not listen yet, and nothing shows when it does.
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}
