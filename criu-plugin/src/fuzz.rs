//! What must hold for the list of sockets, whatever its bytes are. The fuzz target includes this file and
//! [`crate::unix_sockets`].

use crate::unix_sockets::{LIST, Socket, listed};

/// A list that counts has a socket in each line, with the words that the line has. What CRIU is shown of it
/// is whole.
pub(crate) fn socket_list(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("there is a temporary directory");
    std::fs::write(dir.path().join(LIST), bytes).expect("the directory is writable");
    let Some(sockets) = listed(dir.path()) else {
        return;
    };
    let text = std::str::from_utf8(bytes).expect("a list is text");
    assert_eq!(text.lines().count(), sockets.len());
    for (line, socket) in text.lines().zip(&sockets) {
        let (word, inode) = match socket {
            Socket::Seen(inode) => ("seen", inode),
            Socket::Hidden { inode, .. } => ("hidden", inode),
            Socket::Unseen { inode, .. } => ("unseen", inode),
        };
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some(word));
        let number = words.next().unwrap_or_default().trim_start_matches(['+', '0']);
        assert!(number == inode.to_string() || *inode == 0, "{line}");
        assert_eq!(socket.is_taken(*inode), word != "unseen");
        let Some(answer) = socket.answer() else {
            continue;
        };
        let length = u32::try_from(answer.len()).expect("it is short");
        assert_eq!(answer[..4], length.to_ne_bytes());
        assert_eq!(answer.len() % 4, 0);
    }
}

#[cfg(test)]
#[path = "../../fuzz/kept.rs"]
mod kept;

#[cfg(test)]
mod tests {
    #[test]
    fn the_kept_inputs_pass() {
        super::kept::run("socket_list", super::socket_list);
    }
}
