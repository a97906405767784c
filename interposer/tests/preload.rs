//! The library before a driver of the fixtures, in a program that finds the driver's functions in every way.
#![allow(
    clippy::unwrap_used,
    reason = "a fixture that cannot be built is a test that fails"
)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// What it takes of the program's C library: every one has these.
const TAKEN: [&str; 7] = [
    "bcmp",
    "dl_iterate_phdr",
    "memcmp",
    "memcpy",
    "memmove",
    "memset",
    "strlen",
];

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap() + &error
}

/// Builds the library, as a release has it.
fn library() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = package.join("../target/interposer");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .args(["build", "--quiet", "--release", "--locked", "--manifest-path"])
        .arg(package.join("library/Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        // Clippy's compiler may have made this test: the library is what users get.
        .env_remove("RUSTC_WORKSPACE_WRAPPER");
    run(&mut cargo);
    target.join("release/libfirn_cuda.so").canonicalize().unwrap()
}

/// The driver and the program of the fixtures.
fn fixtures() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for (source, kind, made) in [
        ("driver.rs", "cdylib", "libcuda.so.1"),
        ("program.rs", "bin", "program"),
    ] {
        let mut rustc = Command::new(Path::new(env!("CARGO")).with_file_name("rustc"));
        rustc
            .args([
                "--edition",
                "2024",
                "--crate-type",
                kind,
                "--crate-name",
                "made",
                "-o",
            ])
            .arg(dir.path().join(made))
            .arg(sources.join(source));
        run(&mut rustc);
    }
    dir
}

/// What the program prints, in lines.
fn printed(fixtures: &Path, library: Option<&Path>, arguments: &[&str]) -> Vec<String> {
    let mut program = Command::new(fixtures.join("program"));
    program.args(arguments).env("LD_LIBRARY_PATH", fixtures);
    if let Some(library) = library {
        program.env("LD_PRELOAD", library);
    }
    run(&mut program).lines().map(str::to_owned).collect()
}

#[test]
fn a_program_gets_the_library_for_the_driver_and_sees_no_other_difference() {
    let (library, fixtures) = (library(), fixtures());
    let without = printed(fixtures.path(), None, &[]);
    let with = printed(fixtures.path(), Some(&library), &[]);
    let driver = |line: &String| line.replace("libfirn_cuda.so", "libcuda.so.1");
    // Which functions of libcuda are the library's for the program.
    let replaced: BTreeSet<&str> = with
        .iter()
        .filter_map(|line| line.strip_suffix(" in libfirn_cuda.so"))
        .filter_map(|line| line.rsplit(' ').next())
        .collect();
    let expected = [
        "cuGetProcAddress_v2",
        "cuInit",
        "cuIpcOpenMemHandle_v2",
        "cuLaunchKernel",
        "cuMemAlloc_v2",
        "cuTexRefSetMipmapLevelClamp",
    ];
    assert_eq!(replaced, expected.into());
    // In the global scope libcuda's functions are there once it is loaded, which they would not be without.
    let is_global = |line: &&String| line.starts_with("dlsym \"cuInit\"");
    let others = |lines: &[String]| -> Vec<String> {
        lines.iter().filter(|line| !is_global(line)).map(driver).collect()
    };
    assert_eq!(others(&with), others(&without));
    assert!(with.contains(&"threads: 1100".to_owned()), "{with:?}");
}

#[test]
fn without_a_driver_a_program_finds_none() {
    let (library, fixtures) = (library(), fixtures());
    let with = printed(fixtures.path(), Some(&library), &["without"]);
    assert_eq!(with[0], "dlsym \"cuInit\": null, an error");
    assert_eq!(with[..3], printed(fixtures.path(), None, &["without"])[..3]);
}

#[test]
fn other_programs_are_as_without_it() {
    let library = library();
    for script in [
        "echo a; exit 0",
        "cat /proc/self/comm",
        "( sleep 0 & wait ); ls /",
        "exec env -i true",
    ] {
        let shell = || {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            shell
        };
        assert_eq!(
            run(shell().env("LD_PRELOAD", &library)),
            run(&mut shell()),
            "{script}"
        );
    }
}

#[test]
fn every_c_library_can_load_it_and_nothing_in_it_panics() {
    let library = library();
    let undefined = run(Command::new("nm").args(["-D", "--undefined-only"]).arg(&library));
    let undefined: BTreeSet<&str> = undefined
        .lines()
        .filter_map(|line| line.trim().strip_prefix("U "))
        .collect();
    // A symbol with a version has it behind an `@`; `firn_cuda_panics` is what a panic would call.
    let more: Vec<_> = undefined.iter().filter(|name| !TAKEN.contains(name)).collect();
    assert!(
        more.is_empty() && undefined.contains("dl_iterate_phdr"),
        "{undefined:?}"
    );
    // Another object's function of the same name is not taken for its own.
    let relocations = run(Command::new("readelf").arg("-rW").arg(&library));
    assert!(
        relocations.contains("R_") && !relocations.contains(" cu"),
        "{relocations}"
    );
    let dynamic = run(Command::new("readelf").arg("-dW").arg(&library));
    assert!(dynamic.contains("SONAME"), "{dynamic}");
    for refused in ["(NEEDED)", "(TEXTREL)", "(INIT)", "(INIT_ARRAY)"] {
        assert!(!dynamic.contains(refused), "{dynamic}");
    }
}
