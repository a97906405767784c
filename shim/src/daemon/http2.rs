//! Just enough HTTP/2 for one gRPC call over a unix socket: RFC 9113, RFC 7541 with literals only.
//!
//! Everything that the server sends but the first message of the answer is skipped, so no header has to be
//! decoded.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use super::connect_now;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest frame that a server may send to a client that asked for nothing else.
const MAX_FRAME: usize = 1 << 14;
/// No answer that is wanted here is longer: the metadata of a container have its spec.
const MAX_MESSAGE: u32 = 4 << 20;
/// How much a client may send at first, on a stream and on the connection.
const FIRST_WINDOW: usize = 65_535;
/// Length of a frame's head, and of a gRPC message's.
const FRAME_HEAD: usize = 9;
const MESSAGE_HEAD: usize = 5;
/// The only stream.
const STREAM: u32 = 1;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The setting: how many bytes of a stream the server may send before the client allows more.
const INITIAL_WINDOW_SIZE: u16 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// A call.
pub(super) struct Call<'a> {
    /// `/service/name`.
    pub method: &'a str,
    /// containerd's namespace.
    pub namespace: Option<&'a str>,
    pub message: &'a [u8],
}

/// Makes the call and gives the message that comes back.
pub(super) fn unary_call(socket: &Path, call: &Call<'_>, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut stream = connect_now(socket)?;
    let mut request = PREFACE.to_vec();
    let window = [&INITIAL_WINDOW_SIZE.to_be_bytes()[..], &MAX_MESSAGE.to_be_bytes()].concat();
    push_frame(&mut request, SETTINGS, 0, 0, &window);
    push_frame(&mut request, WINDOW_UPDATE, 0, 0, &MAX_MESSAGE.to_be_bytes());
    push_frame(&mut request, HEADERS, END_HEADERS, STREAM, &headers(call)?);
    stream.set_write_timeout(Some(left(deadline)?))?;
    stream.write_all(&request)?;
    let length = u32::try_from(call.message.len()).map_err(io::Error::other)?;
    let message = [&[0][..], &length.to_be_bytes(), call.message].concat();
    send(&mut stream, &message, deadline)?;
    answer(&mut stream, deadline)
}

/// Sends the request's message, as much at a time as the server allows.
fn send(stream: &mut UnixStream, message: &[u8], deadline: Instant) -> io::Result<()> {
    // Of the connection and of the stream. A server may begin with another one for streams by its settings:
    // one that is smaller ends the call.
    let mut windows = [FIRST_WINDOW; 2];
    let mut rest = message;
    loop {
        let window = windows[0].min(windows[1]).min(MAX_FRAME);
        let (now, later) = rest.split_at(rest.len().min(window));
        if now.is_empty() {
            let Frame {
                kind, id, payload, ..
            } = Frame::read(stream, deadline)?;
            match (kind, <[u8; 4]>::try_from(&payload[..])) {
                (WINDOW_UPDATE, Ok(more)) => {
                    let more = usize::try_from(u32::from_be_bytes(more)).unwrap_or(0);
                    let window = &mut windows[usize::from(id == STREAM)];
                    *window = window.saturating_add(more);
                }
                (HEADERS | RST_STREAM | GOAWAY, _) => return Err(io::ErrorKind::ConnectionReset.into()),
                _ => {}
            }
            continue;
        }
        let mut frame = Vec::new();
        let is_last = later.is_empty();
        push_frame(
            &mut frame,
            DATA,
            if is_last { END_STREAM } else { 0 },
            STREAM,
            now,
        );
        stream.set_write_timeout(Some(left(deadline)?))?;
        stream.write_all(&frame)?;
        if is_last {
            return Ok(());
        }
        for window in &mut windows {
            *window -= now.len();
        }
        rest = later;
    }
}

/// A frame of the server's.
struct Frame {
    kind: u8,
    flags: u8,
    id: u32,
    payload: Vec<u8>,
}

impl Frame {
    fn read(stream: &mut UnixStream, deadline: Instant) -> io::Result<Self> {
        let mut head = [0; FRAME_HEAD];
        read_exact(stream, &mut head, deadline)?;
        let [a, b, c, kind, flags, id @ ..] = head;
        let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
        if length > MAX_FRAME {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut payload = vec![0; length];
        read_exact(stream, &mut payload, deadline)?;
        Ok(Self {
            kind,
            flags,
            id: u32::from_be_bytes(id),
            payload,
        })
    }
}

/// The message that the server sends on the one stream.
pub(crate) fn answer(stream: &mut UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        if let Some(message) = message(&body)? {
            return Ok(message);
        }
        let Frame {
            kind,
            flags,
            id,
            payload,
        } = Frame::read(stream, deadline)?;
        let ours = id == STREAM;
        match kind {
            DATA if ours && flags & PADDED == 0 => body.extend(payload),
            // The answer is a refusal: headers only.
            HEADERS if ours && flags & END_STREAM != 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            RST_STREAM | GOAWAY => return Err(io::ErrorKind::ConnectionReset.into()),
            _ => {}
        }
        if body.len() > MESSAGE_HEAD + MAX_MESSAGE as usize {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// The first message in `body`, when it is complete.
fn message(body: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let Some((&[compressed, a, b, c, d], rest)) = body.split_first_chunk::<MESSAGE_HEAD>() else {
        return Ok(None);
    };
    if compressed != 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    Ok(rest.get(..length).map(<[u8]>::to_vec))
}

fn push_frame(to: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).expect("frames made here are short");
    to.extend(&length.to_be_bytes()[1..]);
    to.extend([kind, flags]);
    to.extend(stream.to_be_bytes());
    to.extend(payload);
}

/// Header block: static table entries where there are, else literals that are not indexed.
fn headers(call: &Call<'_>) -> io::Result<Vec<u8>> {
    const METHOD_POST: u8 = 0x83;
    const SCHEME_HTTP: u8 = 0x86;
    const AUTHORITY: &[u8] = &[0x01];
    const PATH: &[u8] = &[0x04];
    const CONTENT_TYPE: &[u8] = &[0x0f, 0x10];
    const NAMESPACE: &[u8] = b"\x00\x14containerd-namespace";
    let mut block = vec![METHOD_POST, SCHEME_HTTP];
    let mut literals = vec![
        (PATH, call.method),
        (AUTHORITY, "localhost"),
        (CONTENT_TYPE, "application/grpc"),
        (b"\x00\x02te", "trailers"),
    ];
    literals.extend(call.namespace.map(|namespace| (NAMESPACE, namespace)));
    for (name, value) in literals {
        block.extend(name);
        // The length has 7 bits; longer ones would need a continuation.
        let length = u8::try_from(value.len()).ok().filter(|length| *length < 127);
        block.push(length.ok_or(io::ErrorKind::InvalidInput)?);
        block.extend(value.as_bytes());
    }
    Ok(block)
}

fn left(deadline: Instant) -> io::Result<std::time::Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(io::ErrorKind::TimedOut.into())
    } else {
        Ok(left)
    }
}

