use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};

use super::*;
use crate::fixtures::unix_socket;

/// A child that has one of this process's sockets as its standard input, and nothing else of it.
struct Sleep(Child);

impl Sleep {
    fn with(socket: impl Into<std::os::fd::OwnedFd>) -> Self {
        let stdin = Stdio::from(socket.into());
        let mut command = Command::new("sleep");
        command.arg("1000").stdin(stdin);
        Self(
            command
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        )
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let _killed = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn shown(dumped: &[i32]) -> Vec<String> {
    let found = inspect(Path::new("/proc"), dumped).unwrap();
    found.iter().map(ToString::to_string).collect()
}

#[test]
fn a_socket_leads_outside_if_no_dumped_process_has_the_other_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let client = Sleep::with(UnixStream::connect(&path).unwrap());
    let pid = client.pid();
    let path = path.display();
    let expected = format!("process {pid} (sleep), descriptor 0: stream from an unnamed socket to {path}");
    assert_eq!(shown(&[pid]), [format!("{expected}, not accepted yet")]);
    let (accepted, _) = listener.accept().unwrap();
    assert_eq!(shown(&[pid]), [expected]);
    let server = Sleep::with(accepted);
    let of_server = format!(
        "process {} (sleep), descriptor 0: stream from {path} to an unnamed socket",
        server.pid()
    );
    assert_eq!(shown(&[server.pid()]), [of_server]);
    assert_eq!(shown(&[pid, server.pid()]), [""; 0]);
    drop(server);
    assert_eq!(shown(&[pid]), [""; 0], "a connection that has ended");
}

#[test]
fn a_connection_that_waits_for_a_server_inside_is_inside() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = Sleep::with(UnixListener::bind(&path).unwrap());
    let client = Sleep::with(UnixStream::connect(&path).unwrap());
    assert_eq!(shown(&[client.pid(), server.pid()]), [""; 0]);
    assert_eq!(shown(&[client.pid()]).len(), 1);
}

#[test]
fn a_connection_with_bytes_for_a_server_that_accepts_none_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    let (server, client) = (
        Sleep::with(listener.try_clone().unwrap()),
        Sleep::with(stream.try_clone().unwrap()),
    );
    let named = |pids: &[i32]| waiting(Path::new("/proc"), pids).unwrap();
    let both = [server.pid(), client.pid()];
    assert_eq!(named(&both).len(), 0, "there are no bytes in it");
    stream.write_all(b"x").unwrap();
    let found = named(&both);
    let [
        Refusal::Object {
            pid,
            object: Object::UnixConnection,
            at,
            ..
        },
    ] = &found[..]
    else {
        panic!("{found:?}");
    };
    assert_eq!((*pid, &**at), (client.pid(), "descriptor 0"));
    assert_eq!(named(&both[1..]).len(), 0, "the server is outside");
    let _accepted = listener.accept().unwrap();
    assert_eq!(named(&both).len(), 0);
    drop(UnixStream::connect(&path).unwrap());
    let found = named(&both);
    assert!(
        matches!(found[..], [Refusal::Object { pid, .. }] if pid == server.pid()),
        "{found:?}"
    );
}

#[test]
fn a_datagram_socket_leads_outside_once_it_is_connected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let _log = UnixDatagram::bind(&path).unwrap();
    let socket = UnixDatagram::unbound().unwrap();
    let client = Sleep::with(socket.try_clone().unwrap());
    assert_eq!(shown(&[client.pid()]), [""; 0]);
    socket.connect(&path).unwrap();
    let (pid, path) = (client.pid(), path.display());
    let expected = format!("process {pid} (sleep), descriptor 0: datagram from an unnamed socket to {path}");
    assert_eq!(shown(&[pid]), [expected]);
}

/// What this does in a network namespace of its own; none for who may not make one.
fn elsewhere<T: Send>(make: impl FnOnce() -> T + Send) -> Option<T> {
    let entered = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .ok()
            .map(|()| make())
    };
    std::thread::scope(|scope| scope.spawn(entered).join().unwrap())
}

