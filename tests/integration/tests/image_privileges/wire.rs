//! CRIU's files, to be changed: magic numbers, and protocol buffers field by field.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    /// Of fixed width, with its kind.
    Fixed(u8, Vec<u8>),
}

/// A message; what it holds is kept in its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message(Vec<(u64, Value)>);

impl Message {
    fn parse(mut bytes: &[u8]) -> Result<Self> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes)?;
            let value = match tag & 7 {
                0 => Value::Number(varint(&mut bytes)?),
                2 => {
                    let length = usize::try_from(varint(&mut bytes)?)?;
                    Value::Bytes(take(&mut bytes, length)?.to_vec())
                }
                1 => Value::Fixed(1, take(&mut bytes, 8)?.to_vec()),
                5 => Value::Fixed(5, take(&mut bytes, 4)?.to_vec()),
                kind => anyhow::bail!("wire type {kind}"),
            };
            fields.push((tag >> 3, value));
        }
        Ok(Self(fields))
    }

    fn write(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (field, value) in &self.0 {
            match value {
                Value::Number(number) => {
                    put(&mut out, field << 3);
                    put(&mut out, *number);
                }
                Value::Bytes(bytes) => {
                    put(&mut out, field << 3 | 2);
                    put(&mut out, bytes.len() as u64);
                    out.extend(bytes);
                }
                Value::Fixed(kind, bytes) => {
                    put(&mut out, field << 3 | u64::from(*kind));
                    out.extend(bytes);
                }
            }
        }
        out
    }

    pub fn number(&self, field: u64) -> Option<u64> {
        self.0.iter().find_map(|(number, value)| match value {
            Value::Number(value) if *number == field => Some(*value),
            _ => None,
        })
    }

    pub fn text(&self, field: u64) -> Option<String> {
        self.0.iter().find_map(|(number, value)| match value {
            Value::Bytes(bytes) if *number == field => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        })
    }

    pub fn remove(&mut self, field: u64) {
        self.0.retain(|(number, _)| *number != field);
    }

    pub fn set(&mut self, field: u64, number: u64) {
        self.remove(field);
        self.0.push((field, Value::Number(number)));
    }

    pub fn set_all(&mut self, field: u64, numbers: &[u64]) {
        self.remove(field);
        self.0
            .extend(numbers.iter().map(|number| (field, Value::Number(*number))));
    }

    pub fn set_text(&mut self, field: u64, text: &str) {
        self.set_bytes(field, text.as_bytes());
    }

    pub fn set_bytes(&mut self, field: u64, bytes: &[u8]) {
        self.remove(field);
        self.0.push((field, Value::Bytes(bytes.into())));
    }

    pub fn push(&mut self, field: u64, message: &Self) {
        self.0.push((field, Value::Bytes(message.write())));
    }

    /// Changes all messages of a field; there must be one.
    pub fn each(&mut self, field: u64, mut edit: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        let mut found = false;
        for (number, value) in &mut self.0 {
            if *number == field
                && let Value::Bytes(bytes) = value
            {
                let mut message = Self::parse(bytes)?;
                edit(&mut message)?;
                *bytes = message.write();
                found = true;
            }
        }
        ensure!(found, "no field {field}");
        Ok(())
    }
}

/// Changes the messages of a file.
pub fn edit(path: &Path, change: impl FnOnce(&mut Vec<Message>) -> Result<()>) -> Result<()> {
    const INVENTORY: [u8; 4] = 0x5831_3116_u32.to_le_bytes();
    let bytes = fs::read(path)?;
    let head = if bytes.starts_with(&INVENTORY) { 4 } else { 8 };
    let (head, mut rest) = bytes.split_at_checked(head).context("too short")?;
    let mut messages = Vec::new();
    while !rest.is_empty() {
        let length = u32::from_le_bytes(take(&mut rest, 4)?.try_into()?);
        messages.push(Message::parse(take(&mut rest, usize::try_from(length)?)?)?);
    }
    change(&mut messages)?;
    let mut out = head.to_vec();
    for message in messages {
        let message = message.write();
        out.extend(u32::try_from(message.len())?.to_le_bytes());
        out.extend(message);
    }
    Ok(fs::write(path, out)?)
}

/// Changes the files whose names begin so; there must be one.
pub fn edit_all(dir: &Path, prefix: &str, change: impl Fn(&mut Vec<Message>) -> Result<()>) -> Result<()> {
    let paths = named(dir, prefix)?;
    paths.iter().try_for_each(|path| edit(path, &change))
}

/// The files whose names begin so; there is one at least.
pub fn named(dir: &Path, prefix: &str) -> Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(dir)?
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    ensure!(!paths.is_empty(), "no {prefix} in the image");
    Ok(paths)
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Result<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length).context("it ends too early")?;
    *bytes = rest;
    Ok(taken)
}

fn varint(bytes: &mut &[u8]) -> Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    anyhow::bail!("a number without end")
}

fn put(out: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        out.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    out.push(number.to_le_bytes()[0]);
}
