//! Makes a table of constants from `facts/driver-api.tsv`.

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

const FACTS: &str = "facts/driver-api.tsv";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={FACTS}");
    let facts = fs::read_to_string(FACTS)?;
    let (mut rows, mut all) = (String::new(), String::new());
    for line in facts.lines().skip(1) {
        let columns: Vec<&str> = line.split('\t').collect();
        let [symbol, name, since, stream, arguments] = columns[..] else {
            return Err(format!("{FACTS}: {line:?}").into());
        };
        let stream = match stream {
            "legacy" => "Legacy",
            "ptds" | "ptsz" => "PerThread",
            _ => return Err(format!("{FACTS}: {line:?}").into()),
        };
        let arguments = arguments
            .split(' ')
            .filter(|letter| *letter != "-")
            .map(argument)
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| format!("{FACTS}: {line:?}"))?
            .join(", ");
        writeln!(
            rows,
            "Row {{ symbol: {symbol:?}, name: {name:?}, since: {since}, stream: Stream::{stream} }},"
        )?;
        writeln!(all, "&[{arguments}],")?;
    }
    let constants = format!(
        "/// By symbol, in the order of bytes.\n\
         pub static ROWS: &[Row] = &[\n{rows}];\n\
         /// Of the rows, by their index.\n\
         pub static ARGUMENTS: &[&[Argument]] = &[\n{all}];\n"
    );
    let out = env::var_os("OUT_DIR").ok_or("there is no OUT_DIR")?;
    fs::write(PathBuf::from(out).join("rows.rs"), constants)?;
    Ok(())
}

/// The variant of `Argument` for a letter of the table.
fn argument(letter: &str) -> Option<String> {
    Some(match letter {
        "i" => "Argument::Integer".into(),
        "p" => "Argument::Pointer".into(),
        "f" => "Argument::Float".into(),
        _ => format!(
            "Argument::Structure({})",
            letter.strip_prefix('m')?.parse::<u16>().ok()?
        ),
    })
}
