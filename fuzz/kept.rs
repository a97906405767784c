//! The corpus of the fuzz targets, which the fuzzer runs first. A module of the unit tests of each crate that
//! has targets.

use std::path::Path;

/// Runs a target's function over its inputs.
pub(crate) fn run(target: &str, function: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(target);
    let mut files: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", dir.display());
    for file in files {
        println!("{}", file.display());
        function(&std::fs::read(&file).unwrap());
    }
}
