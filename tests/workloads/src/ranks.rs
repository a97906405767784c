//! The ranks of `--ranks`: processes that compute on a GPU each and report every iteration to each other over
//! TCP, as the ranks of a training do.
//!
//! Rank 0 listens where `MASTER_ADDR` and `MASTER_PORT` set; the others connect to it once. Nobody connects
//! again: a connection that breaks ends its rank, and with it the job.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use firn_workloads::driver::Driver;

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

/// What the ranks sum up on their GPUs: a rank's GPU has done its part when all ranks have started theirs.
///
/// The ranks report what they have started to rank 0, which reports to all what all have started. Threads of
/// their own do that, as in NCCL: they continue while their process is locked.
pub struct Sums {
    rank: usize,
    started: u32,
    /// How many all have started; what the GPU waits for.
    all: &'static AtomicU32,
    /// To rank 0; of rank 0 what counts for all.
    hub: Hub,
}

enum Hub {
    There(TcpStream),
    Here(Arc<Counts>),
}

/// What each rank has started, as rank 0 counts it.
struct Counts {
    started: Mutex<Vec<u32>>,
    all: &'static AtomicU32,
    peers: Vec<TcpStream>,
}

impl Counts {
    fn report(&self, rank: usize, count: u32) -> Result<()> {
        let mut started = self
            .started
            .lock()
            .map_err(|_| anyhow!("another rank has failed"))?;
        started[rank] = count;
        let all = started.iter().copied().min().unwrap_or_default();
        if self.all.swap(all, Ordering::Release) != all {
            for mut peer in &self.peers {
                peer.write_all(&all.to_le_bytes())?;
            }
        }
        Ok(())
    }
}

fn received(mut peer: &TcpStream) -> Result<u32> {
    let mut bytes = [0; 4];
    peer.read_exact(&mut bytes)
        .context("the connection to another rank has broken")?;
    Ok(u32::from_le_bytes(bytes))
}

impl Sums {
    /// Starts the threads of a rank; one that fails ends the process.
    pub fn start(ranks: Ranks) -> Result<Self> {
        let all: &'static AtomicU32 = Box::leak(Box::default());
        let rank = ranks.rank;
        let hub = if rank == 0 {
            let counts = Arc::new(Counts {
                started: Mutex::new(vec![0; ranks.peers.len() + 1]),
                all,
                peers: ranks.peers,
            });
            for place in 0..counts.peers.len() {
                let counts = Arc::clone(&counts);
                until_it_fails(move || counts.report(place + 1, received(&counts.peers[place])?));
            }
            Hub::Here(counts)
        } else {
            let peer = ranks.peers.into_iter().next().context("no rank 0")?;
            let from = peer.try_clone().context("cannot keep the connection")?;
            until_it_fails(move || {
                all.store(received(&from)?, Ordering::Release);
                Ok(())
            });
            Hub::There(peer)
        };
        Ok(Self {
            rank,
            started: 0,
            all,
            hub,
        })
    }

    /// Starts the next sum.
    pub fn start_one(&mut self, driver: &Driver) -> Result<()> {
        self.started += 1;
        driver.wait_on_gpu(self.all, self.started)?;
        match &mut self.hub {
            Hub::Here(counts) => counts.report(self.rank, self.started),
            Hub::There(peer) => Ok(peer.write_all(&self.started.to_le_bytes())?),
        }
    }
}

fn until_it_fails(turn: impl Fn() -> Result<()> + Send + 'static) {
    thread::spawn(move || {
        loop {
            if let Err(error) = turn() {
                eprintln!("gpu-counter: {error:#}");
                std::process::abort();
            }
        }
    });
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
