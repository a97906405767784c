//! The span of a client, as containerd 2 sends it with a call: `traceparent` of the W3C's trace context.

use serde::{Deserialize, Serialize};

/// A trace and the span in it that is the parent: `00-TRACE-SPAN-FLAGS`, in lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TraceParent(String);

impl TraceParent {
    /// None if it names no span. Later versions begin as version 00 does.
    pub fn parse(text: &str) -> Option<Self> {
        let (head, rest) = (text.get(..55)?, &text[55..]);
        let parts: Vec<&str> = head.split('-').collect();
        let is_hex = |part: &str| {
            part.bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        let lengths = parts.iter().map(|part| part.len());
        let is_one = lengths.eq([2, 32, 16, 2]) && parts.iter().all(|part| is_hex(part));
        let names = is_one
            && [parts[1], parts[2]]
                .iter()
                .all(|id| id.bytes().any(|b| b != b'0'));
        let is_known = match parts[0] {
            "00" => rest.is_empty(),
            "ff" => false,
            _ => rest.is_empty() || rest.starts_with('-'),
        };
        (names && is_known).then(|| Self(head.to_owned()))
    }

    /// The text, `00-...`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Of the trace: 32 digits.
    pub fn trace_id(&self) -> &str {
        self.0.get(3..35).unwrap_or_default()
    }

    /// Of the span: 16 digits.
    pub fn span_id(&self) -> &str {
        self.0.get(36..52).unwrap_or_default()
    }

    /// Whether the client has its trace recorded.
    pub fn is_sampled(&self) -> bool {
        let flags = self
            .0
            .get(53..55)
            .and_then(|flags| u8::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331";

    #[test]
    fn a_span_is_found_and_nothing_else_is_one() {
        let parent = TraceParent::parse(&format!("00-{ID}-01")).unwrap();
        assert_eq!(parent.trace_id(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(parent.span_id(), "b7ad6b7169203331");
        assert!(parent.is_sampled());
        assert!(!TraceParent::parse(&format!("00-{ID}-02")).unwrap().is_sampled());
        assert!(TraceParent::parse(&format!("01-{ID}-01-more")).is_some());
        let zeros = "00000000000000000000000000000000-0000000000000000";
        for text in [
            String::new(),
            ID.to_owned(),
            format!("00-{zeros}-01"),
            format!("ff-{ID}-01"),
            format!("00-{ID}-01-more"),
            format!("01-{ID}-01more"),
            format!("00-{}-01", ID.to_uppercase()),
            format!("00-{ID}-é"),
            "é".repeat(40),
        ] {
            assert_eq!(TraceParent::parse(&text), None, "{text:?}");
        }
    }
}
