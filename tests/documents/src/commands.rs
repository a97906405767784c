//! Command lines in pages.

use crate::{At, Page};

/// A command line that a page shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Its words, without what the shell acts on: comments, redirections, what follows a pipe.
    pub words: Vec<String>,
}

impl Command {
    fn of(text: &str) -> Self {
        let is_shells = |word: &&str| {
            ["#", ">", "<", "|", "&&", ";"]
                .iter()
                .any(|sign| word.starts_with(sign))
        };
        let words = text.split_whitespace().take_while(|word| !is_shells(word));
        Self {
            words: words.map(str::to_owned).collect(),
        }
    }

    /// What follows these words, if it begins with them.
    pub fn after(&self, program: &[&str]) -> Option<&[String]> {
        let begins = self.words.len() >= program.len() && self.words.iter().zip(program).all(|(a, b)| a == b);
        begins.then(|| &self.words[program.len()..])
    }

    /// The arguments after `program`, with `--help` in the place where a program with clap's parser reads all
    /// others and then only prints its help.
    pub fn for_help(&self, program: &[&str]) -> Option<Vec<String>> {
        let mut arguments = self.after(program)?.to_vec();
        let end = arguments.iter().position(|word| word == "--");
        arguments.insert(end.unwrap_or(arguments.len()), "--help".to_owned());
        Some(arguments)
    }
}

impl Page {
    /// Command lines of `console` blocks: what follows `# ` or `$ `, with continued lines. Other lines are
    /// output.
    pub fn console(&self) -> Vec<At<Command>> {
        let mut commands = Vec::new();
        for block in self.blocks() {
            if block.what.language != "console" {
                continue;
            }
            let mut lines = (block.line..).zip(&block.what.lines);
            while let Some((line, first)) = lines.next() {
                let Some(first) = first.strip_prefix("# ").or_else(|| first.strip_prefix("$ ")) else {
                    continue;
                };
                let mut text = first.to_owned();
                while let Some(before) = text.strip_suffix('\\') {
                    let next = lines.next().map_or("", |(_, next)| next.trim());
                    text = format!("{before}{next}");
                }
                commands.push(At {
                    line,
                    what: Command::of(&text),
                });
            }
        }
        commands
    }

    /// All command lines: those of `console` blocks, and code spans.
    pub fn commands(&self) -> Vec<At<Command>> {
        let spans = self.spans().into_iter().map(|At { line, what }| At {
            line,
            what: Command::of(&what),
        });
        self.console().into_iter().chain(spans).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_ends_where_the_shell_takes_over() {
        let text = "```console\n# firn restore d \\\n    --spec x > y\noutput\n$ firn audit 1   # one\n```\n\
                    and `firn doctor`.\n";
        let page = Page::new("a.md", text);
        let words: Vec<_> = page
            .commands()
            .into_iter()
            .map(|at| (at.line, at.what.words.join(" ")))
            .collect();
        let expected = [
            (2, "firn restore d --spec x"),
            (5, "firn audit 1"),
            (7, "firn doctor"),
        ];
        assert_eq!(words, expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn help_is_asked_for_before_the_arguments_of_others() {
        let command = Command::of("cargo xtask node exec a -- ctr --x");
        let arguments = command.for_help(&["cargo", "xtask"]).unwrap();
        assert_eq!(arguments.join(" "), "node exec a --help -- ctr --x");
        assert_eq!(command.after(&["firn"]), None);
    }
}
