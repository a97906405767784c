//! Blocks of console input in documents: the commands, and the output that they show.

use crate::Page;

/// A block of console input and output.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Commands, without their prompts; a continued one is one command.
    pub commands: Vec<String>,
    /// Lines of output.
    pub output: Vec<String>,
}

impl Block {
    /// As a script that ends with the first failure.
    pub fn script(&self) -> String {
        self.commands.join("\n")
    }

    /// Lines of shown output that this output has not, numbers aside.
    pub fn not_in(&self, output: &str) -> Vec<&str> {
        let lines: Vec<String> = output.lines().map(shape).collect();
        let missing = self.output.iter().filter(|line| !lines.contains(&shape(line)));
        missing.map(String::as_str).collect()
    }
}

/// A line without its numbers: pids, times and sizes differ.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    for c in line.trim_end().chars() {
        match c {
            '0'..='9' if shape.ends_with('N') => {}
            '0'..='9' => shape.push('N'),
            c => shape.push(c),
        }
    }
    shape.replace("N.N", "N")
}

/// The console blocks of a page, in their order.
pub fn blocks(page: &Page) -> Vec<Block> {
    let blocks = page.blocks().into_iter().map(|at| at.what);
    blocks
        .filter(|block| block.language == "console")
        .map(|block| read(&block.lines))
        .collect()
}

fn read(lines: &[String]) -> Block {
    let mut block = Block::default();
    let mut goes_on = false;
    for line in lines {
        let command = line.strip_prefix("# ").or_else(|| line.strip_prefix("$ "));
        match (command, block.commands.last_mut()) {
            (_, Some(last)) if goes_on => *last += &format!("\n{line}"),
            (Some(command), _) => block.commands.push(command.to_owned()),
            (None, _) => block.output.push(line.to_owned()),
        }
        goes_on = (command.is_some() || goes_on) && line.ends_with('\\');
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_read() {
        let document = "text\n```console\n# a \\\n    --b\n$ c\nafter 0.7 s, pid 4711\n```\n```\n# no\n```\n";
        let expected = Block {
            commands: vec!["a \\\n    --b".to_owned(), "c".to_owned()],
            output: vec!["after 0.7 s, pid 4711".to_owned()],
        };
        let read = blocks(&Page::new("page.md", document));
        assert_eq!(read, [expected]);
        let missing = |output| read[0].not_in(output).len();
        assert_eq!(missing("x\nafter 12.25 s, pid 3\n"), 0);
        assert_eq!(missing("after 1 s\n"), 1);
    }
}
