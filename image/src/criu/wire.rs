//! Protocol buffers as CRIU's images hold them, read field by field.
//!
//! Strict where readers differ, so that CRIU cannot read anything else from the same bytes: a field that
//! occurs twice, a truncated number and a text with a NUL are errors.

/// Bytes that are no message, or not one that CRIU writes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("field {field} is not as CRIU writes it")]
pub(super) struct WireError {
    /// Number of the field; 0 when not even that can be read.
    pub field: u32,
}

#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of fixed width: in no message that is read here.
    Fixed,
}

/// A message.
#[derive(Clone, Debug)]
pub(super) struct Message<'a>(Vec<(u32, Value<'a>)>);

/// A field at the beginning of `bytes`.
fn next<'a>(bytes: &mut &'a [u8]) -> Result<(u32, Value<'a>), WireError> {
    let tag = u32::try_from(varint(bytes, 0)?).map_err(|_| WireError { field: 0 })?;
    let field = tag >> 3;
    if field == 0 {
        return Err(WireError { field });
    }
    let value = match tag & 7 {
        0 => Value::Number(varint(bytes, field)?),
        2 => {
            let length = varint(bytes, field)?;
            let length = usize::try_from(length).map_err(|_| WireError { field })?;
            Value::Bytes(take(bytes, length, field)?)
        }
        kind @ (1 | 5) => {
            take(bytes, if kind == 1 { 8 } else { 4 }, field)?;
            Value::Fixed
        }
        _ => return Err(WireError { field }),
    };
    Ok((field, value))
}

/// A message without the fields that `drop` selects; all others keep their bytes.
pub(super) fn without(mut message: &[u8], drop: impl Fn(u32) -> bool) -> Result<Vec<u8>, WireError> {
    let mut kept = Vec::new();
    while !message.is_empty() {
        let start = message;
        let (field, _) = next(&mut message)?;
        if !drop(field) {
            kept.extend_from_slice(&start[..start.len() - message.len()]);
        }
    }
    Ok(kept)
}

/// A message in which each field `field`, a message of its own, has become what `edit` makes of it; none
/// leaves it as it is.
pub(super) fn replace(
    mut message: &[u8],
    field: u32,
    edit: impl Fn(&[u8]) -> Result<Option<Vec<u8>>, WireError>,
) -> Result<Vec<u8>, WireError> {
    let mut edited = Vec::with_capacity(message.len());
    while !message.is_empty() {
        let start = message;
        let (number, value) = next(&mut message)?;
        match value {
            Value::Bytes(bytes)
                if number == field
                    && let Some(new) = edit(bytes)? =>
            {
                push_bytes(&mut edited, field, &new);
            }
            _ => edited.extend_from_slice(&start[..start.len() - message.len()]),
        }
    }
    Ok(edited)
}

/// Appends a number to a message.
pub(super) fn push_number(message: &mut Vec<u8>, field: u32, number: u64) {
    push_varint(message, u64::from(field) << 3);
    push_varint(message, number);
}

/// Appends bytes, which may be a message, to a message.
pub(super) fn push_bytes(message: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    push_varint(message, u64::from(field) << 3 | 2);
    push_varint(message, bytes.len() as u64);
    message.extend_from_slice(bytes);
}

fn push_varint(message: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        message.push(number.to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    message.push(number.to_le_bytes()[0]);
}

impl<'a> Message<'a> {
    pub(super) fn parse(mut bytes: &'a [u8]) -> Result<Self, WireError> {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            fields.push(next(&mut bytes)?);
        }
        Ok(Self(fields))
    }

    fn all(&self, field: u32) -> impl Iterator<Item = Value<'a>> {
        let same = self.0.iter().filter(move |(number, _)| *number == field);
        same.map(|(_, value)| *value)
    }

    fn one(&self, field: u32) -> Result<Option<Value<'a>>, WireError> {
        let mut all = self.all(field);
        let value = all.next();
        match all.next() {
            None => Ok(value),
            Some(_) => Err(WireError { field }),
        }
    }

    /// Whether the field is there at all.
    pub(super) fn has(&self, field: u32) -> bool {
        self.all(field).next().is_some()
    }

    /// A number of 64 bits.
    pub(super) fn long(&self, field: u32) -> Result<Option<u64>, WireError> {
        match self.one(field)? {
            None => Ok(None),
            Some(Value::Number(number)) => Ok(Some(number)),
            Some(_) => Err(WireError { field }),
        }
    }

    /// A number of 32 bits without sign.
    pub(super) fn number(&self, field: u32) -> Result<Option<u32>, WireError> {
        let number = self.long(field)?.map(u32::try_from).transpose();
        number.map_err(|_| WireError { field })
    }

    /// A number with a sign, written as one of 64 bits.
    pub(super) fn signed(&self, field: u32) -> Result<Option<i32>, WireError> {
        let number = self
            .long(field)?
            .map(|number| i32::try_from(number.cast_signed()));
        number.transpose().map_err(|_| WireError { field })
    }

    /// A number of 64 bits that has to be there.
    pub(super) fn required_long(&self, field: u32) -> Result<u64, WireError> {
        self.long(field)?.ok_or(WireError { field })
    }

    /// A number that has to be there.
    pub(super) fn required(&self, field: u32) -> Result<u32, WireError> {
        self.number(field)?.ok_or(WireError { field })
    }

    /// All numbers of 32 bits of a field, packed or not.
    pub(super) fn numbers(&self, field: u32) -> Result<Vec<u32>, WireError> {
        let mut numbers = Vec::new();
        for value in self.all(field) {
            match value {
                Value::Number(number) => numbers.push(number),
                Value::Bytes(mut packed) => {
                    while !packed.is_empty() {
                        numbers.push(varint(&mut packed, field)?);
                    }
                }
                Value::Fixed => return Err(WireError { field }),
            }
        }
        let numbers = numbers.into_iter().map(u32::try_from).collect::<Result<_, _>>();
        numbers.map_err(|_| WireError { field })
    }

    pub(super) fn bytes(&self, field: u32) -> Result<Option<&'a [u8]>, WireError> {
        match self.one(field)? {
            None => Ok(None),
            Some(Value::Bytes(bytes)) => Ok(Some(bytes)),
            Some(_) => Err(WireError { field }),
        }
    }

    /// A text, which ends where a C program sees its end.
    pub(super) fn text(&self, field: u32) -> Result<Option<&'a str>, WireError> {
        self.bytes(field)?.map(|bytes| text(bytes, field)).transpose()
    }

    /// A text that has to be there.
    pub(super) fn required_text(&self, field: u32) -> Result<&'a str, WireError> {
        self.text(field)?.ok_or(WireError { field })
    }

    pub(super) fn texts(&self, field: u32) -> Result<Vec<String>, WireError> {
        self.bytes_of_each(field, |bytes| text(bytes, field).map(str::to_owned))
    }

    /// A message within this one.
    pub(super) fn message(&self, field: u32) -> Result<Option<Self>, WireError> {
        self.bytes(field)?.map(Self::parse).transpose()
    }

    /// What is read from each of the messages within this one.
    pub(super) fn each<T>(
        &self,
        field: u32,
        read: impl Fn(&Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        self.bytes_of_each(field, |bytes| read(&Self::parse(bytes)?))
    }

    fn bytes_of_each<T>(
        &self,
        field: u32,
        read: impl Fn(&'a [u8]) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let all = self.all(field).map(|value| match value {
            Value::Bytes(bytes) => read(bytes),
            _ => Err(WireError { field }),
        });
        all.collect()
    }
}

