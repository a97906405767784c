//! The library before a driver of the fixtures, in a program that finds the driver's functions in every way.
#![allow(
    clippy::unwrap_used,
    reason = "a fixture that cannot be built is a test that fails"
)]

use std::collections::BTreeSet;
use std::env;
use std::path::Path;
use std::process::Command;

mod common;

use common::{compiled, fixtures, library, run};

/// What it takes of the loader, where it is there: the lists of objects of glibc and musl. Functions of these
/// names could be the program's.
const TAKEN: [&str; 2] = ["w _dl_debug_addr", "w _r_debug"];

/// What a program prints behind these libraries, in lines.
fn printed(program: &Path, libraries: &[&Path], arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("LD_LIBRARY_PATH", program.parent().unwrap());
    if !libraries.is_empty() {
        command.env("LD_PRELOAD", env::join_paths(libraries).unwrap());
    }
    run(&mut command).lines().map(str::to_owned).collect()
}

#[test]
fn a_program_gets_the_library_for_the_driver_and_sees_no_other_difference() {
    let (library, fixtures) = (library(), fixtures("driver", &[]));
    let program = compiled(&fixtures, "program", "program", &[]);
    let without = printed(&program, &[], &[]);
    let with = printed(&program, &[&library], &[]);
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
    let (library, fixtures) = (library(), fixtures("driver", &[]));
    let program = compiled(&fixtures, "program", "program", &[]);
    let with = printed(&program, &[&library], &["without"]);
    assert_eq!(with[0], "dlsym \"cuInit\": null, an error");
    assert_eq!(with[..3], printed(&program, &[], &["without"])[..3]);
}

#[test]
fn a_program_that_is_linked_with_the_driver_gets_it() {
    let (library, fixtures) = (library(), fixtures("driver", &["linked"]));
    let program = fixtures.path().join("linked");
    let without = printed(&program, &[], &[]);
    assert_eq!(without.last().unwrap(), "child: 0x800", "{without:?}");
    assert_eq!(printed(&program, &[&library], &[]), without);
}

#[test]
fn another_library_before_the_driver_is_called_as_without_it() {
    let (library, fixtures) = (library(), fixtures("driver", &["linked"]));
    let other = compiled(&fixtures, "other", "libother.so", &["--crate-type", "cdylib"]);
    compiled(&fixtures, "program", "program", &[]);
    for program in ["linked", "program"] {
        let program = fixtures.path().join(program);
        // Whose a function is differs, and what the global scope has of one that nobody called.
        let lines = |libraries: &[&Path]| -> Vec<String> {
            let lines = printed(&program, libraries, &[]).into_iter();
            let lines = lines.filter(|line| !line.starts_with("dlsym \"cuInit\""));
            lines
                .map(|line| line.split(" in lib").next().unwrap().to_owned())
                .collect()
        };
        let without = lines(&[&other]);
        let is_other = |line: &&String| line.starts_with("other: cuMemAlloc_v2");
        assert_eq!(without.iter().filter(is_other).count(), 1, "{without:?}");
        assert_eq!(lines(&[&library, &other]), without, "{program:?}");
        assert_eq!(lines(&[&other, &library]), without, "{program:?}");
    }
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
    // A symbol with a version has it behind an `@`; `firn_cuda_panics` is what a panic would call.
    let undefined = run(Command::new("nm").args(["-D", "--undefined-only"]).arg(&library));
    let undefined: BTreeSet<&str> = undefined.lines().map(str::trim).collect();
    assert_eq!(undefined, TAKEN.into());
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
