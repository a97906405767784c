//! Writes a wrapper for each function of the driver, and what the linker has to know.

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

const FACTS: &str = "../facts/driver-api.tsv";

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
    println!("cargo::rerun-if-changed={FACTS}");
    let mut calls = String::new();
    let mut symbols = Vec::new();
    for (row, line) in fs::read_to_string(FACTS)?.lines().skip(1).enumerate() {
        let mut columns = line.split('\t');
        let symbol = columns.next().ok_or("a row has a symbol")?;
        let arguments = columns.next_back().ok_or("a row has arguments")?;
        let arguments = arguments.split(' ').filter(|letter| *letter != "-").enumerate();
        let arguments = arguments.map(|(index, letter)| Ok(format!("a{index}: {}", kind(letter)?)));
        let arguments = arguments.collect::<Result<Vec<_>, Box<dyn Error>>>()?.join(", ");
        writeln!(calls, "wrapper!({row}, {symbol}, {arguments});")?;
        symbols.push(symbol.to_owned());
    }
    let count = symbols.len();
    writeln!(
        calls,
        "pub static WRAPPERS: [Address; {count}] = addresses![{}];",
        symbols.join(", ")
    )?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("there is no OUT_DIR")?);
    fs::write(out.join("calls.rs"), calls)?;
    for argument in LINK {
        println!("cargo::rustc-link-arg={argument}");
    }
    Ok(())
}

/// The type by which an argument of this letter is passed.
fn kind(letter: &str) -> Result<String, Box<dyn Error>> {
    Ok(match letter {
        "i" => "u32".to_owned(),
        "p" => "u64".to_owned(),
        "f" => "f32".to_owned(),
        // In a register, as a number.
        "m8" => "u64".to_owned(),
        _ => {
            let bytes: usize = letter.strip_prefix('m').ok_or("a letter of facts")?.parse()?;
            format!("InMemory<{}>", bytes.div_ceil(8))
        }
    })
}
