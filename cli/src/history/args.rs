//! The command line of `firn history`.

use std::path::PathBuf;

use firn_config::{names, parse_quantity};
use firn_host::{Rfc3339, clock};

/// Show the checkpoints, restores, pauses, resumes and moves that have ended on this node.
///
/// With what became of each, its error code, how long it took, and the phase that failed or took longest.
/// Reads the node's history, which firn bounds to the last few thousand transactions. With --otlp, sends them
/// as traces: a span for each, and one for each of its phases, below the span of the client that called for
/// it, if containerd traces its calls.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn history train --since 2h\n  firn history --failed --json\n  \
                  firn history --since 2026-01-31 --otlp http://localhost:4318\n  \
                  firn history --otlp http://localhost:4318 --follow\n\n\
                  Exit status: 0 done, also if there are none, 1 failed, 2 wrong usage."
)]
pub struct HistoryArgs {
    /// Id of a container. Default: all.
    pub container: Option<String>,
    /// Only containers of this namespace of containerd.
    #[arg(long, short)]
    pub namespace: Option<String>,
    /// Only those that began since then: as long ago as `90s`, `30m`, `2h` or `7d`, or at a time in UTC such
    /// as `2026-01-31` or `2026-01-31T23:59:59Z`.
    #[arg(long, value_name = "TIME", value_parser = since)]
    pub since: Option<String>,
    /// Only those that were not done.
    #[arg(long)]
    pub failed: bool,
    /// Print JSON.
    #[arg(long, conflicts_with = "otlp")]
    pub json: bool,
    /// Send them to the collector there by OTLP over HTTP, or append them to a file as lines of OTLP's JSON.
    #[arg(long, value_name = "ENDPOINT|FILE")]
    pub otlp: Option<String>,
    /// Send those of --since, or none, then each one when it has ended, until SIGTERM.
    #[arg(long, requires = "otlp")]
    pub follow: bool,
    /// Directory of the history.
    #[arg(long, value_name = "DIR", default_value = names::HISTORY)]
    pub dir: PathBuf,
}

/// The beginning of the text of times since then: texts of times are in the order of the times.
fn since(text: &str) -> Result<String, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    if let Some(seconds) = parse_quantity(text, &units) {
        let then = std::time::Duration::from_millis(clock::now());
        let then = then.saturating_sub(std::time::Duration::from_secs(seconds));
        return Ok(Rfc3339(then).to_string());
    }
    const FORM: &str = "0000-00-00T00:00:00";
    let time = text.strip_suffix('Z').unwrap_or(text);
    let is_of_form = |(c, form): (char, char)| match form {
        '0' => c.is_ascii_digit(),
        form => c == form,
    };
    let is_time = [10, 16, 19].contains(&time.len()) && time.chars().zip(FORM.chars()).all(is_of_form);
    match is_time {
        true => Ok(time.to_owned()),
        false => Err("neither a duration such as 2h nor a time such as 2026-01-31T23:59:59Z".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_compared_as_text() {
        let at = |seconds| Rfc3339(std::time::Duration::from_secs(seconds)).to_string();
        // 2026-12-31T23:59:59Z.
        for text in ["2026-12-31", "2026-12-31T23:59", "2026-12-31T23:59:59Z"] {
            assert!(at(1_798_761_599) >= since(text).unwrap(), "{text}");
        }
        assert!(at(1_798_761_599) < since("2027-01-01").unwrap());
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
