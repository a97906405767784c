//! YAML with a limit on what its aliases expand to.
//!
//! An alias stands for everything below its anchor, aliases included: a few hundred bytes can expand to more
//! than the machine's memory. The text is therefore first walked without keeping anything, and refused if it
//! expands to too much.

use std::cell::Cell;
use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error, IgnoredAny, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};

use crate::FileError;

/// Largest number of values that a file may expand to, bytes of strings included.
pub(crate) const MAX_VALUES: usize = 8 << 20;

/// Deepest nesting of brackets, those in strings included. A CDI file has four levels.
const MAX_DEPTH: usize = 200;

/// Parses the text.
pub(crate) fn from_yaml<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FileError> {
    // The parser's time grows with the square of the nesting, which it limits too late.
    if depth(bytes) > MAX_DEPTH {
        return Err(FileError::TooDeep);
    }
    if bytes.contains(&b'*') {
        let left = Cell::new(MAX_VALUES);
        let walked = Walk(&left).deserialize(serde_yaml_ng::Deserializer::from_slice(bytes));
        if left.get() == 0 {
            return Err(FileError::TooMuch);
        }
        walked.map_err(FileError::Yaml)?;
    }
    serde_yaml_ng::from_slice(bytes).map_err(FileError::Yaml)
}

fn depth(bytes: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in bytes {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// Walks a value until the limit is used up.
#[derive(Clone, Copy)]
struct Walk<'a>(&'a Cell<usize>);

impl Walk<'_> {
    fn take<E: Error>(self, more: usize) -> Result<(), E> {
        self.0.set(self.0.get().saturating_sub(1 + more));
        match self.0.get() {
            0 => Err(E::custom("it stands for too much")),
            _ => Ok(()),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

macro_rules! scalars {
    ($($visit:ident: $type:ty,)*) => {$(
        fn $visit<E: Error>(self, _: $type) -> Result<(), E> {
            self.take(0)
        }
    )*};
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    scalars! {
        visit_bool: bool,
        visit_u64: u64,
        visit_i64: i64,
        visit_u128: u128,
        visit_i128: i128,
        visit_f64: f64,
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.take(0)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.take(text.len())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        self.take(0)?;
        while values.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> Result<(), A::Error> {
        self.take(0)?;
        while values.next_key_seed(self)?.is_some() {
            values.next_value_seed(self)?;
        }
        Ok(())
    }

    /// A value with a tag.
    fn visit_enum<A: EnumAccess<'de>>(self, value: A) -> Result<(), A::Error> {
        self.take(0)?;
        let (IgnoredAny, tagged) = value.variant()?;
        tagged.newtype_variant_seed(self)
    }
}