fn text(bytes: &[u8], field: u32) -> Result<&str, WireError> {
    let text = std::str::from_utf8(bytes).ok();
    text.filter(|text| !text.contains('\0'))
        .ok_or(WireError { field })
}

fn take<'a>(bytes: &mut &'a [u8], length: usize, field: u32) -> Result<&'a [u8], WireError> {
    let (taken, rest) = bytes.split_at_checked(length).ok_or(WireError { field })?;
    *bytes = rest;
    Ok(taken)
}

fn varint(bytes: &mut &[u8], field: u32) -> Result<u64, WireError> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1, field)?[0];
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return Err(WireError { field });
        }
        number |= part << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(WireError { field })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_number_and_kind() {
        // 1: 150, 2: "ab", 3: [1, 2] unpacked, 4: [3, 270] packed, 5: {1: 1}
        let bytes = [
            0x08, 0x96, 0x01, 0x12, 2, b'a', b'b', 0x18, 1, 0x18, 2, 0x22, 3, 3, 0x8e, 0x02, 0x2a, 2, 8, 1,
        ];
        let message = Message::parse(&bytes).unwrap();
        assert_eq!(message.number(1), Ok(Some(150)));
        assert_eq!(message.text(2), Ok(Some("ab")));
        assert_eq!(message.numbers(3), Ok(vec![1, 2]));
        assert_eq!(message.numbers(4), Ok(vec![3, 270]));
        assert_eq!(message.message(5).unwrap().unwrap().required(1), Ok(1));
        assert_eq!(message.number(6), Ok(None));
        assert!(message.has(5) && !message.has(6));
        assert_eq!(message.number(2), Err(WireError { field: 2 }), "another kind");
        assert_eq!(message.bytes(1), Err(WireError { field: 1 }), "another kind");
        assert_eq!(message.number(3), Err(WireError { field: 3 }), "twice");
    }

    #[test]
    fn numbers_keep_their_sign_and_their_width() {
        let minus = [&[8][..], &[0xff; 9], &[1]].concat();
        assert_eq!(Message::parse(&minus).unwrap().signed(1), Ok(Some(-1)));
        assert!(Message::parse(&minus).unwrap().number(1).is_err());
        let long = [&[8][..], &[0xff; 9], &[3]].concat();
        assert!(Message::parse(&long).is_err(), "more than 64 bits");
        assert!(Message::parse(&[&[8][..], &[0x80; 10], &[0]].concat()).is_err());
    }

    #[test]
    fn what_is_cut_off_or_has_a_nul_is_refused() {
        for bytes in [&[8][..], &[0x12, 5, b'a'], &[0], &[0x0b], &[0x0d, 1, 2]] {
            assert!(Message::parse(bytes).is_err(), "{bytes:?}");
        }
        let nul = Message::parse(&[0x12, 3, b'a', 0, b'b']).unwrap();
        assert!(nul.text(2).is_err() && nul.bytes(2).is_ok());
    }
    #[test]
    fn numbers_of_fixed_width_are_passed_over_and_never_taken_for_others() {
        // 1: 64 bits, 2: 32 bits, 3: 7
        let bytes = [&[0x09][..], &[1; 8], &[0x15], &[1; 4], &[0x18, 7]].concat();
        let message = Message::parse(&bytes).unwrap();
        assert_eq!(message.number(3), Ok(Some(7)));
        for field in [1, 2] {
            assert!(message.number(field).is_err() && message.numbers(field).is_err());
        }
    }
}
