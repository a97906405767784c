//! How the sections of a TOML file are read.
//!
//! A section is a struct whose fields are the keys, each with its type and default. A mistake does not end
//! the reading: the keys that are right get their values, and all mistakes are returned. Derived code has a
//! visitor per section, which made up a thirtieth of the shim.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use toml::de::{DeArray, DeTable, DeValue};

use crate::mistake::{Mistake, MistakeKind};
use crate::quantity::{parse_duration, parse_size};

/// Declares sections. The key of a field has hyphens where the field's name has underscores.
macro_rules! sections {
    ($(
        $(#[$doc:meta])*
        $vis:vis struct $name:ident {
            $($(#[$field_doc:meta])* $field_vis:vis $field:ident: $type:ty = $default:expr,)*
        }
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        $vis struct $name {
            $($(#[$field_doc])* $field_vis $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }

        impl $crate::section::Section for $name {
            fn keys(&mut self) -> Vec<(String, $crate::section::Slot<'_>)> {
                vec![$((
                    stringify!($field).replace('_', "-"),
                    $crate::section::Value::slot(&mut self.$field),
                ),)*]
            }
        }

        impl $crate::section::Value for $name {
            fn slot(&mut self) -> $crate::section::Slot<'_> {
                $crate::section::Slot::Section(self)
            }
        }
    )*};
}

pub(crate) use sections;

/// A table of the file. Keys that the file does not have keep their values.
pub(crate) trait Section {
    /// Each key with the place of its value.
    fn keys(&mut self) -> Vec<(String, Slot<'_>)>;
}

/// Where a value goes, and which values are valid.
pub(crate) enum Slot<'a> {
    Section(&'a mut dyn Section),
    Bool(&'a mut bool),
    Number(&'a mut u32),
    Text(&'a mut String),
    Texts(&'a mut Vec<String>),
    Paths(&'a mut Vec<PathBuf>),
    AbsolutePath(&'a mut Option<PathBuf>),
    Duration(&'a mut Duration),
    Size(&'a mut Option<u64>),
    /// One of these words; the function gets the index of the one that was found.
    Word(Vec<&'static str>, Box<dyn FnMut(usize) + 'a>),
}

/// A type of values in the file.
pub(crate) trait Value {
    fn slot(&mut self) -> Slot<'_>;
}

macro_rules! values {
    ($($type:ty => $slot:ident,)*) => {$(
        impl Value for $type {
            fn slot(&mut self) -> Slot<'_> {
                Slot::$slot(self)
            }
        }
    )*};
}

values! {
    bool => Bool,
    u32 => Number,
    String => Text,
    Vec<String> => Texts,
    Vec<PathBuf> => Paths,
    Option<PathBuf> => AbsolutePath,
    Duration => Duration,
    Option<u64> => Size,
}

/// A choice, which the file names by a word.
pub(crate) trait Word: Copy + 'static {
    const WORDS: &'static [(&'static str, Self)];
}

/// The choice that a word stands for.
pub(crate) fn of_word<T: Word>(word: &str) -> Option<T> {
    let named = T::WORDS.iter().find(|(known, _)| *known == word);
    named.map(|(_, choice)| *choice)
}

impl<T: Word> Value for T {
    fn slot(&mut self) -> Slot<'_> {
        let names = T::WORDS.iter().map(|(word, _)| *word).collect();
        Slot::Word(names, Box::new(|at| *self = T::WORDS[at].1))
    }
}

/// What becomes of keys that a section does not have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnknownKeys {
    Refuse,
    Ignore,
}

/// What was found in a file.
#[derive(Debug, Default)]
pub(crate) struct FileReport {
    pub mistakes: Vec<Mistake>,
    /// The line of each key that was read.
    pub lines: BTreeMap<String, usize>,
}

/// Reads a file of such sections.
pub(crate) fn read(text: &str, section: &mut dyn Section, unknown: UnknownKeys) -> FileReport {
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader {
        text,
        unknown,
        found: FileReport::default(),
    };
    for error in &errors {
        let at = error.span().map_or(0, |span| span.start);
        reader.mistake(at, String::new(), MistakeKind::Syntax, error.message().to_owned());
    }
    // What the parser makes of a file with syntax errors need not be what the operator means.
    if errors.is_empty() {
        reader.table(table.get_ref(), section, "");
    }
    reader.found.mistakes.sort_by_key(|mistake| mistake.line);
    reader.found
}

struct Reader<'t> {
    text: &'t str,
    unknown: UnknownKeys,
    found: FileReport,
}

impl Reader<'_> {
    fn table(&mut self, table: &DeTable<'_>, section: &mut dyn Section, name: &str) {
        let (names, mut slots): (Vec<_>, Vec<_>) = section.keys().into_iter().unzip();
        for (key, value) in table {
            let full = match name {
                "" => key.get_ref().to_string(),
                name => format!("{name}.{}", key.get_ref()),
            };
            let at = key.span().start;
            let Some(known) = names.iter().position(|name| name == key.get_ref()) else {
                if self.unknown == UnknownKeys::Refuse {
                    let (what, kind) = match name {
                        "" => ("section", MistakeKind::Section),
                        _ => ("key", MistakeKind::Key),
                    };
                    self.mistake(at, full, kind, unknown_name(what, key.get_ref(), &names));
                }
                continue;
            };
            self.found.lines.insert(full.clone(), self.line(at));
            match (&mut slots[known], value.get_ref()) {
                (Slot::Section(section), DeValue::Table(table)) => self.table(table, &mut **section, &full),
                (slot, value) => {
                    if let Err(problem) = set(slot, value) {
                        self.mistake(at, full, MistakeKind::Value, problem);
                    }
                }
            }
        }
    }

    fn mistake(&mut self, at: usize, key: String, kind: MistakeKind, problem: String) {
        let line = self.line(at);
        self.found.mistakes.push(Mistake {
            line,
            key,
            kind,
            problem,
        });
    }

    fn line(&self, at: usize) -> usize {
        let before = self.text.as_bytes().iter().take(at);
        1 + before.filter(|byte| **byte == b'\n').count()
    }
}

/// Gives a key its value.
fn set(slot: &mut Slot<'_>, value: &DeValue<'_>) -> Result<(), String> {
    match (slot, value) {
        (Slot::Bool(to), DeValue::Boolean(value)) => **to = *value,
        (Slot::Number(to), DeValue::Integer(value)) => {
            let number = u32::from_str_radix(value.as_str(), value.radix());
            **to = number.map_err(|_| format!("not a number from 0 to {}: {}", u32::MAX, value.as_str()))?;
        }
        (Slot::Text(to), DeValue::String(value)) => **to = value.to_string(),
        (Slot::Texts(to), DeValue::Array(values)) => **to = texts(values)?,
        (Slot::Paths(to), DeValue::Array(values)) => {
            **to = texts(values)?.into_iter().map(PathBuf::from).collect();
        }
        (Slot::AbsolutePath(to), DeValue::String(value)) => {
            let path = PathBuf::from(&**value);
            if !path.is_absolute() {
                return Err(format!("not an absolute path: {path:?}"));
            }
            **to = Some(path);
        }
        (Slot::Duration(to), DeValue::String(text)) => {
            **to = parse_duration(text).ok_or_else(|| not_a_duration(text))?;
        }
        (Slot::Size(to), DeValue::String(text)) => {
            **to = Some(parse_size(text).ok_or_else(|| not_a_size(text))?);
        }
        (Slot::Word(words, set), DeValue::String(word)) => {
            match words.iter().position(|known| *known == &**word) {
                Some(at) => set(at),
                None => return Err(unknown_name("value", word, words)),
            }
        }
        (slot, value) => return Err(format!("{} in the place of {}", value.type_str(), slot.expects())),
    }
    Ok(())
}

impl Slot<'_> {
    fn expects(&self) -> &'static str {
        match self {
            Self::Section(_) => "a section",
            Self::Bool(_) => "true or false",
            Self::Number(_) => "a number",
            Self::Text(_) | Self::AbsolutePath(_) | Self::Word(..) => "a text",
            Self::Texts(_) | Self::Paths(_) => "a list of texts",
            Self::Duration(_) => "a duration, as \"90s\"",
            Self::Size(_) => "a size, as \"100GiB\"",
        }
    }
}

fn texts(values: &DeArray<'_>) -> Result<Vec<String>, String> {
    let text = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.to_string()),
        other => Err(format!("{} in the place of a text", other.type_str())),
    };
    values.iter().map(|value| text(value.get_ref())).collect()
}

fn not_a_duration(text: &str) -> String {
    format!(
        "not a duration: {text:?}; write a whole number and a unit of ms, s, m or h, as in \"90s\" or \"10m\""
    )
}

fn not_a_size(text: &str) -> String {
    format!("not a size: {text:?}; write a whole number and a unit of MiB, GiB or TiB, as in \"100GiB\"")
}

fn unknown_name(what: &str, name: &str, known: &[impl Borrow<str>]) -> String {
    let known = known.join("`, `");
    format!("unknown {what} `{name}`, expected one of `{known}`")
}
