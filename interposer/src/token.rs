//! What a program gets for an allocation that another process is to open: instead of the driver's handle, and
//! of the same size.

/// "firn-ipc": at the begin of each.
const MAGIC: u64 = u64::from_le_bytes(*b"firn-ipc");

/// By which another process finds an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Token {
    /// By which the process that has it is reached, and its number there.
    pub name: u64,
    pub pid: u64,
    /// Only who has got the token knows it.
    pub secret: [u64; 2],
    pub begin: u64,
    pub bytes: u64,
}

/// A handle of the driver's, CUipcMemHandle, as words.
pub type Words = [u64; 8];

impl Token {
    pub fn to_words(self) -> Words {
        let [first, second] = self.secret;
        [
            MAGIC, self.name, first, second, self.begin, self.bytes, self.pid, 0,
        ]
    }

    /// None: it is none, as a handle of the driver's own.
    pub fn of(words: &Words) -> Option<Self> {
        let [magic, name, first, second, begin, bytes, pid, _] = *words;
        let secret = [first, second];
        (magic == MAGIC).then_some(Self {
            name,
            pid,
            secret,
            begin,
            bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_no_handles_of_the_drivers() {
        let token = Token {
            name: 1,
            pid: 6,
            secret: [2, 3],
            begin: 4,
            bytes: 5,
        };
        assert_eq!(Token::of(&token.to_words()), Some(token));
        assert_eq!(Token::of(&[0; 8]), None);
        let mut words = token.to_words();
        words[0] += 1;
        assert_eq!(Token::of(&words), None);
    }
}
