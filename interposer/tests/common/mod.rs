//! Builds the library and the fixtures.
#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "a fixture that cannot be built is a test that fails, and no test needs all of this"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap() + &error
}

/// The directory of firn-interposer, also for the tests of its client.
fn package() -> &'static Path {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.find(|dir| dir.join("facts").is_dir()).unwrap()
}

/// Builds the library, as a release has it.
pub fn library() -> PathBuf {
    let target = package().join("../target/interposer");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--release", "--locked", "--manifest-path"])
        .arg(package().join("library/Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        // Clippy's compiler may have made this test: the library is what users get.
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    run(&mut cargo);
    target.join("release/libfirn_cuda.so").canonicalize().unwrap()
}

/// A driver, and programs of the fixtures that are linked with it.
pub fn fixtures(driver: &str, linked: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let driver = compiled(&dir, driver, "libcuda.so.1", &["--crate-type", "cdylib"]);
    let driver = format!("-Clink-arg={}", driver.display());
    for program in linked {
        compiled(&dir, program, program, &[&driver]);
    }
    dir
}

/// Compiles a program or a library of the fixtures.
pub fn compiled(dir: &TempDir, source: &str, made: &str, arguments: &[&str]) -> PathBuf {
    let made = dir.path().join(made);
    let source = package().join(format!("tests/fixtures/{source}.rs"));
    let mut rustc = Command::new(Path::new(env!("CARGO")).with_file_name("rustc"));
    rustc.args(["--edition", "2024", "--crate-name", "made", "-o"]);
    run(rustc.arg(&made).arg(source).args(arguments));
    made
}
