//! Rows in columns. On a terminal that is too narrow the widest cells are cut, and where that would leave
//! nothing of them, each value gets a line. What is piped is whole.

use unicode_width::UnicodeWidthStr;

use firn_config::text::one_line;

use super::terminal::{Tone, columns, cut, painted, wrapped};

/// Between two columns.
const GAP: &str = "  ";

/// No column is made narrower to fit a terminal.
const LEAST: usize = 8;

/// Prints rows in columns, below their heads.
pub fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) {
    let lines = lay_out(head, rows, columns());
    for line in &lines {
        let shown = if line.starts_with(head[0]) {
            painted(Tone::Head, line)
        } else {
            line.clone()
        };
        super::raw(&(shown + "\n"));
    }
}

fn lay_out<const N: usize>(
    head: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    room: Option<usize>,
) -> Vec<String> {
    let rows = rows.map(|row| row.map(|cell| one_line(&cell)));
    let rows: Vec<[String; N]> = [head.map(str::to_owned)].into_iter().chain(rows).collect();
    let width = |at: usize| rows.iter().map(|row| row[at].width()).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..N).map(width).collect();
    let room = room.unwrap_or(usize::MAX);
    if !fit(&mut widths, room) {
        return records(&rows, room);
    }
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| {
            let shown = cut(cell, *width);
            let spaces = " ".repeat(width - shown.width());
            shown + &spaces
        });
        cells.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// A line for each value, and an empty one between two rows.
fn records<const N: usize>(rows: &[[String; N]], room: usize) -> Vec<String> {
    let [head, rows @ ..] = rows else {
        return Vec::new();
    };
    let width = head.iter().map(|head| head.width()).max().unwrap_or(0);
    let record = |row: &[String; N]| {
        let pairs = head.iter().zip(row);
        let lines = pairs.flat_map(|(head, cell)| wrapped(&format!("{head:width$}{GAP}{cell}"), room));
        lines.collect::<Vec<_>>()
    };
    let records: Vec<Vec<String>> = rows.iter().map(record).collect();
    records.join(&String::new())
}

/// Makes the widest columns narrower until all fit, which is true if they do.
fn fit(widths: &mut [usize], room: usize) -> bool {
    let gaps = GAP.len() * widths.len().saturating_sub(1);
    while widths.iter().sum::<usize>() + gaps > room {
        match widths.iter_mut().max() {
            Some(widest) if *widest > LEAST => *widest -= 1,
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: [&str; 3] = ["NAME", "NAMESPACE", "SIZE"];

    fn rows() -> impl Iterator<Item = [String; 3]> {
        let name = "registry.example/team/checkpoint/training-of-monday:latest";
        [[name, "default", "10.0 GiB"], ["日本", "k8s.io", "1.0 KiB"]]
            .map(|row| row.map(str::to_owned))
            .into_iter()
    }

    #[test]
    fn what_is_piped_is_whole() {
        let lines = lay_out(HEAD, rows(), None);
        assert!(
            lines[1].contains("training-of-monday:latest  default"),
            "{lines:?}"
        );
        // Both columns begin where those above do.
        let start = |line: &str, word| line.split(word).next().map(UnicodeWidthStr::width);
        assert_eq!(start(&lines[0], "NAMESPACE"), start(&lines[2], "k8s.io"));
    }

    #[test]
    fn a_table_fits_every_terminal() {
        for room in [40, 80, 200] {
            let lines = lay_out(HEAD, rows(), Some(room));
            let widest = lines.iter().map(|line| line.width()).max();
            assert!(widest <= Some(room), "{room}: {lines:?}");
            assert_eq!(lines[1].contains('…'), room < 80, "{room}: {lines:?}");
            assert!(lines[1].contains("10.0 GiB"), "{room}: {lines:?}");
        }
        assert_eq!(lay_out(HEAD, rows(), Some(200)), lay_out(HEAD, rows(), None));
    }

    #[test]
    fn a_terminal_for_no_column_gets_a_line_for_each_value() {
        let lines = lay_out(HEAD, rows().skip(1).chain(rows()), Some(24));
        assert_eq!(
            lines[..5],
            [
                "NAME       日本",
                "NAMESPACE  k8s.io",
                "SIZE       1.0 KiB",
                "",
                "NAME"
            ]
        );
        assert!(lines[5].ends_with("training-of-monday:latest"), "{lines:?}");
    }

    #[test]
    fn a_cell_makes_no_line_of_its_own() {
        let row = ["a\nb".to_owned(), String::new(), String::new()];
        let lines = lay_out(HEAD, [row].into_iter(), None);
        assert_eq!(lines[1], "a\\nb");
    }
}
