//! Sizes of the product's files. The ceiling may only fall; the aim is none.

use super::source::{crates, sources};
use super::{is_product, workspace};

/// A file has fewer lines than this.
const FILE: usize = 500;

/// Files of the product that are still too long. Lower the number with the tree; never raise it.
const LONG_FILES: usize = 1;

#[test]
fn files_are_short() {
    let root = workspace().unwrap();
    let crates = crates(&root).unwrap();
    let product = crates.iter().filter(|krate| is_product(krate));
    let sources = product.flat_map(|krate| sources(&root, krate, &crates).unwrap());
    let long: Vec<String> = sources
        .filter(|source| source.lines >= FILE)
        .map(|source| format!("{} {}", source.lines, source.path.display()))
        .collect();
    assert!(
        long.len() <= LONG_FILES,
        "{} are too long, the ceiling is {LONG_FILES}:\n{}",
        long.len(),
        long.join("\n")
    );
}
