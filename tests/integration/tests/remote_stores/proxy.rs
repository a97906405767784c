//! A proxy in front of an object store that answers wrong, late or not at all, and notes every request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

/// Requests that go wrong.
#[derive(Clone, Copy)]
pub struct Fault {
    pub method: &'static str,
    /// A part of the path.
    pub path: &'static str,
    /// So many of these requests go well before.
    pub after: usize,
    /// So many go wrong.
    pub times: usize,
    pub how: How,
}

#[derive(Clone, Copy)]
pub enum How {
    /// Answered with 500 without reaching the object store.
    Error,
    /// Late.
    Slow(Duration),
    /// The connection ends in the middle of the answer; a request that brings something does not arrive.
    Cut,
    /// The last byte of the answer is another one.
    Damage,
}

/// Always.
pub const EVER: usize = usize::MAX;

#[derive(Default)]
struct State {
    fault: Option<Fault>,
    /// Method and path of what has arrived, and whether it went well.
    requests: Vec<(String, String, bool)>,
}

#[derive(Clone)]
pub struct Proxy {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Proxy {
    /// In front of the server at `to`. It ends with the program.
    pub fn start(to: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let proxy = Self {
            address: listener.local_addr()?,
            state: Arc::default(),
        };
        let own = proxy.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let proxy = own.clone();
                // A client that goes away in the middle is no failure of the proxy.
                thread::spawn(move || drop(proxy.serve(&client, to)));
            }
        });
        Ok(proxy)
    }

    /// From now on; what was noted is forgotten.
    pub fn set(&self, fault: Option<Fault>) {
        *self.state() = State {
            fault,
            requests: Vec::new(),
        };
    }

    /// The paths of requests of this method that went well, in their order.
    pub fn done(&self, method: &str) -> Vec<String> {
        let state = self.state();
        let done = state
            .requests
            .iter()
            .filter(|(of, _, good)| of == method && *good);
        done.map(|(_, path, _)| path.clone()).collect()
    }

    /// How many requests went wrong.
    pub fn failed(&self) -> usize {
        self.state().requests.iter().filter(|(.., good)| !good).count()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request; returns what goes wrong with it.
    fn note(&self, method: &str, path: &str) -> Option<How> {
        let mut state = self.state();
        let fault = state.fault.as_mut();
        let fault = fault.filter(|fault| fault.method == method && path.contains(fault.path));
        let how = fault.and_then(|fault| match (fault.after, fault.times) {
            (0, 0) => None,
            (0, times) => {
                fault.times = if times == EVER { EVER } else { times - 1 };
                Some(fault.how)
            }
            (after, _) => {
                fault.after = after - 1;
                None
            }
        });
        let good = matches!(how, None | Some(How::Slow(_)));
        state.requests.push((method.to_owned(), path.to_owned(), good));
        how
    }

    /// One request of a connection, which then ends.
    fn serve(&self, mut client: &TcpStream, to: SocketAddr) -> Result<()> {
        let mut reader = BufReader::new(client);
        let head = head(&mut reader)?;
        let mut words = head.split(' ');
        let (method, path) = (
            words.next().context("no method")?,
            words.next().context("no path")?,
        );
        let mut body = vec![0; length(&head)];
        reader.read_exact(&mut body)?;
        let how = self.note(method, path);
        match how {
            Some(How::Error) => {
                client.write_all(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
                return Ok(());
            }
            Some(How::Cut) if method == "PUT" => return Ok(client.shutdown(Shutdown::Both)?),
            Some(How::Slow(time)) => thread::sleep(time),
            _ => {}
        }
        let mut server = TcpStream::connect(to)?;
        let head = head.replacen("\r\n", "\r\nConnection: close\r\n", 1);
        server.write_all(head.as_bytes())?;
        server.write_all(&body)?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        match (how, answer.last_mut()) {
            (Some(How::Damage), Some(last)) => *last ^= 1,
            (Some(How::Cut), _) => answer.truncate(answer.len() - answer.len() / 3),
            _ => {}
        }
        Ok(client.write_all(&answer)?)
    }
}

/// Everything before the body.
fn head(reader: &mut impl BufRead) -> Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        let read = reader.read_line(&mut head)?;
        anyhow::ensure!(read > 0, "the client has gone");
    }
    Ok(head)
}

fn length(head: &str) -> usize {
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    let mut lengths = lines.filter(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    lengths
        .next()
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}
