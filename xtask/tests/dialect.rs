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

/// A function, as it is declared.
struct Function<'c> {
    name: &'c str,
    is_async: bool,
    /// Each as `name: type`.
    parameters: Vec<String>,
    /// Its type; empty if it returns nothing.
    returned: String,
}

fn functions(code: &str) -> Vec<Function<'_>> {
    let mut all = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let after = &code[at + "fn ".len()..];
        let named = after
            .find(['(', '<'])
            .filter(|end| !after[..*end].contains([';', '{', '=']));
        let Some(open) = named.map(|end| end + generics(&after[end..])) else {
            continue;
        };
        let (parameters, length) = parameters(&after[open + 1..]);
        let end = after[open + 1 + length..].trim_start();
        let returned = end.strip_prefix("->").unwrap_or_default();
        let returned = returned.split(['{', ';']).next().unwrap();
        all.push(Function {
            name: after[..open].split('<').next().unwrap(),
            is_async: code[..at].ends_with("async "),
            parameters,
            returned: returned.split("where").next().unwrap().trim().to_owned(),
        });
    }
    all
}

/// Length of what stands in angle brackets, if the text begins with them.
fn generics(text: &str) -> usize {
    let mut depth = 0_usize;
    for (at, character) in text.char_indices() {
        match character {
            '<' => depth += 1,
            '>' if text[..at].ends_with('-') => {}
            '>' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + usize::from(character == '>');
        }
    }
    0
}

/// What stands in parentheses, and how long it is with the last one.
fn parameters(text: &str) -> (Vec<String>, usize) {
    let (mut all, mut depth, mut current) = (Vec::new(), 0_usize, String::new());
    for (at, character) in text.char_indices() {
        match character {
            ')' if depth == 0 => {
                all.push(current);
                return (all, at + 1);
            }
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
    (all, text.len())
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
        let functions = functions(&code);
        let parameters = || functions.iter().flat_map(|function| &function.parameters);
        seen += parameters().count();
        let tuples = parameters().filter(|parameter| is_tuple(parameter)).count();
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
    let functions = functions(code);
    let parameters = functions.iter().flat_map(|function| &function.parameters);
    let tuples: Vec<bool> = parameters.map(|parameter| is_tuple(parameter)).collect();
    assert_eq!(tuples, [false, true, true, false, false, false]);
}

/// Whether a name is a participle, and nothing else.
fn is_participle(name: &str) -> bool {
    const VERBS: [&str; 8] = [
        "embed", "exceed", "feed", "need", "proceed", "seed", "speed", "succeed",
    ];
    const IRREGULAR: [&str; 15] = [
        "begun", "built", "done", "found", "given", "gone", "held", "kept", "known", "left", "made", "sent",
        "shown", "taken", "written",
    ];
    let is_regular = name.ends_with("ed") && !name.contains('_') && !VERBS.contains(&name);
    is_regular || IRREGULAR.contains(&name)
}

/// Whether a function is called for what it does: it changes its object, or returns nothing but whether it
/// has failed. One that is only waited for, as `cancelled` of tokio's tokens is, stands for a state.
fn acts(function: &Function<'_>) -> bool {
    let is_of = |object: &str| function.parameters.first().is_some_and(|first| first == object);
    let is_state = function.is_async && is_of("&self");
    let nothing = function.returned.is_empty() && !is_state;
    nothing || function.returned.contains("Result<()") || is_of("&mut self")
}

/// A function that acts is a verb. What a participle names is there already.
#[test]
fn no_function_that_acts_is_a_participle() {
    let mut wrong = Vec::new();
    for (path, code) in sources() {
        let functions = functions(&code).into_iter();
        let named = functions.filter(|function| is_participle(function.name) && acts(function));
        wrong.extend(named.map(|function| format!("{path}: {}", function.name)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn participles_that_act_are_found() {
    let code = "fn copied<F: Fn(u8) -> u8>(&mut self, f: F) -> u8 {}\n\
                fn refused(a: &str) -> Result<()> {}\nfn left(a: u8);\n\
                async fn stopped(&self) {}\nfn named(a: u8) -> u8 {}\nfn copy(&mut self) {}\n\
                fn need(a: u8) {}";
    let named = functions(code);
    let wrong = named
        .iter()
        .filter(|function| is_participle(function.name) && acts(function));
    let wrong: Vec<&str> = wrong.map(|function| function.name).collect();
    assert_eq!(wrong, ["copied", "refused", "left"]);
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
