//! Writes a wrapper for each function of the driver, and what the linker has to know.

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

use firn_interposer::facts::{ARGUMENTS, Argument, ROWS};

/// No library of C, no code that runs when it is loaded, and no end before the program's. Its own functions
/// are its own, whatever else has their names.
const LINK: [&str; 6] = [
    "-Wl,-Bsymbolic-functions",
    "-nostartfiles",
    "-nodefaultlibs",
    "-Wl,-soname,libfirn_cuda.so",
    "-Wl,-z,nodelete",
    "-Wl,-z,now",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let (mut calls, mut rows) = (String::new(), String::new());
    for (row, (facts, arguments)) in ROWS.iter().zip(ARGUMENTS).enumerate() {
        let arguments = arguments.iter().enumerate();
        let arguments: Vec<String> = arguments
            .map(|(index, argument)| format!("a{index}: {}", kind(argument)))
            .collect();
        writeln!(
            calls,
            "wrapper!({row}, {}, {});",
            facts.symbol,
            arguments.join(", ")
        )?;
    }
    for (row, facts) in ROWS.iter().enumerate() {
        writeln!(rows, "pub const {}: usize = {row};", facts.symbol)?;
    }
    let symbols: Vec<&str> = ROWS.iter().map(|facts| facts.symbol).collect();
    let count = symbols.len();
    writeln!(
        calls,
        "pub static WRAPPERS: [Address; {count}] = addresses![{}];",
        symbols.join(", ")
    )?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("there is no OUT_DIR")?);
    fs::write(out.join("calls.rs"), calls)?;
    fs::write(out.join("rows.rs"), rows)?;
    for argument in LINK {
        println!("cargo::rustc-link-arg={argument}");
    }
    Ok(())
}

/// The type by which an argument is passed.
fn kind(argument: &Argument) -> String {
    match argument {
        Argument::Integer => "u32".to_owned(),
        Argument::Pointer => "u64".to_owned(),
        Argument::Float => "f32".to_owned(),
        // In a register, as a number.
        Argument::Structure(8) => "u64".to_owned(),
        Argument::Structure(bytes) => format!("InMemory<{}>", bytes.div_ceil(8)),
    }
}
