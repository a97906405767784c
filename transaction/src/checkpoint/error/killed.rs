//! Effects that a kill of the container has ended: that is the failure, and not what they report.

use super::EffectError;
use crate::job_hook::HookError;
use crate::look::LookError;
use crate::memory::CopyError;

impl From<HookError> for EffectError {
    fn from(error: HookError) -> Self {
        match error {
            HookError::Killed => Self::Killed,
            error => Self::Hook(error),
        }
    }
}

impl From<CopyError> for EffectError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Killed => Self::Killed,
            error => Self::Copy(error),
        }
    }
}

impl From<LookError> for EffectError {
    fn from(error: LookError) -> Self {
        match error {
            LookError::Killed => Self::Killed,
            error => Self::Look(error),
        }
    }
}
