use std::io::Write;

use super::*;
use crate::criu::tests::{Out, write_file};

/// The mark of a dump with `--tcp-close`.
const MARK: u32 = 10;

/// A TCP socket with the inode 0xa0 + `id`, between two addresses in words, local first.
fn socket(id: u64, family: u64, state: u64, ends: [(&[u64], u64); 2]) -> Out {
    let [(local, local_port), (remote, remote_port)] = ends;
    let head = [
        (1, id),
        (2, 0xa0 + id),
        (3, family),
        (4, 1),
        (5, 6),
        (6, state),
        (7, local_port),
    ];
    let mut socket = head
        .into_iter()
        .fold(Out::new(), |out, (field, n)| out.number(field, n));
    socket = socket.number(8, remote_port).number(9, 2).number(10, 0);
    for word in local {
        socket = socket.number(11, *word);
    }
    for word in remote {
        socket = socket.number(12, *word);
    }
    socket = socket.message(14, &Out::new().number(1, 4096)).number(18, 9);
    Out::new().number(1, 2).number(2, id).message(4, &socket)
}

const LOOPBACK: &[u64] = &[0x0100_007f];
const MAPPED: &[u64] = &[0, 0, 0xffff_0000, 0x0100_007f];
const OUTSIDE: &[u64] = &[0x0900_000a];

const ESTABLISHED: u64 = 1;

/// A directory with a listening socket, both ends of a connection (one with IPv6), and one end of another.
fn image() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let regular = Out::new()
        .number(1, 1)
        .number(2, 1)
        .message(3, &Out::new().text(6, "/dev/null"));
    let files = [
        regular,
        socket(2, 2, 10, [(&[0], 80), (&[0], 0)]),
        socket(3, 10, ESTABLISHED, [(MAPPED, 80), (MAPPED, 5000)]),
        socket(4, 2, ESTABLISHED, [(LOOPBACK, 5000), (LOOPBACK, 80)]),
        socket(5, 2, ESTABLISHED, [(LOOPBACK, 80), (OUTSIDE, 6000)]),
    ];
    write_file(&dir.path().join(NAME), MAGIC, &files);
    inventory(dir.path());
    for inode in ["a3", "a4", "a5"] {
        stream(dir.path(), inode, 0);
    }
    dir
}

/// What a connection holds, which has received so many bytes.
fn stream(dir: &Path, inode: &str, received: u64) {
    let head = Out::new().number(1, received).number(2, 77).number(3, 6);
    let path = dir.join(format!("tcp-stream-{inode}.img"));
    write_file(&path, STREAM_MAGIC, &[head]);
    let mut file = File::options().append(true).open(path).unwrap();
    file.write_all(b"queued").unwrap();
}

fn inventory(dir: &Path) {
    let inventory = Out::new().number(1, 2).number(MARK, 1).number(11, 3);
    write_file(&dir.join("inventory.img"), INVENTORY_MAGIC, &[inventory]);
}

/// State, ports, words of both addresses, and shutdown.
type Socket = (u32, u32, u32, Vec<u32>, Vec<u32>, Option<u32>);

/// The sockets of the image in `dir`.
fn sockets(dir: &Path) -> Vec<Socket> {
    let bytes = std::fs::read(dir.join(NAME)).unwrap();
    let sockets = messages(NAME, MAGIC, &bytes)
        .unwrap()
        .into_iter()
        .filter_map(|file| {
            let socket = Message::parse(file).unwrap().message(INET_SOCKET).unwrap()?;
            let options = socket.message(14).unwrap().unwrap();
            assert_eq!((options.required(1), socket.required(9)), (Ok(4096), Ok(2)));
            Some((
                socket.required(6).unwrap(),
                socket.required(7).unwrap(),
                socket.required(8).unwrap(),
                socket.numbers(11).unwrap(),
                socket.numbers(12).unwrap(),
                socket.number(19).unwrap(),
            ))
        });
    sockets.collect()
}

/// Whether there is what a connection holds, by inode.
fn queued(dir: &Path) -> [bool; 3] {
    ["a3", "a4", "a5"].map(|inode| {
        let stream = dir.join(format!("tcp-stream-{inode}.img"));
        stream.metadata().unwrap().len() > 0
    })
}

#[test]
fn with_keep_inside_only_the_ends_of_others_are_closed() {
    let dir = image();
    let before = sockets(dir.path());
    let found = close_connections(dir.path(), Continued::Inside, None).unwrap();
    assert_eq!(found, Connections { kept: 2, closed: 1 });
    let after = sockets(dir.path());
    assert_eq!(after[..3], before[..3]);
    assert_eq!(after[3], (7, 0, 0, vec![0], vec![0], Some(3)));
    assert_eq!(queued(dir.path()), [true, true, false]);
}

