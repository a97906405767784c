//! What a signature states about a checkpoint.

use std::fmt;

const FIRST: &str = "firn";
const NAMESPACES: &str = "namespaces=";
const LAYER: &str = "layer=sha256:";
/// Stands for all namespaces.
const ALL: &str = "*";
/// Characters of a checksum.
const SUM: usize = 64;

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
        let layer = match words.next() {
            None => None,
            Some(word) => {
                let sum = word.strip_prefix(LAYER)?;
                let is_sum = sum.len() == SUM && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
                Some(is_sum.then(|| sum.to_owned())?)
            }
        };
        words.next().is_none().then_some(Self { namespaces, layer })
    }
}

impl fmt::Display for Statement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FIRST} {NAMESPACES}{}", self.namespaces)?;
        match &self.layer {
            Some(sum) => write!(f, " {LAYER}{sum}"),
            None => Ok(()),
        }
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
            "firn layer=sha256:ab namespaces=ml",
            "firn  namespaces=ml",
        ] {
            assert_eq!(Statement::parse(text), None, "{text}");
        }
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
