//! An SVG of a recording: every line appears at its time and stays. Where nothing moves, all lines are shown.

use std::fmt::Write;

use anyhow::{Context, Result};
use serde_json::Value;

/// Width of a character, in tenths.
const CHARACTER: usize = 79;
const LINE: usize = 19;
/// Around the text, and the height of the bar above it.
const MARGIN: usize = 16;
const BAR: usize = 28;

/// A line of the terminal.
#[derive(Debug, PartialEq)]
struct Line {
    at: f64,
    text: String,
}

/// The picture of an asciicast v2.
pub(super) fn svg(cast: &str) -> Result<String> {
    let (title, lines, columns) = read(cast)?;
    let width = columns * CHARACTER / 10 + 2 * MARGIN;
    let height = BAR + lines.len() * LINE + 2 * MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">\n<style>\n\
         text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, \"DejaVu Sans Mono\", \
         monospace; white-space: pre; fill: #c9d1d9 }}\n.p {{ fill: #7ee787 }}\n\
         .c {{ fill: #ffffff; font-weight: 600 }}\n\
         .t {{ fill: #8b949e }}\n@keyframes w {{ from {{ opacity: 0 }} }}\n\
         g {{ animation: w step-end }}\n\
         @media (prefers-reduced-motion) {{ g {{ animation: none }} }}\n</style>\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#0d1117\" stroke=\"#30363d\"/>\n\
         <text class=\"t\" x=\"{MARGIN}\" y=\"19\">{}</text>\n",
        escaped(&title),
        title = escaped(&title),
    );
    let mut is_command = false;
    for (number, line) in lines.iter().enumerate() {
        let y = BAR + MARGIN + number * LINE + 8;
        let prompt = line.text.split_once("# ").filter(|(host, _)| is_host(host));
        let text = match prompt {
            Some((host, command)) => format!(
                "<tspan class=\"p\">{}# </tspan><tspan class=\"c\">{}</tspan>",
                escaped(host),
                escaped(command)
            ),
            None if is_command => format!("<tspan class=\"c\">{}</tspan>", escaped(&line.text)),
            None => escaped(&line.text),
        };
        is_command = (prompt.is_some() || is_command) && line.text.ends_with('\\');
        writeln!(
            svg,
            "<g style=\"animation-duration: {:.2}s\"><text x=\"{MARGIN}\" y=\"{y}\" \
             xml:space=\"preserve\">{text}</text></g>",
            line.at
        )?;
    }
    Ok(svg + "</svg>\n")
}

fn is_host(text: &str) -> bool {
    text.starts_with("gpu-") && !text.contains(' ')
}

/// Title, lines and columns of the recording. Lines that are longer are broken, as a terminal does.
fn read(cast: &str) -> Result<(String, Vec<Line>, usize)> {
    let mut entries = cast.lines().map(serde_json::from_str::<Value>);
    let header = entries.next().context("the recording is empty")??;
    let title = header["title"].as_str().unwrap_or_default().to_owned();
    let columns = header["width"].as_u64().and_then(|width| width.try_into().ok());
    let columns: usize = columns.context("the recording has no width")?;
    let mut lines = Vec::new();
    for entry in entries {
        let entry = entry?;
        let (at, text) = (entry[0].as_f64(), entry[2].as_str());
        let (at, text) = at.zip(text).context("an event has a time and a text")?;
        for shown in text.split_terminator("\r\n") {
            let characters: Vec<char> = shown.chars().collect();
            let rows = characters.chunks(columns).map(|row| row.iter().collect());
            lines.extend(rows.map(|text| Line { at, text }));
        }
    }
    Ok((title, lines, columns))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_appears_at_its_time() {
        let cast = "{\"version\":2,\"width\":20,\"title\":\"t\"}\n\
                    [0.0,\"o\",\"gpu-a# echo \\\\\\r\\n  '<&'\\r\\n\"]\n\
                    [1.25,\"o\",\"<&\\r\\n\"]\n[3.0,\"o\",\"\"]\n";
        assert_eq!(read(cast).unwrap().1.len(), 3);
        let svg = svg(cast).unwrap();
        assert!(svg.contains("<tspan class=\"p\">gpu-a# </tspan><tspan class=\"c\">echo \\</tspan>"));
        assert!(svg.contains("<tspan class=\"c\">  '&lt;&amp;'</tspan>"), "{svg}");
        assert!(
            svg.contains("1.25s\"><text x=\"16\" y=\"90\" xml:space=\"preserve\">&lt;&amp;</text>"),
            "{svg}"
        );
    }
}
