//! Spelling, by the dictionaries of `typos`: known misspellings anywhere, and in prose British spelling with
//! `-ise`.

use std::borrow::Cow;
use std::collections::BTreeSet;

use typos::tokens::{Identifier, Tokenizer, Word};
use typos::{Dictionary, Status};
use typos_vars::{Category, CategorySet};
use unicase::UniCase;

/// A misspelled word.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Misspelled {
    pub(crate) offset: usize,
    pub(crate) word: String,
    pub(crate) corrections: Vec<String>,
}

/// What is looked up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Known misspellings.
    Errors,
    /// Words that British English spells in another way.
    Variants,
}

/// The dictionary without the words that are allowed.
struct Lookup<'a> {
    wanted: Wanted,
    allowed: &'a BTreeSet<String>,
}

impl Dictionary for Lookup<'_> {
    fn correct_ident<'s>(&'s self, ident: Identifier<'_>) -> Option<Status<'s>> {
        let allowed = self.allowed.contains(&ident.token().to_lowercase());
        allowed.then_some(Status::Valid)
    }

    fn correct_word<'s>(&'s self, word: Word<'_>) -> Option<Status<'s>> {
        if self.allowed.contains(&word.token().to_lowercase()) {
            return None;
        }
        let word = UniCase::new(word.token());
        let corrections = match self.wanted {
            Wanted::Errors => typos_dict::WORD.find(&word).copied()?,
            Wanted::Variants => variants(&word)?,
        };
        let corrections = corrections.iter().map(|word| Cow::Borrowed(*word));
        Some(Status::Corrections(corrections.collect()))
    }
}

/// The British spellings of a word that is not one itself.
fn variants(word: &UniCase<&str>) -> Option<&'static [&'static str]> {
    let entries = typos_vars::VARS.find(word)?;
    let british = |bits: u8| CategorySet::from_bits_truncate(bits).contains(Category::BritishIse);
    if entries.iter().any(|(bits, _)| british(*bits)) {
        return None;
    }
    let (_, spellings) = entries.first()?;
    Some(typos_vars::corrections(Category::BritishIse, **spellings))
}

/// The misspelled words of a text.
pub(crate) fn misspelled(text: &str, wanted: Wanted, allowed: &BTreeSet<String>) -> Vec<Misspelled> {
    let (tokenizer, lookup) = (Tokenizer::new(), Lookup { wanted, allowed });
    let found = typos::check_str(text, &tokenizer, &lookup).map(|typo| Misspelled {
        offset: typo.byte_offset,
        word: typo.typo.clone().into_owned(),
        corrections: match typo.corrections {
            Status::Corrections(words) => words.into_iter().map(Cow::into_owned).collect(),
            Status::Valid | Status::Invalid => Vec::new(),
        },
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corrected(text: &str, wanted: Wanted) -> Vec<String> {
        let found = misspelled(text, wanted, &BTreeSet::from(["sanitizer".to_owned()]));
        found.into_iter().map(|word| word.corrections.join("|")).collect()
    }

    #[test]
    fn known_errors_are_found_also_in_identifiers() {
        assert_eq!(
            corrected(&["reci", "eve_all seper", "ateThem"].concat(), Wanted::Errors),
            ["receive", "separate"]
        );
        assert!(corrected("colour color", Wanted::Errors).is_empty());
    }

    #[test]
    fn prose_is_british() {
        assert_eq!(
            corrected("color behavior finalize", Wanted::Variants),
            ["colour", "behaviour", "finalise"]
        );
        assert!(corrected("colour behaviour honour sanitizer", Wanted::Variants).is_empty());
    }
}