#[test]
fn a_client_or_a_server_in_another_network_namespace_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let (stream, log) = (dir.path().join("s"), dir.path().join("log"));
    let listener = UnixListener::bind(&stream).unwrap();
    let Some((client, _log)) = elsewhere(|| (UnixStream::connect(&stream), UnixDatagram::bind(&log))) else {
        return;
    };
    let (_client, server) = (client.unwrap(), Sleep::with(listener.accept().unwrap().0));
    let socket = UnixDatagram::unbound().unwrap();
    socket.connect(&log).unwrap();
    let logger = Sleep::with(socket);
    let of = |pid| inspect(Path::new("/proc"), &[pid]).unwrap().remove(0);
    let (server, logger) = (of(server.pid()), of(logger.pid()));
    assert_eq!((server.kind, server.other_end), (Kind::Stream, OtherEnd::Client));
    assert!(matches!(logger.other_end, OtherEnd::Hidden(_)) && logger.can_be_closed());
    let text = format!("to {} of another network namespace", log.display());
    assert!(logger.to_string().ends_with(&text), "{logger}");
    let pair = elsewhere(|| UnixStream::pair().unwrap()).unwrap();
    let inherited = Sleep::with(pair.0);
    assert_eq!(of(inherited.pid()).other_end, OtherEnd::Unseen);
}

fn socket(inode: u32, kind: u8, peer: u32) -> Diag {
    Diag {
        inode,
        kind,
        state: ESTABLISHED,
        peer,
        ..Diag::default()
    }
}

#[test]
fn what_criu_does_not_see_is_hidden_or_unseen() {
    let held: Holders = [(1, (7, 3)), (2, (7, 4)), (3, (7, 5)), (4, (7, 6))].into();
    let closed = Diag {
        shutdown: SHUTDOWN_BOTH,
        ..socket(4, 1, 0)
    };
    let sockets = [
        socket(1, DATAGRAM, 90),
        socket(2, SEQPACKET, 91),
        closed,
        socket(91, SEQPACKET, 2),
    ];
    let expected = [
        (1, Kind::Datagram, OtherEnd::Hidden(90)),
        (2, Kind::Seqpacket, OtherEnd::Outside),
        (3, Kind::Stream, OtherEnd::Unseen),
    ];
    assert_eq!(judge(&held, &sockets), expected);
}

/// The code of the refusal and how many sockets the copy finds closed.
fn evaluated(sockets: &[UnixSocket], assertions: Assertions, plugin: bool) -> (&'static str, usize) {
    let mut sockets = sockets.to_vec();
    let name = match evaluate(&mut sockets, &assertions, plugin) {
        None => "",
        Some(Refusal::UnixSockets { .. }) => "refused",
        Some(Refusal::UnixSocketsKept { .. }) => "not kept",
        Some(Refusal::UnixSocketsUnseen { sockets }) => match sockets.len() {
            1 => "unseen",
            _ => "too many",
        },
        Some(_) => "no plugin",
    };
    (name, sockets.len())
}

#[test]
fn the_annotation_decides_and_what_cannot_be_closed_is_refused_in_every_case() {
    let agent = unix_socket();
    let datagram = UnixSocket {
        kind: Kind::Datagram,
        ..agent.clone()
    };
    let hidden = |kind| UnixSocket {
        kind,
        other_end: OtherEnd::Hidden(90),
        ..agent.clone()
    };
    let both = [agent.clone(), hidden(Kind::Datagram)];
    let lasting = [agent.clone(), hidden(Kind::Stream)];
    for (tcp, of_both) in [
        (Tcp::Refuse, "refused"),
        (Tcp::Keep, "not kept"),
        (Tcp::Close, ""),
        (Tcp::Auto, ""),
    ] {
        let assertions = Assertions {
            tcp,
            ..Assertions::default()
        };
        assert_eq!(evaluated(&both, assertions, true), (of_both, 2), "{tcp:?}");
        assert_eq!(evaluated(&lasting, assertions, true).0, "unseen", "{tcp:?}");
        assert_eq!(evaluated(&[], assertions, false), ("", 0), "{tcp:?}");
    }
    let of = |tcp, external_unix| Assertions {
        tcp,
        external_unix,
        ..Assertions::default()
    };
    assert_eq!(evaluated(&both, of(Tcp::Auto, false), false).0, "no plugin");
    let datagrams = [datagram];
    assert_eq!(evaluated(&datagrams, of(Tcp::Keep, true), false), ("", 0));
    assert_eq!(evaluated(&datagrams, of(Tcp::Auto, true), true), ("", 1));
    assert_eq!(evaluated(&both, of(Tcp::Refuse, true), true), ("refused", 2));
}
