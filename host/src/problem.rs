//! Errors with a code and a remedy, and how they are shown.

use std::error::Error;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What a user needs in addition to an error's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remedy<'a> {
    /// `FIRN-...`, listed in the reference of error codes.
    pub code: &'a str,
    /// What the user or the operator can do.
    pub hint: &'a str,
}

/// Shorthand for the arms of [`Problem::remedy`].
pub const fn remedy<'a>(code: &'a str, hint: &'a str) -> Remedy<'a> {
    Remedy { code, hint }
}

/// An error that has a code and a remedy.
pub trait Problem: Error {
    /// Its code and what to do. An error that wraps another problem returns that one's.
    fn remedy(&self) -> Remedy<'_>;

    /// `FIRN-...`.
    fn code(&self) -> &str {
        self.remedy().code
    }

    /// What the user or the operator can do.
    fn hint(&self) -> &str {
        self.remedy().hint
    }

    /// The same as plain data.
    fn report(&self) -> ProblemReport
    where
        Self: Sized,
    {
        ProblemReport {
            code: self.code().to_owned(),
            message: Chain(self).to_string(),
            hint: self.hint().to_owned(),
        }
    }
}

/// A problem as plain data: for another process, for JSON, for a log line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[error("{code}: {message}. hint: {hint}")]
pub struct ProblemReport {
    /// `FIRN-...`.
    pub code: String,
    /// The error and its causes.
    pub message: String,
    /// What to do.
    pub hint: String,
}

impl ProblemReport {
    /// Its code and what to do.
    pub fn remedy(&self) -> Remedy<'_> {
        remedy(&self.code, &self.hint)
    }
}

impl<P: Problem> From<P> for ProblemReport {
    fn from(problem: P) -> Self {
        problem.report()
    }
}

/// A problem in one line, as users see it:
/// `FIRN-SPEC-INVALID: spec /b/config.json is not valid JSON. hint: create ...`.
pub struct ProblemLine<'a>(pub &'a dyn Problem);

impl fmt::Display for ProblemLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Remedy { code, hint } = self.0.remedy();
        write!(f, "{code}: {}. hint: {hint}", Chain(self.0))
    }
}

/// An error and its causes in one line: `cannot start runc: No such file or directory`.
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot start {program}")]
    struct Start {
        program: &'static str,
        source: io::Error,
    }

    impl Problem for Start {
        fn remedy(&self) -> Remedy<'_> {
            remedy("FIRN-RUNTIME", "install it")
        }
    }

    #[test]
    fn a_report_has_code_causes_and_remedy() {
        let source = io::Error::from_raw_os_error(2);
        let start = Start {
            program: "runc",
            source,
        };
        let report = start.report();
        assert_eq!((start.code(), start.hint()), ("FIRN-RUNTIME", "install it"));
        assert_eq!(
            report.to_string(),
            "FIRN-RUNTIME: cannot start runc: No such file or directory (os error 2). hint: install it"
        );
        assert_eq!(ProblemLine(&start).to_string(), report.to_string());
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<ProblemReport>(&json).unwrap(), report);
    }
}
