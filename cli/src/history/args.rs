//! The command line of `firn history`.

use std::path::PathBuf;

use chrono::{Local, NaiveDateTime};
use firn_config::{names, parse_quantity};
use firn_host::{Rfc3339, clock};

use crate::complete;

/// Show the checkpoints, restores, pauses, resumes and moves that have ended on this node.
///
/// With what became of each, its error code, how long it took, and the phase that failed or took longest.
/// Reads the node's history, which firn bounds to the last few thousand transactions.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn history train --since 2h\n  firn history --failed --json\n  \
                  firn history --since 2026-01-31\n\n\
                  Exit status: 0 done, also if there are none, 1 failed, 2 wrong usage."
)]
pub struct HistoryArgs {
    /// Id of a container. Default: all.
    #[arg(add = complete::all_tasks())]
    pub container: Option<String>,
    /// Only containers of this namespace of containerd.
    #[arg(long, short)]
    pub namespace: Option<String>,
    /// Only those that began since then: as long ago as `90s`, `30m`, `2h` or `7d`, or at a time such as
    /// `2026-01-31` or `2026-01-31T23:59:59`, in local time or with `Z` in UTC.
    #[arg(long, value_name = "TIME", value_parser = since)]
    pub since: Option<String>,
    /// Only those that were not done.
    #[arg(long)]
    pub failed: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Directory of the history.
    #[arg(long, value_name = "DIR", default_value = names::HISTORY)]
    pub dir: PathBuf,
}

/// The text of that time in UTC: texts of times are in the order of the times.
fn since(text: &str) -> Result<String, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    if let Some(seconds) = parse_quantity(text, &units) {
        let then = std::time::Duration::from_millis(clock::now());
        let then = then.saturating_sub(std::time::Duration::from_secs(seconds));
        return Ok(Rfc3339(then).to_string());
    }
    let at = match text.strip_suffix('Z') {
        Some(time) => time_of(time).map(|time| time.and_utc()),
        None => time_of(text).and_then(|time| Some(time.and_local_timezone(Local).earliest()?.to_utc())),
    };
    let seconds = at.and_then(|at| u64::try_from(at.timestamp()).ok());
    seconds
        .map(|seconds| Rfc3339(std::time::Duration::from_secs(seconds)).to_string())
        .ok_or_else(|| "neither a duration such as 2h nor a time such as 2026-01-31T23:59:59Z".to_owned())
}

/// A time without its zone: a day, with hours and minutes, or with seconds as well.
fn time_of(text: &str) -> Option<NaiveDateTime> {
    const FULL: &str = "2026-01-31T00:00:00";
    let rest = [10, 16, 19].contains(&text.len()).then(|| FULL.get(text.len()..));
    NaiveDateTime::parse_from_str(&(text.to_owned() + rest??), "%Y-%m-%dT%H:%M:%S").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_compared_as_text() {
        let at = |seconds| Rfc3339(std::time::Duration::from_secs(seconds)).to_string();
        // 2026-12-31T23:59:59Z.
        for text in ["2026-12-31Z", "2026-12-31T23:59Z", "2026-12-31T23:59:59Z"] {
            assert!(at(1_798_761_599) >= since(text).unwrap(), "{text}");
        }
        assert!(at(1_798_761_599) < since("2027-01-01Z").unwrap());
        assert!(since("2026-12-31T23:59:59").is_ok());
        let now = clock::now() / 1000;
        assert!(at(now - 7300) < since("2h").unwrap() && at(now - 7100) > since("2h").unwrap());
        assert_eq!(since("99999999d").unwrap(), at(0));
        for text in [
            "",
            "2",
            "h",
            "2026",
            "2026-1-31",
            "2026-12-31T23:59:59+01:00",
            "2026-12-31 23:59",
        ] {
            assert!(since(text).is_err(), "{text:?}");
        }
    }
}