#[test]
fn otherwise_all_are_closed_and_listening_sockets_stay() {
    let dir = image();
    let before = sockets(dir.path());
    let found = close_connections(dir.path(), Continued::None, None).unwrap();
    assert_eq!(found, Connections { kept: 0, closed: 3 });
    let after = sockets(dir.path());
    assert_eq!(after[0], before[0]);
    assert_eq!(after[1], (7, 0, 0, vec![0; 4], vec![0; 4], Some(3)));
    assert_eq!(queued(dir.path()), [false; 3]);
    let bytes = std::fs::read(dir.path().join("inventory.img")).unwrap();
    let inventory = Message::parse(messages("", INVENTORY_MAGIC, &bytes).unwrap()[0]).unwrap();
    assert!(!inventory.has(MARK) && inventory.required(11) == Ok(3));
    let again = close_connections(dir.path(), Continued::None, None).unwrap();
    assert_eq!(again, Connections::default());
}

/// The program that has it would take the end of the file for the end of what was sent.
#[test]
fn a_connection_whose_bytes_and_end_were_not_read_has_no_end_to_read() {
    const CLOSE_WAIT: u64 = 8;
    let shut_down = |read: Option<&BTreeSet<u64>>| -> Vec<_> {
        let dir = image();
        let of = |id, state| socket(id, 2, state, [(LOOPBACK, 80), (OUTSIDE, 6000 + id)]);
        let files = [of(3, CLOSE_WAIT), of(4, CLOSE_WAIT), of(5, ESTABLISHED)];
        write_file(&dir.path().join(NAME), MAGIC, &files);
        for (inode, received) in [("a3", 0), ("a4", 6), ("a5", 6)] {
            stream(dir.path(), inode, received);
        }
        close_connections(dir.path(), Continued::None, read).unwrap();
        assert_eq!(queued(dir.path()), [false; 3]);
        sockets(dir.path()).into_iter().map(|socket| socket.5).collect()
    };
    assert_eq!(shut_down(None), [Some(3), Some(2), Some(3)]);
    // CRIU has not written down what they hold; of the third the kernel shows no line.
    assert_eq!(
        shut_down(Some(&BTreeSet::from([0xa4]))),
        [Some(2), Some(3), Some(3)]
    );
}

#[test]
fn the_ends_of_a_connection_are_in_one_network_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let ends = [(LOOPBACK, 5000), (LOOPBACK, 80)];
    let elsewhere = socket(4, 2, ESTABLISHED, ends);
    let mut other = socket(3, 2, ESTABLISHED, [ends[1], ends[0]]);
    let bytes = other.bytes_mut();
    let at = bytes.len() - 1;
    assert_eq!(std::mem::replace(&mut bytes[at], 8), 9);
    write_file(&dir.path().join(NAME), MAGIC, &[other, elsewhere]);
    inventory(dir.path());
    let found = close_connections(dir.path(), Continued::Inside, None).unwrap();
    assert_eq!(found, Connections { kept: 0, closed: 2 });
}

#[test]
fn a_file_that_is_not_as_criu_writes_it_is_an_error_and_stays() {
    let dir = image();
    let path = dir.path().join(NAME);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.pop();
    std::fs::write(&path, &bytes).unwrap();
    assert!(matches!(
        close_connections(dir.path(), Continued::Inside, None),
        Err(ImageFault::Malformed { .. })
    ));
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    std::fs::remove_file(&path).unwrap();
    assert!(close_connections(dir.path(), Continued::Inside, None).is_err());
}

/// A socket that was reset keeps the address of its peer, here of one that a living connection has.
#[test]
fn a_connection_that_has_ended_is_closed_in_every_case_and_is_no_end_of_another() {
    for continued in [Continued::Inside, Continued::None] {
        let dir = tempfile::tempdir().unwrap();
        let ends = [(LOOPBACK, 80), (LOOPBACK, 5000)];
        let reset = socket(3, 2, u64::from(TCP_CLOSE), ends);
        let other = socket(4, 2, ESTABLISHED, [ends[1], ends[0]]);
        write_file(&dir.path().join(NAME), MAGIC, &[reset, other]);
        inventory(dir.path());
        let found = close_connections(dir.path(), continued, None).unwrap();
        assert_eq!(found, Connections { kept: 0, closed: 1 }, "{continued:?}");
        assert_eq!(sockets(dir.path())[0], (7, 0, 0, vec![0], vec![0], Some(3)));
    }
}
