//! Sizes of the product's files and functions. The ceilings may only fall; the aim is none.

use super::source::{Source, crates, sources};
use super::{LONG_FUNCTION, is_product, workspace};

/// A file has fewer lines than this.
const FILE: usize = 500;

/// Files and functions of the product that are still too long. Lower the numbers with the tree; never raise
/// them.
const LONG_FILES: usize = 15;
const LONG_FUNCTIONS: usize = 24;

fn product() -> Vec<Source> {
    let root = workspace().unwrap();
    let crates = crates(&root).unwrap();
    let product = crates.iter().filter(|krate| is_product(krate));
    product
        .flat_map(|krate| sources(&root, krate, &crates).unwrap())
        .collect()
}

fn below(ceiling: usize, long: &[String]) {
    assert!(
        long.len() <= ceiling,
        "{} are too long, the ceiling is {ceiling}:\n{}",
        long.len(),
        long.join("\n")
    );
}

#[test]
fn files_are_short() {
    let sources = product();
    let long = sources.iter().filter(|source| source.lines >= FILE);
    let long: Vec<String> = long
        .map(|source| format!("{} {}", source.lines, source.path.display()))
        .collect();
    below(LONG_FILES, &long);
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    for source in product() {
        for function in source
            .functions
            .iter()
            .filter(|function| function.lines >= LONG_FUNCTION)
        {
            let (path, line) = (source.path.display(), function.line);
            long.push(format!("{} {path}:{line} {}", function.lines, function.name));
        }
    }
    below(LONG_FUNCTIONS, &long);
}
