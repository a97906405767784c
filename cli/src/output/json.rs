//! What `--json` prints: one object with a type, of which docs/reference/schema.json has the schema.
//!
//! A field that has no value is absent: no output has a null.

use std::fmt;

use firn_config::text::printable_json;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{note, raw};
use crate::state_after::StateAfter;

/// What a command prints with `--json`. [`printed`] implements it.
pub trait Printed: Serialize {}

/// Types that commands print with `--json`. The schema of each is that of its commands.
macro_rules! printed {
    ($($printed:ty: $($command:literal),+);+ $(;)?) => {
        $(impl $crate::output::Printed for $printed {})+

        $($(
            #[cfg(test)]
            inventory::submit! {
                $crate::output::schema::Command {
                    name: $command,
                    schema: $crate::output::schema::of::<$printed>,
                }
            }
        )+)+
    };
}

pub(crate) use printed;

/// A command that has failed. The exit status is not 0.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Failed<'a> {
    /// Why.
    failure: Failure,
    /// How the containers are now that the command was to checkpoint, move or resume; absent if there are
    /// none.
    containers: Option<&'a [StateAfter]>,
}

/// Why a command has failed.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Failure {
    /// `FIRN-...`; absent if the error has none.
    pub code: Option<String>,
    /// The error and its causes.
    pub message: String,
    /// What to do; absent if the error does not name it.
    pub hint: Option<String>,
}

printed! { Failed<'_>: "failure" }

impl Failure {
    /// Takes the text of an error apart: `FIRN-...: message. hint: remedy`. What called the operation may
    /// have put something in front.
    pub fn of(text: &str) -> Self {
        let (text, hint) = match text.split_once(HINT) {
            Some((text, hint)) => (text.trim_end_matches('.'), Some(hint.to_owned())),
            None => (text, None),
        };
        let is_of_code = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-';
        let code = text.match_indices(PREFIX).find_map(|(at, _)| {
            let (code, _) = text[at..].split_once(": ")?;
            code.chars().all(is_of_code).then_some((at, code))
        });
        let message = match code {
            Some((0, code)) => &text[code.len() + 2..],
            _ => text,
        };
        Self {
            code: code.map(|(_, code)| code.to_owned()),
            message: message.to_owned(),
            hint,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, message, hint } = self;
        if let Some(code) = code.as_ref().filter(|code| !message.contains(&**code)) {
            write!(f, "{code}: ")?;
        }
        f.write_str(message)?;
        match hint {
            Some(hint) => write!(f, ".{HINT}{hint}"),
            None => Ok(()),
        }
    }
}

/// How the codes of errors begin.
const PREFIX: &str = "FIRN-";

/// What stands before the remedy of an error.
const HINT: &str = " hint: ";

/// Prints a value as JSON.
pub fn json(value: &impl Printed) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(&without_nulls(value)?)?;
    raw(&(printable_json(&text) + "\n"));
    Ok(())
}

/// Prints a value as JSON in one line.
pub fn json_line(value: &impl Printed) -> anyhow::Result<()> {
    let text = without_nulls(value)?.to_string();
    raw(&(printable_json(&text) + "\n"));
    Ok(())
}

/// The value, without the fields that have none.
fn without_nulls(value: &impl Printed) -> anyhow::Result<Value> {
    let mut value = serde_json::to_value(value)?;
    remove_nulls(&mut value);
    Ok(value)
}

fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        Value::Array(all) => all.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// Reports why a command has failed, as JSON on standard output or for a person. Returns the command's
/// result.
pub fn failed(as_json: bool, message: impl fmt::Display) -> anyhow::Result<bool> {
    failed_with(as_json, message, &[])?;
    Ok(false)
}

/// As [`failed`], with how the containers are now.
pub fn failed_with(
    as_json: bool,
    message: impl fmt::Display,
    containers: &[StateAfter],
) -> anyhow::Result<()> {
    let text = message.to_string();
    if as_json {
        let failure = Failure::of(&text);
        let containers = (!containers.is_empty()).then_some(containers);
        // Also `firn ps --watch` prints lines.
        return json_line(&Failed { failure, containers });
    }
    note!("firn: {text}");
    for container in containers {
        note!("firn: {}", container.shown());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_taken_apart_and_put_together() {
        for (text, code, message, hint) in [
            (
                "FIRN-GPU-COUNT: two. hint: grant more",
                Some("FIRN-GPU-COUNT"),
                "two",
                Some("grant more"),
            ),
            ("FIRN-FILE: a: b", Some("FIRN-FILE"), "a: b", None),
            (
                "cannot read /etc/x: it is gone",
                None,
                "cannot read /etc/x: it is gone",
                None,
            ),
            (
                "containerd's Tasks/Create failed: FIRN-FILE: a. hint: b. hint: c",
                Some("FIRN-FILE"),
                "containerd's Tasks/Create failed: FIRN-FILE: a",
                Some("b. hint: c"),
            ),
            ("FIRN-x: no code", None, "FIRN-x: no code", None),
            ("see FIRN-FILE", None, "see FIRN-FILE", None),
            ("", None, "", None),
        ] {
            let failure = Failure::of(text);
            let wanted = Failure {
                code: code.map(str::to_owned),
                message: message.to_owned(),
                hint: hint.map(str::to_owned),
            };
            assert_eq!(failure, wanted);
            assert_eq!(failure.to_string(), text);
        }
    }
}
