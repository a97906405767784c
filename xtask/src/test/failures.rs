//! Failed tests and their messages, read from a test program's output.
//!
//! A CI service may keep only the end of a log. So the summary repeats each failure in one short line.

/// A test that failed.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    name: String,
    /// Lines that the test printed.
    output: Vec<String>,
}

impl Failure {
    /// Most lines of output that are kept per test; a daemon's log may be among them.
    const KEPT: usize = 400;
    /// Most characters of the short form, without the name.
    const SHORT: usize = 200;
    /// Lines of the long form, and characters of each.
    const LINES: usize = 8;
    const WIDTH: usize = 160;

    /// Of a whole program, with the last lines of its output.
    pub fn of_program(name: String, output: Vec<String>) -> Self {
        Self { name, output }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name and the first lines of the message, as one line.
    pub fn short(&self) -> String {
        let why = self.why();
        let hunk = why.iter().position(|line| line.starts_with("@@"));
        let mut lines: Vec<String> = match hunk {
            Some(from) => {
                let differ = why[from..].iter().filter(|line| line.starts_with(['-', '+']));
                apart(&differ.copied().collect::<Vec<_>>())
            }
            None => why.iter().map(|line| line.trim().to_owned()).collect(),
        };
        lines.truncate(Self::LINES);
        let message: String = lines.join(" | ").chars().take(Self::SHORT).collect();
        format!("{}: {message}", self.name)
    }

    /// The name, and below it the beginning of the message.
    pub fn long(&self) -> String {
        let mut text = self.name.clone();
        for line in self.why().iter().take(Self::LINES) {
            text.push_str("\n    ");
            text.extend(line.chars().take(Self::WIDTH));
        }
        text
    }

    /// The lines from the panic message or the error on; other output may precede it.
    fn why(&self) -> Vec<&str> {
        let begins = |line: &String| line.contains("panicked at") || line.starts_with("Error:");
        let from = self.output.iter().position(begins).unwrap_or_default();
        let ends = |line: &&str| !line.starts_with("note: run with") && *line != "stack backtrace:";
        let lines = self.output[from..].iter().map(String::as_str);
        // `thread 'NAME' panicked at PLACE`: the name is known already.
        let lines = lines.map(|line| line.find("panicked at").map_or(line, |at| &line[at..]));
        lines.take_while(ends).collect()
    }
}

/// The lines of a difference, each without the long prefix that it shares with the line before or after.
fn apart(lines: &[&str]) -> Vec<String> {
    /// Characters of the prefix that are kept, to recognise the line.
    const LEFT: usize = 20;
    // Without the sign.
    let same = |one: &str, other: &str| {
        let pairs = one.chars().skip(1).zip(other.chars().skip(1));
        pairs.take_while(|(one, other)| one == other).count()
    };
    let shared: Vec<usize> = lines.windows(2).map(|pair| same(pair[0], pair[1])).collect();
    let shared = |at: usize| shared.get(at).copied().unwrap_or_default();
    let each = lines.iter().enumerate().map(|(at, line)| {
        let most = shared(at).max(at.checked_sub(1).map_or(0, shared));
        if most > 2 * LEFT {
            let rest: String = line.chars().skip(1 + most - LEFT).collect();
            format!("{}..{rest}", &line[..1])
        } else {
            (*line).to_owned()
        }
    });
    each.collect()
}

/// Reads a test program's output line by line.
#[derive(Default)]
pub struct Failures {
    pub found: Vec<Failure>,
    /// Whether the next line belongs to the last failure.
    open: bool,
}

impl Failures {
    /// Takes the next line: a section per failed test begins with `---- NAME ----`, in libtest with
    /// `---- NAME stdout ----`.
    pub fn line(&mut self, line: &str) {
        if let Some(name) = line
            .strip_prefix("---- ")
            .and_then(|line| line.strip_suffix(" ----"))
        {
            let name = name.strip_suffix(" stdout").unwrap_or(name).to_owned();
            let output = Vec::new();
            self.found.push(Failure { name, output });
            self.open = true;
        } else if line == "failures:" || line.starts_with("test result: ") {
            self.open = false;
        } else if let Some(last) = self.found.last_mut()
            && self.open
            && last.output.len() < Failure::KEPT
            && !line.trim().is_empty()
        {
            last.output.push(line.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str) -> Vec<Failure> {
        let mut failures = Failures::default();
        output.lines().for_each(|line| failures.line(line));
        failures.found
    }

    #[test]
    fn a_difference_shows_the_lines_that_differ() {
        let failures = read(
            "failures:\n\n---- forky v2: 1.1 server: its log ----\n\
             -: only the stock shim shows it, +: only firn\n\
             @@ -1,2 +1,2 @@\n both\n-in the log [true, true]\n+in the log [true, false]\n\n\n\
             failures:\n    forky\n\n\
             test result: FAILED. 1 passed; 1 failed",
        );
        assert_eq!(
            failures[0].short(),
            "forky v2: 1.1 server: its log: -in the log [true, true] | +in the log [true, false]"
        );
        assert!(
            failures[0].long().contains("\n    @@ -1,2 +1,2 @@"),
            "{}",
            failures[0].long()
        );
        assert_eq!(failures.len(), 1);
    }

    #[test]
    fn long_lines_that_differ_late_are_shown_where_they_differ() {
        let same = "x".repeat(500);
        let failures = read(&format!("---- a ----\n@@ -1 +1 @@\n-{same} one\n+{same} other"));
        let short = failures[0].short();
        assert!(short.chars().count() <= 204, "{short}");
        assert!(short.ends_with("xx other"), "{short}");
        let differ = apart(&[&format!("-{same} one"), &format!("+{same} other"), "+new"]);
        let shown = |sign: &str, end: &str| format!("{sign}..{} {end}", "x".repeat(18));
        assert_eq!(differ, [shown("-", "one"), shown("+", "other"), "+new".into()]);
    }

    #[test]
    fn output_before_the_failure_is_left_out() {
        let failures = read(
            "---- tests::b stdout ----\ncontainerd's log on n ends:\ntime=1 msg=2\n\n\
             thread 'tests::b' panicked at b.rs:1:2:\n\
             left: 1\nnote: run with `RUST_BACKTRACE=1`\n---- c stdout ----\nlog\nError: no task",
        );
        assert_eq!(failures[0].short(), "tests::b: panicked at b.rs:1:2: | left: 1");
        assert_eq!(failures[1].short(), "c: Error: no task");
    }
}
