//! Failures that have a code: what is shown of them, as text and as JSON.

use std::error::Error;

use serde::Serialize;

/// A failure as users see it.
#[derive(Debug, Serialize)]
pub struct Failure {
    /// `FIRN-...`
    pub code: &'static str,
    /// What failed, on which object, and why.
    pub message: String,
    /// What to do.
    pub hint: &'static str,
}

impl Failure {
    /// With the whole chain of causes.
    pub fn new(code: &'static str, hint: &'static str, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            message.push_str(": ");
            message.push_str(error.to_string().trim_end());
            cause = error.source();
        }
        Self { code, message, hint }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}. hint: {}", self.code, self.message, self.hint)
    }
}

/// Failures that carry a code and a hint of their own.
macro_rules! coded {
    ($($error:ty),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::new(error.code(), error.hint(), &error)
            }
        })*
    };
}

coded!(
    crate::cdi::NoDriver,
    firn_cdi::ConvertError,
    firn_config::ConfigError,
    firn_config::ProgramError,
    firn_oci::DecideError,
    firn_oci::SpecError,
    firn_oci::manifest::ImageError,
    firn_oci::manifest::ManifestError,
    firn_oci::mounts::MountError,
);
