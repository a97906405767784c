//! What a signature states about a checkpoint.

use std::fmt;

const FIRST: &str = "firn";
const NAMESPACES: &str = "namespaces=";
const LAYER: &str = "layer=sha256:";
const NAME: &str = "name=";
const UNTIL: &str = "until=";
/// Stands for all namespaces.
const ALL: &str = "*";
/// Characters of a checksum.
const SUM: usize = 64;
/// Longest name of a checkpoint.
const MAX_NAME: usize = 512;

/// The namespaces of Kubernetes whose pods may be restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespaces {
    All,
    These(Vec<String>),
}

/// The trusted comment of a checkpoint's signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    pub namespaces: Namespaces,
    /// SHA-256 of the archive with the files that the container had written.
    pub layer: Option<String>,
    /// The only name by which pods may be restored from it: of the directory, in the store, or of the image.
    pub name: Option<String>,
    /// The last day on which they may, in UTC: `2027-01-31`.
    pub until: Option<String>,
}

impl Namespaces {
    /// Whether pods of this one may be restored.
    pub fn include(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::These(names) => names.iter().any(|name| name == namespace),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        if text == ALL {
            return Some(Self::All);
        }
        let names: Vec<String> = text.split(',').map(str::to_owned).collect();
        names
            .iter()
            .all(|name| is_namespace(name))
            .then_some(Self::These(names))
    }
}

impl fmt::Display for Namespaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str(ALL),
            Self::These(names) => f.write_str(&names.join(",")),
        }
    }
}

impl Statement {
    /// None for the comment of any other signature, and for one with words that this firn does not know: they
    /// may restrict it.
    pub fn parse(comment: &str) -> Option<Self> {
        let mut words = comment.split(' ');
        if words.next() != Some(FIRST) {
            return None;
        }
        let namespaces = Namespaces::parse(words.next()?.strip_prefix(NAMESPACES)?)?;
        let mut words = words.peekable();
        // Each is there at most once, in this order.
        let mut next = |prefix: &str, is_value: fn(&str) -> bool| match words.peek()?.strip_prefix(prefix) {
            Some(value) if is_value(value) => words.next().map(|_| value.to_owned()),
            _ => None,
        };
        let statement = Self {
            namespaces,
            layer: next(LAYER, is_sum),
            name: next(NAME, is_checkpoint_name),
            until: next(UNTIL, is_day),
        };
        // A word that was not taken has another value, or is not known.
        words.next().is_none().then_some(statement)
    }

    /// Whether a checkpoint may have this name.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.name.as_ref().is_none_or(|only| only == name)
    }

    /// Whether it still held on this day.
    pub(super) fn holds_on(&self, day: &str) -> bool {
        self.until.as_deref().is_none_or(|last| day <= last)
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FIRST} {NAMESPACES}{}", self.namespaces)?;
        let words = [(LAYER, &self.layer), (NAME, &self.name), (UNTIL, &self.until)];
        let mut words = words.into_iter();
        words.try_for_each(|(word, value)| match value {
            Some(value) => write!(f, " {word}{value}"),
            None => Ok(()),
        })
    }
}

pub(super) fn is_sum(text: &str) -> bool {
    text.len() == SUM && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether pods may name a checkpoint so.
fn is_checkpoint_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_NAME && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Whether it has the form of a day, so that days can be compared as text.
fn is_day(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let is_number = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
    let number = |part: &str| part.parse().unwrap_or(0);
    match parts[..] {
        [year, month, day] => {
            parts.iter().all(is_number)
                && [year.len(), month.len(), day.len()] == [4, 2, 2]
                && (1..=12).contains(&number(month))
                && (1..=31).contains(&number(day))
        }
        _ => false,
    }
}

/// Whether it can be the name of a namespace.
pub fn is_namespace(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.len() < 64 && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_is_read_as_it_is_written_and_nothing_else_is_one() {
        let sum = "0af1".repeat(16);
        for text in [
            "firn namespaces=*".to_owned(),
            format!("firn namespaces=ml,web-1 layer=sha256:{sum}"),
            "firn namespaces=ml name=registry.example:5000/ml/warm:1 until=2027-01-31".to_owned(),
            format!("firn namespaces=ml layer=sha256:{sum} name=warm"),
            "firn namespaces=* until=2027-12-01".to_owned(),
        ] {
            assert_eq!(Statement::parse(&text).unwrap().to_string(), text);
        }
        for text in [
            "",
            "timestamp:1633700835\tfile:firn.json",
            "firn",
            "firn namespaces=",
            "firn namespaces=ml,",
            "firn namespaces=ml,*",
            "firn namespaces=../ml",
            "firn namespaces=ml layer=sha256:ab",
            "firn namespaces=ml until=2027",
            "firn namespaces=ml until=2027-13-01",
            "firn namespaces=ml until=2027-00-01",
            "firn namespaces=ml until=2027-1-001",
            "firn namespaces=ml until=2027-01-32",
            "firn namespaces=ml until=+027-01-01",
            "firn namespaces=ml until=2027-01-01 name=warm",
            "firn namespaces=ml name=",
            "firn namespaces=ml name=a name=b",
            "firn namespaces=ml name=w\u{e4}rm",
            "firn namespaces=ml later=1",
            "firn layer=sha256:ab namespaces=ml",
            "firn  namespaces=ml",
        ] {
            assert_eq!(Statement::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_name_and_a_day_bind() {
        let of = |words: &str| Statement::parse(&format!("firn namespaces=*{words}")).unwrap();
        assert!(of("").has_name("any") && of("").holds_on("9999-12-31"));
        let bound = of(" name=warm until=2027-01-31");
        assert!(bound.has_name("warm") && !bound.has_name("warm2") && !bound.has_name("war"));
        assert!(bound.holds_on("2026-12-31") && bound.holds_on("2027-01-31"));
        assert!(!bound.holds_on("2027-02-01") && !bound.holds_on("2028-01-01"));
    }

    #[test]
    fn namespaces_are_compared_as_a_whole() {
        let of = |text: &str| {
            Statement::parse(&format!("firn namespaces={text}"))
                .unwrap()
                .namespaces
        };
        assert!(of("*").include("any") && of("a,ml").include("ml"));
        assert!(!of("ml").include("m") && !of("ml").include("mlx") && !of("ml").include(""));
    }
}
