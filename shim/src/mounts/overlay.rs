//! Keeps the options of an overlay below the page that the kernel takes, by naming its layers from their
//! common directory. No I/O.

use std::path::{Path, PathBuf};

const LOWER: &str = "lowerdir=";

/// Shortens the layers' names in `options`. Gives the directory from which the names count then; none when
/// nothing is gained. Upper and work directory keep their full names.
pub(super) fn compact(options: &mut [String]) -> Option<PathBuf> {
    let option = options.iter_mut().find(|option| option.starts_with(LOWER))?;
    let layers = split(option.strip_prefix(LOWER)?);
    let common = common_dir(&layers)?;
    let names: Option<Vec<_>> = layers
        .iter()
        .map(|layer| Path::new(layer).strip_prefix(&common).ok()?.to_str())
        .collect();
    let names = names?;
    // An empty name would end the list; a backslash that was followed by a slash would escape the next colon.
    if names.iter().any(|name| name.is_empty() || name.ends_with('\\')) {
        return None;
    }
    *option = format!("{LOWER}{}", names.join(":"));
    Some(common)
}

/// Directories of the lower layers that `options` name.
pub(super) fn layers(options: &[String]) -> Vec<PathBuf> {
    let list = options.iter().find_map(|option| option.strip_prefix(LOWER));
    let names = split(list.unwrap_or_default());
    names
        .into_iter()
        .filter(|name| !name.is_empty())
        .map(plain)
        .collect()
}

/// A name without its escapes.
fn plain(name: &str) -> PathBuf {
    let mut escaped = false;
    let kept = name.chars().filter(|c| {
        escaped = *c == '\\' && !escaped;
        !escaped
    });
    kept.collect::<String>().into()
}

/// The layers, still escaped: a colon after a backslash belongs to a name.
fn split(list: &str) -> Vec<&str> {
    let mut layers = Vec::new();
    let (mut begin, mut escaped) = (0, false);
    for (at, byte) in list.bytes().enumerate() {
        if byte == b':' && !escaped {
            layers.push(&list[begin..at]);
            begin = at + 1;
        }
        escaped = byte == b'\\' && !escaped;
    }
    layers.push(&list[begin..]);
    layers
}

/// The longest directory above all layers; none when that is the root or a layer is not absolute.
fn common_dir(layers: &[&str]) -> Option<PathBuf> {
    let (first, rest) = layers.split_first()?;
    let mut common = Path::new(first).parent()?;
    for layer in rest {
        while !Path::new(layer).parent()?.starts_with(common) {
            common = common.parent()?;
        }
    }
    // An escape counts for a name in the option but not for a directory to enter.
    let plain = common.to_str().is_some_and(|path| !path.contains('\\'));
    (common.is_absolute() && common != Path::new("/") && plain).then(|| common.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compacted(option: &str) -> (Option<PathBuf>, String) {
        let mut options = [
            "index=off".to_owned(),
            option.to_owned(),
            "upperdir=/s/9/fs".to_owned(),
        ];
        let dir = compact(&mut options);
        assert_eq!(
            (options[0].as_str(), options[2].as_str()),
            ("index=off", "upperdir=/s/9/fs")
        );
        (dir, options[1].clone())
    }

    #[test]
    fn layers_are_named_from_their_common_directory() {
        let (dir, option) =
            compacted("lowerdir=/var/snapshots/12/fs:/var/snapshots/1/fs:/var/snapshots/7/fs");
        assert_eq!(
            (dir, option.as_str()),
            (Some("/var/snapshots".into()), "lowerdir=12/fs:1/fs:7/fs")
        );
        let (dir, option) = compacted("lowerdir=/var/a/fs");
        assert_eq!((dir, option.as_str()), (Some("/var/a".into()), "lowerdir=fs"));
        let (dir, option) = compacted("lowerdir=/var/a/b:/var/a");
        assert_eq!((dir, option.as_str()), (Some("/var".into()), "lowerdir=a/b:a"));
    }

    #[test]
    fn layers_are_found_without_their_escapes() {
        let options = ["index=off", "lowerdir=/a\\:b/fs:c/\\\\d::/e"].map(String::from);
        assert_eq!(layers(&options), ["/a:b/fs", "c/\\d", "/e"].map(PathBuf::from));
        assert!(layers(&options[..1]).is_empty());
    }

    #[test]
    fn what_cannot_be_shortened_stays() {
        for option in [
            "lowerdir=/a/fs:/b/fs",
            "lowerdir=a/fs:a/fs2",
            "lowerdir=/va\\:r/a/fs:/va\\:r/b/fs",
            "lowerdir=/s/a\\/:/s/b",
            "ro",
        ] {
            assert_eq!(compacted(option), (None, option.to_owned()));
        }
        let (dir, option) = compacted("lowerdir=/s/with\\:colon/fs:/s/plain/fs");
        assert_eq!(
            (dir, option.as_str()),
            (Some("/s".into()), "lowerdir=with\\:colon/fs:plain/fs")
        );
    }
}
