//! Properties of the parsers of the runtime's and CRIU's output, for arbitrary bytes.

use firn_host::Absent;

use firn_gpu::protocol::Reply;

use super::{RuncError, last_error, read_pid};
use crate::fuzz::file;
use crate::image_dir::error_lines;

/// The runtime's log, CRIU's log, a pid file, a reply line of the driver worker.
pub fn runtime_output(bytes: &[u8]) {
    let file = file(bytes);
    let whole = last_error(&file, 0);
    let length = bytes.len() as u64;
    assert_eq!(last_error(&file, length), None, "an error of an earlier call");
    assert_eq!(last_error(&file, u64::MAX), None, "the log was truncated");
    if let Some(message) = &whole {
        assert_eq!(message.trim(), message);
        assert!(message.len() <= bytes.len());
    }
    // A call finds the error that it logged itself, whatever the log held before.
    let mut longer = bytes.to_vec();
    longer.extend(b"\n{\"level\":\"error\",\"msg\":\"container does not exist\"}\n");
    std::fs::write(&file, longer).expect("the file is there");
    let message = last_error(&file, length).expect("it was logged");
    assert!(
        RuncError::Failed {
            output: String::new(),
            verb: "kill",
            message
        }
        .is_absent()
    );
    std::fs::write(&file, bytes).expect("the file is there");

    let lines = error_lines(&file);
    assert!(lines.len() <= 3);
    assert!(lines.iter().all(|line| !line.contains('\n')));

    if let Ok(pid) = read_pid(&file) {
        let text = std::str::from_utf8(bytes).expect("a number is text");
        assert_eq!(text.trim().parse(), Ok(pid));
        assert!(pid > 0, "kill(2) would take it for a group");
    }
    if let Ok(reply) = serde_json::from_slice::<Reply>(bytes) {
        let line = serde_json::to_vec(&reply).expect("replies can be written");
        assert_eq!(serde_json::from_slice::<Reply>(&line).ok(), Some(reply));
    }
}
