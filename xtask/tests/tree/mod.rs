//! The files of the workspace, for tests that read all of them.

use std::fs;
use std::path::Path;

/// Files with one of these extensions, relative to the workspace, with their text. Directories with a name in
/// `skipped` are left out, and the file `own`.
pub fn files(extensions: &[&str], skipped: &[&str], own: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut found, mut open) = (Vec::new(), vec![root.to_owned()]);
    while let Some(path) = open.pop() {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let extension = path.extension().unwrap_or_default();
        let kind = path.symlink_metadata().unwrap().file_type();
        if kind.is_dir() && !skipped.contains(&&*name) {
            open.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if kind.is_file() && extensions.iter().any(|wanted| extension == *wanted) {
            let relative = path.strip_prefix(root).unwrap().display().to_string();
            if relative != own {
                found.push((relative, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}
