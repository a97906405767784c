//! The words by which users call containers: an id, the name that nerdctl has given, and the beginning of an
//! id that nerdctl or CRI has made, of which they show 12 or 13 digits.

use std::fs;
use std::path::{Path, PathBuf};

use firn_oci::Spec;

use super::{CallError, Container, Containerd};

/// nerdctl's name of a container: a label in containerd, and an annotation of the spec.
const NERDCTL_NAME: &str = "nerdctl/name";

/// Annotation in which nerdctl names its directory of a container.
pub const NERDCTL_STATE: &str = "nerdctl/state-dir";

/// Digits of an id that nerdctl or CRI makes.
const DIGITS: usize = 64;

/// Fewer digits are taken for a name.
const LEAST: usize = 4;

impl Containerd {
    /// The containers that a user may mean by this word: one, none, or several.
    pub async fn called(&self, word: &str) -> Result<Vec<Container>, CallError> {
        match self.container(word).await {
            Err(error) if error.is_absent() => {}
            found => return Ok(vec![found?]),
        }
        let mut found = self.with_label(NERDCTL_NAME, word).await?;
        if found.is_empty() && is_hexadecimal(word) {
            let listed = self.list(vec![format!("id~=\"^{word}\"")]).await?;
            let is_meant = |container: &Container| begins(&container.id, word);
            found = listed.into_iter().filter(is_meant).collect();
        }
        Ok(found)
    }
}

/// The bundles below a namespace's directory that a user may mean by this word.
pub fn bundles_called(namespace: &Path, word: &str) -> Vec<PathBuf> {
    let exact = namespace.join(word);
    if exact.is_dir() {
        return vec![exact];
    }
    let entries = fs::read_dir(namespace).into_iter().flatten().flatten();
    let bundles: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    let named = |bundle: &&PathBuf| {
        let spec = Spec::load(bundle).ok();
        spec.is_some_and(|spec| spec.annotation(NERDCTL_NAME) == Some(word))
    };
    let found: Vec<PathBuf> = bundles.iter().filter(named).cloned().collect();
    if !found.is_empty() {
        return found;
    }
    let begins = |bundle: &PathBuf| begins(&bundle.file_name().unwrap_or_default().to_string_lossy(), word);
    bundles.into_iter().filter(begins).collect()
}

fn is_hexadecimal(text: &str) -> bool {
    text.len() >= LEAST && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn begins(id: &str, word: &str) -> bool {
    id.len() == DIGITS && is_hexadecimal(id) && is_hexadecimal(word) && id.starts_with(word)
}

/// What containerd takes for the id of a container and the name of a namespace, which never is a path.
pub fn is_id(word: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    word.len() <= 76 && word.chars().all(fits) && ends(word.chars().next()) && ends(word.chars().last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_in_a_checkpoint_is_no_path() {
        assert!(["job", "a-1_b.c", "0"].into_iter().all(is_id));
        let long = "a".repeat(77);
        for word in [
            "",
            ".",
            "..",
            "../../srv/x",
            "/srv/x",
            "a/b",
            "-a",
            "a-",
            "a b",
            &long,
        ] {
            assert!(!is_id(word), "{word}");
        }
    }

    const ID: &str = "3f0c8e1b9a4d5f60718293a4b5c6d7e8f90123456789abcdef0123456789abcd";

    #[test]
    fn a_bundle_is_found_by_id_by_nerdctls_name_and_by_the_beginning_of_a_long_id() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = |id: &str, name: &str| {
            let bundle = dir.path().join(id);
            fs::create_dir(&bundle).unwrap();
            let spec = serde_json::json!({"annotations": {NERDCTL_NAME: name}});
            fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
            bundle
        };
        let other = ID.replace("3f0c8e1b", "3f0cffff");
        let (web, db, short) = (bundle(ID, "web"), bundle(&other, "db"), bundle("3f0c", "web"));
        let called = |word: &str| {
            let mut found = bundles_called(dir.path(), word);
            found.sort();
            found
        };
        assert_eq!(called(ID), [&*web]);
        assert_eq!(called("3f0c"), [&*short], "an id comes first");
        assert_eq!(called("db"), [&*db]);
        assert_eq!(called("web"), [short, web.clone()], "both have the name");
        assert_eq!(called("3f0c8e1b9a4d"), [web]);
        assert!(called("3f0").is_empty() && called("job").is_empty());
    }
}
