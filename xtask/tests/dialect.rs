//! How functions and types of this workspace are written, where no lint has it.
#![allow(
    clippy::unwrap_used,
    reason = "a source that cannot be read is a test that fails"
)]

mod tree;

use std::collections::BTreeMap;

/// Functions that still take tuples, until a transaction has an owner (issue 29): so many in each file.
const LEFT: [(&str, usize); 1] = [
    // The trait's own signature.
    ("gpu/src/types.rs", 1),
];

const SKIPPED: [&str; 4] = ["target", ".git", "corpus", "mutants.out"];

/// Rust files of the workspace, relative to its root, with their text up to their unit tests.
fn sources() -> Vec<(String, String)> {
    let code = |text: String| text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned();
    files("rs")
        .into_iter()
        .map(|(path, text)| (path, code(text)))
        .collect()
}

/// Files of the workspace with this extension. This one is left out.
fn files(extension: &str) -> Vec<(String, String)> {
    tree::files(&[extension], &SKIPPED, "xtask/tests/dialect.rs")
}

/// The parameters of each function, `name: type`.
fn parameters(code: &str) -> Vec<String> {
    let mut all = Vec::new();
    let mut rest = code;
    while let Some((_, after)) = rest.split_once("fn ") {
        rest = after;
        let Some(open) = after
            .find('(')
            .filter(|open| !after[..*open].contains([';', '{', '=']))
        else {
            continue;
        };
        let (mut depth, mut current) = (0_usize, String::new());
        for character in after[open + 1..].chars() {
            match character {
                ')' if depth == 0 => break,
                ',' if depth == 0 => all.push(std::mem::take(&mut current)),
                _ => {
                    match character {
                        '(' | '[' | '{' | '<' => depth += 1,
                        ')' | ']' | '}' | '>' => depth = depth.saturating_sub(1),
                        _ => {}
                    }
                    current.push(character);
                }
            }
        }
        all.push(current);
    }
    all
}

/// Whether a parameter is a tuple, or a reference to one.
fn is_tuple(parameter: &str) -> bool {
    let Some((_, kind)) = parameter.split_once(':') else {
        return false;
    };
    let kind = kind.trim().trim_start_matches('&');
    kind.starts_with('(') && kind != "()"
}

/// A tuple keeps `too_many_arguments` quiet and hides that a struct is missing.
#[test]
fn no_function_takes_a_tuple() {
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    let mut seen = 0;
    for (path, code) in sources() {
        let parameters = parameters(&code);
        seen += parameters.len();
        let tuples = parameters.iter().filter(|parameter| is_tuple(parameter)).count();
        if tuples > 0 {
            found.insert(path, tuples);
        }
    }
    assert!(seen > 5000, "only {seen} parameters were found");
    let left: BTreeMap<String, usize> = LEFT
        .iter()
        .map(|(path, count)| ((*path).to_owned(), *count))
        .collect();
    assert_eq!(found, left);
}

#[test]
fn tuples_are_found() {
    let code = "fn a<T>(&self, (x, y): (u8, &str), z: &(u8, u8)) {}\n\
                fn b(f: impl Fn((u8, u8)) -> u8, g: Vec<(u8, u8)>, h: &[u8]) {}";
    let tuples: Vec<bool> = parameters(code)
        .iter()
        .map(|parameter| is_tuple(parameter))
        .collect();
    assert_eq!(tuples, [false, true, true, false, false, false]);
}

/// `if` is for conditions.
#[test]
fn nothing_is_matched_against_the_unit() {
    let needle = format!("match {} {{", "()");
    let found: Vec<String> = sources()
        .into_iter()
        .filter(|(_, code)| code.contains(&needle))
        .map(|(path, _)| path)
        .collect();
    assert!(found.is_empty(), "{found:?}");
}

/// containerd, CRIU and Kubernetes call it to continue or to resume.
#[test]
fn nothing_goes_on() {
    let phrases = ["goes on", "go on", "going on", "went on"];
    let mut found = Vec::new();
    for (path, text) in ["rs", "md"].into_iter().flat_map(files) {
        for (number, line) in (1..).zip(text.lines()) {
            let has = |phrase: &str| {
                line.match_indices(phrase).any(|(at, _)| {
                    let after = line[at + phrase.len()..].chars().next();
                    !after.is_some_and(|character| character.is_alphanumeric() || character == '_')
                })
            };
            if phrases.into_iter().any(has) {
                found.push(format!("{path}:{number}: {line}"));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// Names that fit every type, and show nothing of one.
const NAMES_OF_ANYTHING: [&str; 5] = ["Done", "Found", "Made", "Place", "Shown"];

/// The name of the type that a line declares.
fn declared(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(after) => after.split_once(' ')?.1,
        None => line,
    };
    let after = line
        .strip_prefix("struct ")
        .or_else(|| line.strip_prefix("enum "))?;
    after.split(|character: char| !character.is_alphanumeric()).next()
}

#[test]
fn types_have_names_of_their_own() {
    let (mut found, mut seen) = (Vec::new(), 0);
    for (path, code) in sources() {
        if path.starts_with("tests/") {
            continue;
        }
        for name in code.lines().filter_map(declared) {
            seen += 1;
            if NAMES_OF_ANYTHING.contains(&name) {
                found.push(format!("{path}: {name}"));
            }
        }
    }
    assert!(seen > 500, "only {seen} types were found");
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn declared_types_are_found() {
    let lines = [
        "pub struct Found {",
        "    pub(crate) enum Made<'a> {",
        "struct Place(PathBuf);",
        "// struct A",
    ];
    assert_eq!(
        lines.map(declared),
        [Some("Found"), Some("Made"), Some("Place"), None]
    );
}
