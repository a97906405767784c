//! What an annotation of a pod names: where the checkpoint of a container is.

use firn_config::names;

use super::NameError;

/// Before the name of an image in containerd's store.
const IMAGE: &str = "image:";
/// Before a name in the store.
const STORE: &str = "store:";

/// Where a checkpoint is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A directory of this name in the namespace's directory.
    Directory(String),
    /// An image of this name in containerd's store.
    Image(String),
    /// A checkpoint that the node's store has under this name.
    Store(String),
}

impl Source {
    fn parse(text: &str) -> Option<Self> {
        if let Some(image) = text.strip_prefix(IMAGE) {
            return is_image(image).then(|| Self::Image(image.to_owned()));
        }
        match text.strip_prefix(STORE) {
            Some(name) => is_name(name).then(|| Self::Store(name.to_owned())),
            None => is_name(text).then(|| Self::Directory(text.to_owned())),
        }
    }

    /// What the annotation `NAME` or `CONTAINER=NAME,...` has for a container.
    pub fn of(value: &str, container: &str) -> Result<Option<Self>, NameError> {
        let wrong = || NameError::Value {
            key: names::ANNOTATION_RESTORE_FROM,
            value: value.to_owned(),
        };
        let mut found = None;
        for part in value.split(',').map(str::trim) {
            let (of, name) = match part.split_once('=') {
                Some((of, name)) => (of, name),
                None if value == part => (container, part),
                None => return Err(wrong()),
            };
            let source = Self::parse(name).filter(|_| is_name(of)).ok_or_else(wrong)?;
            if of == container && found.replace(source).is_some() {
                return Err(wrong());
            }
        }
        Ok(found)
    }
}

/// The name of the directory that the annotation has for a container. It can be the name of a file in a
/// directory. None if there is none, or if the checkpoint is somewhere else.
pub fn name_for(value: &str, container: &str) -> Result<Option<String>, NameError> {
    Ok(match Source::of(value, container)? {
        Some(Source::Directory(name)) => Some(name),
        _ => None,
    })
}

/// Whether it can be the name of a file, and of nothing else.
pub fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !text.is_empty() && text.len() < 256 && !text.starts_with('.') && text.bytes().all(is_allowed)
}

/// Whether it can be the name of an image, with a tag, a digest or both.
fn is_image(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@".contains(&byte);
    let begins = text.starts_with(|first: char| first.is_ascii_alphanumeric());
    begins && text.len() < 512 && text.bytes().all(is_allowed)
}

/// Properties of the value of an annotation, whatever it is.
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzz {
    use std::path::{Component, Path};

    use super::Source;

    /// The container's name, NUL, and the value: what it names is one file of its place, and nothing else.
    pub fn restore_from(bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        let (container, value) = text.split_once('\0').unwrap_or(("job", &text));
        let Ok(Some(source)) = Source::of(value, container) else {
            return;
        };
        let is_one = |path: &Path| {
            let parts: Vec<Component<'_>> = path.components().collect();
            matches!(parts[..], [Component::Normal(name)] if name == path.as_os_str())
        };
        match source {
            Source::Directory(name) | Source::Store(name) => assert!(is_one(Path::new(&name)), "{name:?}"),
            Source::Image(name) => assert!(!name.starts_with(['/', '.', '-']) && name.is_ascii(), "{name:?}"),
        }
    }
}
