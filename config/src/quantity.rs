//! Quantities as people write them: a whole number and a unit, as in `10s` or `100GiB`.

use std::time::Duration;

/// Reads a quantity. `units` gives what each unit stands for. None: it is no such text, or too large.
pub fn parse_quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, worth) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*worth)
}

/// Reads `500ms`, `10s`, `10m` or `1h`. Zero is refused: every wait in firn has a deadline that can be met.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
    let millis = parse_quantity(text, &units)?;
    (millis > 0).then(|| Duration::from_millis(millis))
}

/// Reads `512MiB`, `100GiB` or `2TiB`. Zero is refused: whoever writes it means no limit, or no store.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let units = [("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];
    parse_quantity(text, &units).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_read() {
        for (text, millis) in [
            ("500ms", 500),
            ("10s", 10_000),
            ("10m", 600_000),
            ("1h", 3_600_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Some(Duration::from_millis(millis)),
                "{text}"
            );
        }
        for (text, bytes) in [("512MiB", 512 << 20), ("100GiB", 100 << 30), ("2TiB", 2 << 40)] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        assert_eq!(parse_quantity("0s", &[("s", 1)]), Some(0));
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for text in [
            "",
            "10",
            "s",
            "GiB",
            "-1s",
            "+1s",
            "1.5s",
            "1.5GiB",
            "10 s",
            "10 GiB",
            "10S",
            "10GB",
            "10gib",
            "0s",
            "0GiB",
            "99999999999999999999s",
            "9999999999999999h",
            "99999999TiB",
        ] {
            assert_eq!((parse_duration(text), parse_size(text)), (None, None), "{text:?}");
        }
    }
}
