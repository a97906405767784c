//! `unix-talk`: both ends of a connection over a Unix socket, which write into a file how it continues.
//!
//! A client sends twenty times a second, and writes `x` for each answer of a stream, and for each datagram
//! that it could send. When that fails, it writes why and waits for ever.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use clap::{Parser, ValueEnum};

/// Time between two messages.
const PACE: Duration = Duration::from_millis(50);

#[derive(Parser)]
#[command(name = "unix-talk", version)]
struct Options {
    role: Role,
    /// The address of the server; a pair has none
    address: PathBuf,
    /// The file to write to
    out: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Role {
    /// Accept clients, and return what they send
    Serve,
    /// Be a server that accepts nobody
    Listen,
    /// Talk to a server
    Talk,
    /// Send one message to a server, and read only once /go exists
    Late,
    /// Both ends of a socket pair
    Pair,
    /// Receive datagrams
    Receive,
    /// Send datagrams to a receiver
    Send,
}

fn main() -> io::Result<()> {
    let Options { role, address, out } = Options::parse();
    let out = File::options().create(true).append(true).open(out)?;
    match role {
        Role::Serve => serve(&address),
        Role::Listen => {
            let _listener = UnixListener::bind(address)?;
            end(Ok(()), &out)
        }
        Role::Talk => end(talk(UnixStream::connect(address)?, &out), &out),
        Role::Late => end(late(UnixStream::connect(address)?, &out), &out),
        Role::Pair => {
            let (one, other) = UnixStream::pair()?;
            thread::spawn(move || echo(other));
            end(talk(one, &out), &out)
        }
        Role::Receive => receive(&address, &out),
        Role::Send => {
            let socket = UnixDatagram::unbound()?;
            socket.connect(&address)?;
            end(send(&socket, &out), &out)
        }
    }
}

fn serve(address: &Path) -> io::Result<()> {
    for client in UnixListener::bind(address)?.incoming() {
        let client = client?;
        thread::spawn(move || echo(client));
    }
    Ok(())
}

fn echo(mut client: UnixStream) -> io::Result<u64> {
    io::copy(&mut client.try_clone()?, &mut client)
}

fn talk(mut stream: UnixStream, mut out: &File) -> io::Result<()> {
    loop {
        let written = stream.write_all(b"x");
        // What has arrived can be read also if nothing can be written any more.
        if stream.read(&mut [0])? == 0 {
            out.write_all(b"\nend of file\n")?;
            return written.and_then(|()| stream.write_all(b"x"));
        }
        out.write_all(b"x")?;
        thread::sleep(PACE);
    }
}

fn late(mut stream: UnixStream, mut out: &File) -> io::Result<()> {
    stream.write_all(b"x")?;
    while !Path::new("/go").exists() {
        thread::sleep(PACE);
    }
    io::copy(&mut stream, &mut out)?;
    out.write_all(b"\nend of file\n")
}

fn receive(address: &Path, mut out: &File) -> io::Result<()> {
    let socket = UnixDatagram::bind(address)?;
    loop {
        socket.recv(&mut [0])?;
        out.write_all(b"x")?;
    }
}

fn send(socket: &UnixDatagram, mut out: &File) -> io::Result<()> {
    loop {
        socket.send(b"x")?;
        out.write_all(b"x")?;
        thread::sleep(PACE);
    }
}

/// Writes how it ended, and waits.
fn end(ended: io::Result<()>, mut out: &File) -> io::Result<()> {
    if let Err(error) = ended {
        writeln!(out, "closed: {error}")?;
    }
    loop {
        thread::park();
    }
}
