//! GPU memory behind the library, over a driver that keeps books.

use std::process::Command;

mod common;

#[test]
fn memory_is_made_of_pieces_and_looks_as_the_drivers() {
    let library = common::library();
    let dir = common::fixtures("memory", &["allocating"]);
    let mut program = Command::new(dir.path().join("allocating"));
    program
        .env("LD_LIBRARY_PATH", dir.path())
        .env("LD_PRELOAD", library);
    assert_eq!(common::run(&mut program), "done\n");
}
