//! GPU memory behind the library, over a driver that keeps books.

use std::process::Command;

mod common;

#[test]
fn memory_is_made_of_pieces_and_looks_as_the_drivers() {
    let library = common::library();
    let dir = tempfile::tempdir().expect("a directory for the fixtures");
    let driver = common::compiled(&dir, "memory", "libcuda.so.1", &["--crate-type", "cdylib"]);
    let linked = format!("-Clink-arg={}", driver.display());
    let program = common::compiled(&dir, "allocating", "allocating", &[&linked]);
    let mut program = Command::new(program);
    program
        .env("LD_LIBRARY_PATH", dir.path())
        .env("LD_PRELOAD", library);
    assert_eq!(common::run(&mut program), "done\n");
}
