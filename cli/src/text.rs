//! Numbers and commands as people read them.

use std::path::Path;
use std::time::Duration;

use firn_host::Rfc3339;

/// Bytes in the largest binary unit that keeps at least one digit before the point.
pub fn bytes(count: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    match UNITS.iter().find(|(_, size)| count >= *size) {
        None => format!("{count} B"),
        Some((unit, size)) => {
            let tenths = (u128::from(count) * 10 + u128::from(size / 2)) / u128::from(*size);
            format!("{}.{} {unit}", tenths / 10, tenths % 10)
        }
    }
}

/// Bytes in a second.
pub fn rate(count: u64, seconds: f64) -> String {
    let nanoseconds = Duration::try_from_secs_f64(seconds).map_or(u128::MAX, |time| time.as_nanos());
    let rate = u128::from(count) * 1_000_000_000 / nanoseconds.max(1);
    format!("{}/s", bytes(u64::try_from(rate).unwrap_or(u64::MAX)))
}

/// containerd's usual socket.
pub const CONTAINERD: &str = "/run/containerd/containerd.sock";

/// A time in seconds since 1970, `2026-01-31T23:59:59Z`.
pub fn time(seconds: u64) -> String {
    let text = Rfc3339(Duration::from_secs(seconds)).to_string();
    format!("{}Z", text.split('.').next().unwrap_or_default())
}

/// A duration in milliseconds.
pub fn seconds(ms: f64) -> String {
    match ms {
        ms if ms < 100.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    }
}

/// How ctr is called for this socket and namespace.
pub fn ctr(address: &Path, namespace: &str) -> String {
    let address = match address.to_str() {
        Some(CONTAINERD) => String::new(),
        _ => format!(" --address {}", address.display()),
    };
    match namespace {
        "default" => format!("ctr{address}"),
        _ => format!("ctr{address} --namespace {namespace}"),
    }
}

/// Version of CUDA from the number that the driver gives.
pub fn cuda_version(code: i32) -> String {
    format!("{}.{}", code / 1000, code % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (151_397_597_184, "141.0 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn rates_are_those_of_a_second() {
        for (count, seconds, text) in [
            (3 << 30, 2.0, "1.5 GiB/s"),
            (0, 0.0, "0 B/s"),
            (1024, 0.5, "2.0 KiB/s"),
        ] {
            assert_eq!(rate(count, seconds), text);
        }
    }

    #[test]
    fn durations_are_rounded() {
        for (ms, text) in [
            (0.4, "0 ms"),
            (99.0, "99 ms"),
            (100.0, "0.1 s"),
            (90_040.0, "90.0 s"),
        ] {
            assert_eq!(seconds(ms), text);
        }
    }

    #[test]
    fn cuda_versions_are_split() {
        assert_eq!(
            (cuda_version(13000), cuda_version(12080)),
            ("13.0".to_owned(), "12.8".to_owned())
        );
    }
}
