//! How the sections of a TOML file are read.
//!
//! A section is a struct whose fields are the keys, each with its type and default; one visitor reads every
//! section. Derived code has a visitor per section, which made up a thirtieth of the shim.

use std::borrow::Borrow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

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

/// Reads a file of such sections.
pub(crate) fn read(
    text: &str,
    section: &mut dyn Section,
    unknown: UnknownKeys,
) -> Result<(), toml::de::Error> {
    let slot = &mut Slot::Section(section);
    Target { slot, unknown }.deserialize(toml::Deserializer::parse(text)?)
}

struct Table<'a> {
    section: &'a mut dyn Section,
    unknown: UnknownKeys,
}

impl<'de> Visitor<'de> for Table<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let unknown = self.unknown;
        let (names, mut slots): (Vec<_>, Vec<_>) = self.section.keys().into_iter().unzip();
        while let Some(known) = map.next_key_seed(Key {
            names: &names,
            unknown,
        })? {
            match known {
                Some(at) => map.next_value_seed(Target {
                    slot: &mut slots[at],
                    unknown,
                })?,
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// The index of a key among those of its section. An error here points to the key, not to its table.
struct Key<'a> {
    names: &'a [String],
    unknown: UnknownKeys,
}

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Option<usize>, D::Error> {
        let key = String::deserialize(from)?;
        match self.names.iter().position(|name| *name == key) {
            None if self.unknown == UnknownKeys::Refuse => Err(unknown_name("key", &key, self.names)),
            known => Ok(known),
        }
    }
}

struct Target<'a, 'b> {
    slot: &'b mut Slot<'a>,
    unknown: UnknownKeys,
}

impl<'de> DeserializeSeed<'de> for Target<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        let unknown = self.unknown;
        match self.slot {
            Slot::Section(section) => {
                let section = &mut **section;
                from.deserialize_map(Table { section, unknown })?;
            }
            Slot::Bool(value) => **value = bool::deserialize(from)?,
            Slot::Number(value) => **value = u32::deserialize(from)?,
            Slot::Text(value) => **value = String::deserialize(from)?,
            Slot::Texts(value) => **value = Vec::deserialize(from)?,
            Slot::Paths(value) => **value = Vec::deserialize(from)?,
            Slot::AbsolutePath(value) => {
                let path = PathBuf::from(String::deserialize(from)?);
                if !path.is_absolute() {
                    return Err(D::Error::custom(format_args!("not an absolute path: {path:?}")));
                }
                **value = Some(path);
            }
            Slot::Duration(value) => {
                let text = String::deserialize(from)?;
                **value = parse_duration(&text).ok_or_else(|| not_a_duration(&text))?;
            }
            Slot::Size(value) => {
                let text = String::deserialize(from)?;
                **value = Some(parse_size(&text).ok_or_else(|| not_a_size(&text))?);
            }
            Slot::Word(words, set) => {
                let word = String::deserialize(from)?;
                match words.iter().position(|known| *known == word) {
                    Some(at) => set(at),
                    None => return Err(unknown_name("value", &word, words)),
                }
            }
        }
        Ok(())
    }
}

fn not_a_duration<E: Error>(text: &str) -> E {
    E::custom(format_args!(
        "not a duration: {text:?}; write a whole number and a unit of ms, s, m or h, as in \"90s\" or \"10m\""
    ))
}

fn not_a_size<E: Error>(text: &str) -> E {
    E::custom(format_args!(
        "not a size: {text:?}; write a whole number and a unit of MiB, GiB or TiB, as in \"100GiB\""
    ))
}

fn unknown_name<E: Error>(what: &str, name: &str, known: &[impl Borrow<str>]) -> E {
    let known = known.join("`, `");
    E::custom(format_args!("unknown {what} `{name}`, expected one of `{known}`"))
}
