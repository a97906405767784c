//! Numbers and commands as people read them.

use std::path::Path;
use std::time::Duration;

use chrono::{Local, TimeZone};
use firn_host::Rfc3339;

/// Bytes in the largest binary unit that keeps at least one digit before the point.
pub fn bytes(count: u64) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    let tenths = |size: u64| (u128::from(count) * 10 + u128::from(size / 2)) / u128::from(size);
    // What is rounded up to 1.0 of a unit has that unit.
    match UNITS.iter().find(|(_, size)| tenths(*size / 1024) >= 10 * 1024) {
        None => format!("{count} B"),
        Some((unit, size)) => {
            let tenths = tenths(*size);
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

/// A time in seconds since 1970 as people of this node's time zone read it, `2026-01-31 23:59:59`.
pub fn time(seconds: u64) -> String {
    time_in(&Local, seconds)
}

fn time_in<Z: TimeZone>(zone: &Z, seconds: u64) -> String
where
    Z::Offset: std::fmt::Display,
{
    let time = i64::try_from(seconds).ok();
    let time = time.and_then(|seconds| zone.timestamp_opt(seconds, 0).single());
    time.map_or("-".to_owned(), |time| {
        time.format("%Y-%m-%d %H:%M:%S").to_string()
    })
}

/// A time in seconds since 1970 as programs read it, in UTC: `2026-01-31T23:59:59Z`. None for 0, which stands
/// for no time.
pub fn utc(seconds: u64) -> Option<String> {
    let text = Rfc3339(Duration::from_secs(seconds)).to_string();
    let whole = text.split('.').next().unwrap_or_default();
    (seconds > 0).then(|| format!("{whole}Z"))
}

/// A number of things: `1 warning`, `2 warnings`.
pub fn count(number: usize, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        _ => format!("{number} {one}s"),
    }
}

/// A number of seconds or milliseconds with three digits behind the point, for JSON.
pub fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

/// A duration in whole milliseconds, for JSON.
pub fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A text, unless it is empty.
pub fn some(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
}

/// The first few of these and how many more there are, after `before`; empty if there is none.
pub fn some_of(before: &str, mut all: Vec<String>) -> String {
    const SHOWN: usize = 8;
    let more = all.len().saturating_sub(SHOWN);
    all.truncate(SHOWN);
    if more > 0 {
        all.push(format!("and {more} more"));
    }
    if all.is_empty() {
        String::new()
    } else {
        format!("{before}{}", all.join("; "))
    }
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
            (1_048_524, "1023.9 KiB"),
            (1_048_525, "1.0 MiB"),
            ((1 << 30) - 1, "1.0 GiB"),
            ((1 << 40) - 1, "1.0 TiB"),
            (151_397_597_184, "141.0 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }

    #[test]
    fn times_are_local_for_people_and_utc_for_programs() {
        let (kathmandu, utc_zone) = (chrono::FixedOffset::east_opt(20_700), chrono::Utc);
        assert_eq!(
            time_in(&kathmandu.expect("an offset"), 1_798_761_599),
            "2027-01-01 05:44:59"
        );
        assert_eq!(time_in(&utc_zone, 1_798_761_599), "2026-12-31 23:59:59");
        assert_eq!(time_in(&utc_zone, u64::MAX), "-");
        assert_eq!(utc(1_798_761_599).as_deref(), Some("2026-12-31T23:59:59Z"));
        assert_eq!(utc(0), None);
    }

    #[test]
    fn one_is_not_many() {
        let shown = [0, 1, 2].map(|number| count(number, "warning"));
        assert_eq!(shown, ["0 warnings", "1 warning", "2 warnings"]);
        assert_eq!(rounded(54.957_226_999_999_996), 54.957);
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
