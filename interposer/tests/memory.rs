//! GPU memory behind the library, over a driver that keeps books.

use std::process::Command;

mod common;

#[test]
fn memory_is_made_of_pieces_and_looks_as_the_drivers() {
    succeeds("allocating");
}

#[test]
fn processes_open_memory_of_each_other() {
    succeeds("sharing");
}

/// Runs a program of the fixtures behind the library.
fn succeeds(name: &str) {
    let library = common::library();
    let dir = common::fixtures("memory", &[name]);
    let mut program = Command::new(dir.path().join(name));
    program
        .env("LD_LIBRARY_PATH", dir.path())
        .env("LD_PRELOAD", library);
    assert_eq!(common::run(&mut program), "done\n");
}