fn read_exact(stream: &mut UnixStream, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// A server that sends `answer`, whatever it is asked, and gives the request when the client is done.
    fn server(path: &Path, answer: Vec<u8>) -> JoinHandle<Vec<u8>> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&answer).unwrap();
            let mut request = Vec::new();
            // A client that hangs up on an unread answer resets the connection.
            let _end = stream.read_to_end(&mut request);
            request
        })
    }

    const CALL: Call<'_> = Call {
        method: "/service/Name",
        namespace: Some("default"),
        message: b"job",
    };

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        push_frame(&mut frame, kind, flags, stream, payload);
        frame
    }

    #[test]
    fn the_message_is_found_among_the_frames() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let answer = [
            frame(SETTINGS, 0, 0, &[0; 6]),
            frame(SETTINGS, 1, 0, &[]),
            frame(8, 0, 0, &[0; 4]),
            frame(HEADERS, END_HEADERS, STREAM, b"whatever"),
            frame(DATA, 0, STREAM, &[0, 0, 0, 0, 4, b'a', b'b']),
            frame(DATA, 0, 3, b"not ours"),
            frame(DATA, 0, STREAM, b"cd"),
        ]
        .concat();
        let server = server(&path, answer);
        assert_eq!(unary_call(&path, &CALL, Instant::now() + SOON).unwrap(), b"abcd");
        let request = server.join().unwrap();
        assert!(request.starts_with(PREFACE));
        assert!(request.windows(14).any(|window| window == b"\x0d/service/Name"));
        let namespace = b"\x14containerd-namespace\x07default";
        assert!(request.windows(namespace.len()).any(|window| window == namespace));
        assert!(request.ends_with(b"\0\0\x08\0\x01\0\0\0\x01\0\0\0\0\x03job"));
    }

    #[test]
    fn a_long_message_waits_until_the_server_allows_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let more = 200_000_u32.to_be_bytes();
        let answer = [
            frame(SETTINGS, 0, 0, &[]),
            frame(WINDOW_UPDATE, 0, 0, &more),
            frame(WINDOW_UPDATE, 0, STREAM, &more),
            frame(DATA, 0, STREAM, &[0, 0, 0, 0, 0]),
        ]
        .concat();
        let server = server(&path, answer);
        let call = Call {
            message: &[7; 150_000],
            ..CALL
        };
        assert_eq!(unary_call(&path, &call, Instant::now() + SOON).unwrap(), b"");
        let request = server.join().unwrap();
        let body = request.iter().filter(|byte| **byte == 7).count();
        assert!(body >= 150_000, "{body} bytes");

        let path = dir.path().join("mean");
        let mean = self::server(&path, frame(RST_STREAM, 0, STREAM, &[0; 4]));
        unary_call(&path, &call, Instant::now() + SOON).unwrap_err();
        mean.join().unwrap();
    }

    #[test]
    fn refusals_and_nonsense_are_errors() {
        for answer in [
            frame(HEADERS, END_HEADERS | END_STREAM, STREAM, b"grpc-status"),
            frame(RST_STREAM, 0, STREAM, &[0; 4]),
            frame(GOAWAY, 0, 0, &[0; 8]),
            frame(DATA, 0, STREAM, &[1, 0, 0, 0, 1, 0]),
            frame(DATA, 0, STREAM, &[0, 0xff, 0xff].repeat(1000)).repeat(2),
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("s");
            let server = server(&path, answer);
            unary_call(&path, &CALL, Instant::now() + SOON).unwrap_err();
            server.join().unwrap();
        }
    }

    #[test]
    fn names_that_are_too_long_are_an_error() {
        let long = "n".repeat(127);
        let call = Call {
            namespace: Some(&long),
            ..CALL
        };
        assert_eq!(headers(&call).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_silent_server_is_left_at_the_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let begun = Instant::now();
        unary_call(&path, &CALL, begun + Duration::from_millis(50)).unwrap_err();
        assert!(begun.elapsed() < SOON);
    }
}
