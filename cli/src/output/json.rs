//! What `--json` prints: one object with a type, of which docs/reference/schema.json has the schema.
//!
//! A field that has no value is absent: no output has a null.

use std::fmt;

use firn_config::text::printable_json;
use serde::Serialize;
use serde_json::Value;

use super::{note, raw};

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
struct Failure {
    /// Why, in one line: the code `FIRN-...` where the error has one, the message with its causes, and after
    /// `hint: ` what to do.
    failure: String,
}

printed! { Failure: "failure" }

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
    let failure = message.to_string();
    if as_json {
        // Also `firn ps --watch` prints lines.
        json_line(&Failure { failure })?
    } else {
        note!("firn: {failure}")
    }
    Ok(false)
}
