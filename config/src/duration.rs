//! Durations as people write them: a number and a unit.

use std::time::Duration;

/// Reads `500ms`, `10s`, `10m` or `1h`. Zero is refused: every wait in firn has a deadline that can be met.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let millis_per_unit: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    let millis = number.parse::<u64>().ok()?.checked_mul(millis_per_unit)?;
    (millis > 0).then(|| Duration::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_unit() {
        for (text, millis) in [
            ("500ms", 500),
            ("10s", 10_000),
            ("10m", 600_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(
                parse_duration(text).unwrap(),
                Duration::from_millis(millis),
                "{text}"
            );
        }
    }

    #[test]
    fn refuses_what_is_no_duration() {
        for text in [
            "",
            "10",
            "s",
            "-1s",
            "1.5s",
            "10 s",
            "10S",
            "0s",
            "99999999999999999999s",
            "9999999999999999h",
        ] {
            assert!(parse_duration(text).is_none(), "{text:?} was taken");
        }
    }
}
