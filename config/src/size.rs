//! Sizes as people write them: a number and a unit.

/// Reads `512MiB`, `100GiB` or `2TiB`. Zero is refused: whoever writes it means no limit, or no store.
pub(crate) fn parse_size(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let bytes_per_unit: u64 = match unit {
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    let bytes = number.parse::<u64>().ok()?.checked_mul(bytes_per_unit)?;
    (bytes > 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_unit() {
        for (text, bytes) in [("512MiB", 512 << 20), ("100GiB", 100 << 30), ("2TiB", 2 << 40)] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in [
            "",
            "10",
            "GiB",
            "-1GiB",
            "1.5GiB",
            "10 GiB",
            "10GB",
            "10gib",
            "0GiB",
            "99999999TiB",
        ] {
            assert_eq!(parse_size(text), None, "{text:?} was taken");
        }
    }
}
