//! Names of devices: `vendor/class=device`.

use std::fmt;
use std::str::FromStr;

/// A device by its full name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    kind: String,
    device: String,
}

/// A text that is not a valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadName {
    /// Not `vendor/class=device`.
    #[error("{0:?} is not of the form vendor/class=device")]
    Form(String),
    /// Not `vendor/class`.
    #[error(
        "kind {0:?} is not of the form vendor/class, of letters, digits and -_. that begin with a letter"
    )]
    Kind(String),
    /// Not a valid name of a device.
    #[error("device {0:?} is not of letters, digits and -_.: between a letter or digit at both ends")]
    Device(String),
}

impl DeviceName {
    /// A device of this kind.
    pub fn new(kind: &str, device: &str) -> Result<Self, BadName> {
        check_kind(kind)?;
        check_device(device)?;
        Ok(Self {
            kind: kind.to_owned(),
            device: device.to_owned(),
        })
    }

    /// `vendor/class`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The part after `=`.
    pub fn device(&self) -> &str {
        &self.device
    }
}

impl FromStr for DeviceName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let (kind, device) = text.split_once('=').ok_or_else(|| BadName::Form(shown(text)))?;
        Self::new(kind, device)
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.device)
    }
}

/// Checks `vendor/class`.
pub(crate) fn check_kind(kind: &str) -> Result<(), BadName> {
    let fits = |part: &str| part.starts_with(|c: char| c.is_ascii_alphabetic()) && is_name(part, "-_.");
    match kind.split_once('/') {
        Some((vendor, class)) if fits(vendor) && fits(class) => Ok(()),
        _ => Err(BadName::Kind(shown(kind))),
    }
}

/// Checks the name of a device without its kind.
pub(crate) fn check_device(device: &str) -> Result<(), BadName> {
    if is_name(device, "-_.:") {
        Ok(())
    } else {
        Err(BadName::Device(shown(device)))
    }
}

/// Whether the text starts and ends with a letter or digit, and has only these and `between`.
fn is_name(text: &str, between: &str) -> bool {
    let ends = |c: char| c.is_ascii_alphanumeric();
    text.starts_with(ends)
        && text.ends_with(ends)
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || between.contains(c))
}

/// The beginning of a text, for a message.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_names_are_parsed() {
        let name: DeviceName = "nvidia.com/gpu=GPU-6a1f0c52:0".parse().unwrap();
        assert_eq!((name.kind(), name.device()), ("nvidia.com/gpu", "GPU-6a1f0c52:0"));
        assert_eq!(name.to_string(), "nvidia.com/gpu=GPU-6a1f0c52:0");
        assert!("v/c=0".parse::<DeviceName>().is_ok());
    }

    #[test]
    fn a_bad_name_is_refused_with_its_wrong_part() {
        for (text, part) in [
            ("nvidia.com/gpu", "form vendor/class=device"),
            ("gpu=0", "kind \"gpu\""),
            ("9v/gpu=0", "kind"),
            ("v/9=0", "kind"),
            ("v-/c=0", "kind"),
            ("v/c.=0", "kind"),
            ("/c=0", "kind"),
            ("v/=0", "kind"),
            ("v/c/d=0", "kind"),
            ("v/c=", "device \"\""),
            ("v/c=:0", "device"),
            ("v/c=0-", "device"),
            ("v/c=a/b", "device"),
            ("v/c=a b", "device"),
            ("v/c=ä", "device"),
        ] {
            let message = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
