//! HTTP in the network of a node.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use firn_lab::GpuHost;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const LIMIT: Duration = Duration::from_secs(30);

/// Runs `work` on a thread that has the node's network. Sockets that it makes are the node's.
fn inside<T: Send + 'static>(host: &GpuHost, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    use std::os::fd::AsFd;
    let namespace = File::open(format!("/proc/{}/ns/net", host.node().pid()))?;
    let run = move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        work()
    };
    thread::spawn(run)
        .join()
        .map_err(|_| anyhow!("the thread has panicked"))?
}

/// Sends a request to a server of the node. Returns the answer as it is.
pub fn request(host: &GpuHost, to: SocketAddr, head: &str) -> Result<String> {
    let mut stream = inside(host, move || Ok(TcpStream::connect(to)?))?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(format!("{head}\r\nHost: {to}\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// What a collector got: the path, the type, the body.
#[derive(Clone, Debug)]
pub struct Received {
    pub path: String,
    pub kind: String,
    pub body: Vec<u8>,
}

/// A collector of traces by OTLP over HTTP on port 4318 of a node, which takes everything.
pub struct Collector(Arc<Mutex<Vec<Received>>>);

impl Collector {
    pub fn start(host: &GpuHost) -> Result<Self> {
        let listener = inside(host, || Ok(TcpListener::bind("127.0.0.1:4318")?))?;
        let received = Arc::new(Mutex::new(Vec::new()));
        let all = received.clone();
        // It ends with the suite.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let all = all.clone();
                thread::spawn(move || drop(serve(stream, &all)));
            }
        });
        Ok(Self(received))
    }

    pub fn received(&self) -> Vec<Received> {
        self.0.lock().expect("no thread panics").clone()
    }
}

/// Answers requests of one connection.
fn serve(stream: TcpStream, all: &Mutex<Vec<Received>>) -> Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    loop {
        let mut first = String::new();
        if reader.read_line(&mut first)? == 0 {
            return Ok(());
        }
        let path = first.split(' ').nth(1).context("no request")?.to_owned();
        let (mut length, mut kind) = (0, String::new());
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(':') else {
                break;
            };
            match &*name.to_lowercase() {
                "content-length" => length = value.trim().parse()?,
                "content-type" => value.trim().clone_into(&mut kind),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let is_json = kind == "application/json";
        all.lock()
            .expect("no thread panics")
            .push(Received { path, kind, body });
        let answer = if is_json { "{}" } else { "" };
        let length = answer.len();
        write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{answer}"
        )?;
    }
}
