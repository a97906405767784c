//! GPU UUIDs as bytes (driver API) and as text (`GPU-...`, NVML).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The 16 bytes of a GPU's UUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Uuid(pub [u8; 16]);

/// A text that is no GPU UUID.
#[derive(Debug, thiserror::Error)]
#[error("not a GPU UUID: {0:?}; hint: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")]
pub struct BadUuid(String);

impl FromStr for Uuid {
    type Err = BadUuid;

    fn from_str(text: &str) -> Result<Self, BadUuid> {
        let bad = || BadUuid(text.to_owned());
        let body = text.strip_prefix("GPU-").ok_or_else(bad)?;
        let groups: Vec<usize> = body.split('-').map(str::len).collect();
        let digits: String = body.split('-').collect();
        if groups != [8, 4, 4, 4, 12] || !digits.bytes().all(|c| c.is_ascii_hexdigit()) {
            return Err(bad());
        }
        let value = u128::from_str_radix(&digits, 16).map_err(|_| bad())?;
        Ok(Self(value.to_be_bytes()))
    }
}

impl TryFrom<String> for Uuid {
    type Error = BadUuid;

    fn try_from(text: String) -> Result<Self, BadUuid> {
        text.parse()
    }
}

impl From<Uuid> for String {
    fn from(uuid: Uuid) -> Self {
        uuid.to_string()
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = format!("{:032x}", u128::from_be_bytes(self.0));
        let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        write!(f, "GPU-{a}-{b}-{c}-{d}-{e}")
    }
}

#[cfg(test)]
mod tests {
    use super::Uuid;

    #[test]
    fn text_and_bytes_agree() {
        let text = "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50";
        let uuid: Uuid = text.parse().unwrap();
        assert_eq!(uuid.0[..4], [0x6a, 0x1f, 0x0c, 0x52]);
        assert_eq!(uuid.to_string(), text);
    }

    #[test]
    fn refuses_other_shapes() {
        for text in [
            "",
            "GPU-",
            "GPU-6a1f0c5290c14f0e8d7b0c1d2e3f4a50",
            "MIG-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a50",
        ] {
            assert!(text.parse::<Uuid>().is_err(), "{text}");
        }
        assert!(
            "GPU-6a1f0c52-90c1-4f0e-8d7b-0c1d2e3f4a5+"
                .parse::<Uuid>()
                .is_err()
        );
    }
}
