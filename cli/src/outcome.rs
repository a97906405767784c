//! How a command has ended, and its exit status.

use std::process::ExitCode;

use crate::audit::Verdict;

/// Exit status of a command that was refused, and of an audit that refuses nothing and suspects something.
const NOTHING_TOUCHED: u8 = 3;

/// How a command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// It failed; what it had begun is rolled back, or the error names what is left.
    Failed,
    /// It was refused before anything was touched.
    Refused,
    /// An audit suspects something.
    Suspected,
}

impl Outcome {
    /// Of a command that has failed.
    pub fn failed(is_refused: bool) -> Self {
        if is_refused { Self::Refused } else { Self::Failed }
    }

    pub fn status(self) -> ExitCode {
        match self {
            Self::Done => ExitCode::SUCCESS,
            Self::Failed => ExitCode::FAILURE,
            Self::Refused | Self::Suspected => ExitCode::from(NOTHING_TOUCHED),
        }
    }
}

/// Of a command that does not show whether it was refused. True: done.
impl From<bool> for Outcome {
    fn from(is_done: bool) -> Self {
        if is_done { Self::Done } else { Self::Failed }
    }
}

impl From<Verdict> for Outcome {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Can => Self::Done,
            Verdict::Suspected => Self::Suspected,
            Verdict::Cannot => Self::Failed,
        }
    }
}
