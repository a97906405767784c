use super::*;
use crate::criu::tests::{Out, write_file};

const STREAM: u64 = 1;
const LISTEN: u64 = 10;

/// A Unix socket: inode, type, state, CRIU's flags, peer.
fn socket([inode, kind, state, flags, peer]: [u64; 5]) -> Out {
    let head = [
        (1, inode),
        (2, inode),
        (3, kind),
        (4, state),
        (5, 2),
        (6, flags),
        (7, 0),
        (8, peer),
    ];
    let socket = head
        .into_iter()
        .fold(Out::new(), |out, (field, number)| out.number(field, number));
    let socket = socket.message(10, &Out::new().number(1, 4096)).text(11, "/s");
    let socket = socket.number(12, 1).number(16, 9);
    Out::new()
        .number(1, 14)
        .number(2, inode)
        .message(UNIX_SOCKET, &socket)
}

fn image(sockets: &[[u64; 5]]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let regular = Out::new().message(3, &Out::new().text(6, "/dev/null"));
    let files = std::iter::once(regular.number(1, 1).number(2, 1));
    let files: Vec<Out> = files.chain(sockets.iter().copied().map(socket)).collect();
    write_file(&dir.path().join(NAME), MAGIC, &files);
    dir
}

/// Inode, state, CRIU's flags, peer and what is shut down of the sockets in `dir`.
fn sockets(dir: &Path) -> Vec<[u32; 5]> {
    let bytes = std::fs::read(dir.join(NAME)).unwrap();
    let files = messages(NAME, MAGIC, &bytes).unwrap();
    let of = files.into_iter().filter_map(|file| {
        let socket = Message::parse(file).unwrap().message(UNIX_SOCKET).unwrap()?;
        let options = socket.message(10).unwrap().unwrap();
        assert_eq!((options.required(1), socket.required(16)), (Ok(4096), Ok(9)));
        Some([2, 4, 6, 8, 12].map(|field| socket.required(field).unwrap()))
    });
    of.collect()
}

/// A pair, a stream and a datagram socket to others outside, and these others.
const SOCKETS: [[u64; 5]; 6] = [
    [1, STREAM, 1, 0, 2],
    [2, STREAM, 1, 0, 1],
    [3, STREAM, 1, 4, 90],
    [4, 2, 1, 4, 91],
    [90, 2, LISTEN, 1, 0],
    [91, 2, LISTEN, 1, 0],
];

#[test]
fn sockets_that_lead_outside_are_closed_and_pairs_stay() {
    let dir = image(&SOCKETS);
    close_unix_sockets(dir.path()).unwrap();
    let expected = [[1, 1, 0, 2, 1], [2, 1, 0, 1, 1], [3, 1, 0, 0, 3], [4, 7, 0, 0, 1]];
    assert_eq!(sockets(dir.path()), expected);
    close_unix_sockets(dir.path()).unwrap();
    assert_eq!(sockets(dir.path()), expected);
}

#[test]
fn the_other_end_of_a_socket_that_criu_connects_again_stays() {
    let dir = image(&[[3, 2, 1, 4, 90], [4, 2, 1, 0, 90], [90, 2, LISTEN, 1, 0]]);
    close_unix_sockets(dir.path()).unwrap();
    let expected = [[3, 7, 0, 0, 1], [4, 1, 0, 90, 1], [90, 10, 1, 0, 1]];
    assert_eq!(sockets(dir.path()), expected);
}

#[test]
fn a_file_that_is_not_as_criu_writes_it_is_an_error_and_stays() {
    let dir = image(&SOCKETS);
    let path = dir.path().join(NAME);
    let whole = std::fs::read(&path).unwrap();
    let mut broken = Vec::from([whole[..whole.len() - 1].to_vec()]);
    let without_peer = Out::new().number(2, 3).number(3, 1).number(6, 4);
    let twice = Out::new()
        .number(2, 3)
        .number(3, 1)
        .number(6, 4)
        .number(6, 0)
        .number(8, 9);
    for socket in [without_peer, twice] {
        write_file(&path, MAGIC, &[Out::new().message(UNIX_SOCKET, &socket)]);
        broken.push(std::fs::read(&path).unwrap());
    }
    for bytes in broken {
        std::fs::write(&path, &bytes).unwrap();
        assert!(matches!(
            close_unix_sockets(dir.path()),
            Err(ImageFault::Malformed { .. })
        ));
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
    std::fs::remove_file(&path).unwrap();
    assert!(close_unix_sockets(dir.path()).is_err());
}
