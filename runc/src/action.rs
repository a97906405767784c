//! What the second process is started for, and how it answers.

use std::ffi::OsStr;

use firn_transaction::look;

/// Exit status: the call is runc's.
pub const PASS: u8 = 100;

/// What the process is started for: its first word, which is no verb of runc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// What the command line requests.
    Transact,
    /// A rollback of what an earlier process has left.
    Recover,
    /// A look at files that may hang, for one of the others.
    Look,
}

impl Action {
    const ALL: [Self; 3] = [Self::Transact, Self::Recover, Self::Look];

    /// The action of this name.
    pub fn of(word: &OsStr) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == word)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Transact => "transact",
            Self::Recover => "recover",
            Self::Look => look::ACTION,
        }
    }
}

/// How a call of this process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// It was firn's, and is done.
    Here,
    /// It is runc's.
    Pass,
}
