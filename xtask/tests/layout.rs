//! Each name in the shim's linker script is a module, a function or a crate of the tree: a pattern for
//! what was renamed fits nothing, and no error shows it.
#![allow(
    clippy::unwrap_used,
    reason = "a workspace that cannot be read is a test that fails"
)]

use std::fs;
use std::path::{Path, PathBuf};

/// Reads `16firn_transaction10checkpoint` as its parts. None if a length is wrong.
fn path(mut mangled: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    while !mangled.is_empty() {
        let digits = mangled.find(|letter: char| !letter.is_ascii_digit())?;
        let length: usize = mangled[..digits].parse().ok()?;
        let end = digits.checked_add(length)?;
        parts.push(mangled.get(digits..end)?);
        mangled = &mangled[end..];
    }
    (!parts.is_empty()).then_some(parts)
}

/// The names of patterns such as `*(.text._R*16firn_transaction4look*)`, without letters that are rustc's.
fn names(script: &str) -> Vec<&str> {
    let patterns = script
        .lines()
        .filter_map(|line| line.trim().strip_prefix("*(.text."));
    patterns
        .flat_map(|pattern| pattern.trim_end_matches(')').split('*'))
        .map(|part| part.trim_start_matches('_').trim_end_matches("[0-9]"))
        .filter(|part| part.starts_with(|letter: char| letter.is_ascii_digit()))
        // An implementation in a module: `7journals`.
        .map(|part| match part {
            "16firn_transaction7journals" => "16firn_transaction7journal",
            part => part,
        })
        .collect()
}

/// Whether the last part is a module in `dir`, or a function of the module that `dir` is.
fn is_in(dir: &Path, name: &str) -> bool {
    let file = dir.with_extension("rs");
    let module = dir.join("mod.rs");
    let has =
        |file: &PathBuf| fs::read_to_string(file).is_ok_and(|text| text.contains(&format!("fn {name}(")));
    dir.join(format!("{name}.rs")).is_file()
        || dir.join(name).join("mod.rs").is_file()
        || has(&file)
        || has(&module)
        || fs::read_dir(dir)
            .is_ok_and(|entries| entries.filter_map(Result::ok).any(|entry| has(&entry.path())))
}

#[test]
fn names_of_the_shim_s_layout_are_in_the_tree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let script = fs::read_to_string(root.join("shim/layout.ld")).unwrap();
    let lock = fs::read_to_string(root.join("Cargo.lock")).unwrap();
    let names = names(&script);
    assert!(names.len() > 40, "{names:?}");
    for name in names {
        let parts = path(name).unwrap_or_else(|| panic!("a length in {name} is wrong"));
        let krate = parts[0];
        let is_known = [
            "alloc",
            "core",
            "gimli",
            "addr2line",
            "miniz_oxide",
            "rustc_demangle",
        ]
        .contains(&krate)
            || lock.contains(&format!("\nname = \"{}\"\n", krate.replace('_', "-")))
            || lock.contains(&format!("\nname = \"{krate}\"\n"));
        assert!(is_known, "there is no crate {krate}");
        let Some(own) = krate.strip_prefix("firn_") else {
            continue;
        };
        let mut dir = root.join(own).join("src");
        for part in &parts[1..] {
            assert!(
                is_in(&dir, part),
                "{name}: there is no {part} in {}",
                dir.display()
            );
            dir.push(part);
        }
    }
}

#[test]
fn a_length_that_is_wrong_is_seen() {
    assert_eq!(
        path("16firn_transaction4look"),
        Some(vec!["firn_transaction", "look"])
    );
    for wrong in [
        "16firn_transaction5look",
        "15firn_transaction4look",
        "16firn_transaction3look",
        "look",
        "",
    ] {
        assert_eq!(path(wrong), None, "{wrong}");
    }
}
