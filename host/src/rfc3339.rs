//! Times as text.

use std::fmt;
use std::time::Duration;

/// Time since 1970 as UTC, in nanoseconds, `2026-01-31T23:59:59.000000000Z`.
pub struct Rfc3339(pub Duration);

impl fmt::Display for Rfc3339 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        // Days since 0000-03-01, so that a leap day ends its year; then in cycles of 400, 100, 4 and 1 years.
        let day = seconds / 86_400 + 719_468;
        let (era, day) = (day / 146_097, day % 146_097);
        let year_of_era = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * day + 2) / 153;
        let date = day - (153 * from_march + 2) / 5 + 1;
        let month = if from_march < 10 {
            from_march + 3
        } else {
            from_march - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        let nanos = self.0.subsec_nanos();
        write!(
            f,
            "{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000000Z"),
            (1_798_761_599, "2026-12-31T23:59:59.000000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000000Z"),
        ] {
            assert_eq!(Rfc3339(Duration::from_secs(seconds)).to_string(), text);
        }
        let fraction = Duration::new(1, 2_003);
        assert_eq!(Rfc3339(fraction).to_string(), "1970-01-01T00:00:01.000002003Z");
    }
}
