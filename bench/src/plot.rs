//! `cargo xtask bench plot`: readings that were kept as JSON, as a picture of bars.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Deserialize;

/// Draw the JSON of a benchmark as an SVG next to it
///
/// A bar is firn's median as a part of the stock shim's, which is the line at 100 %. Of rates it is the
/// inverse, so that less is better in all of them. Cases of which either is zero are left out.
#[derive(clap::Args)]
pub struct Options {
    /// The output of `cargo xtask bench ... --json`
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// A case, as `--json` prints it.
#[derive(Debug, Deserialize)]
struct Reading {
    case: String,
    unit: String,
    stock: Median,
    firn: Median,
}

#[derive(Debug, Deserialize)]
struct Median {
    median: f64,
}

impl Reading {
    /// firn's part of the stock shim's, the less the better.
    fn part(&self) -> Option<f64> {
        let (stock, firn) = (self.stock.median, self.firn.median);
        let is_rate = ["MB/s", "MiB/s"].contains(&&*self.unit);
        let part = if is_rate { stock / firn } else { firn / stock };
        (stock > 0.0 && firn > 0.0).then_some(part)
    }
}

pub fn run(options: &Options) -> Result<ExitCode> {
    for file in &options.files {
        let json = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        let svg = file.with_extension("svg");
        fs::write(&svg, drawn(file, &json)?).with_context(|| format!("write {}", svg.display()))?;
        println!("{}", svg.display());
    }
    Ok(ExitCode::SUCCESS)
}

const WIDTH: usize = 720;
const ROW: usize = 24;
const TOP: usize = 56;
/// Where bars begin, and how long the one of the stock shim is.
const LEFT: f64 = 210.0;
const WHOLE: f64 = 260.0;
/// Longer bars are cut off.
const LONGEST: f64 = 1.15;

fn drawn(file: &Path, json: &str) -> Result<String> {
    let readings: Vec<Reading> = json
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{} is not the output of --json", file.display()))?;
    let rows: Vec<_> = readings
        .iter()
        .filter_map(|reading| Some((reading, reading.part()?)))
        .collect();
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    let height = TOP + rows.len() * ROW + 12;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Benchmark {name}\">\n<style>\n\
         svg {{ --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --bar: #0969da; --line: #d1d9e0 }}\n\
         @media (prefers-color-scheme: dark) {{ svg {{ \
         --paper: #0d1117; --ink: #f0f6fc; --soft: #9198a1; --bar: #4493f8; --line: #3d444d }} }}\n\
         text {{ font: 13px system-ui, \"DejaVu Sans\", sans-serif; fill: var(--ink) }}\n\
         .s {{ fill: var(--soft) }} .e {{ text-anchor: end }} .m {{ text-anchor: middle }}\n\
         .b {{ fill: var(--bar) }}\n\
         .p {{ fill: var(--paper); stroke: var(--line) }} .l {{ stroke: var(--soft) }}\n</style>\n\
         <rect class=\"p\" width=\"{WIDTH}\" height=\"{height}\" rx=\"8\"/>\n\
         <text class=\"e\" x=\"{left}\" y=\"24\">{name}</text>\n\
         <text class=\"s m\" x=\"{whole}\" y=\"24\">stock shim</text>\n\
         <text class=\"s e\" x=\"{end}\" y=\"24\">firn, stock (medians)</text>\n\
         <text class=\"s\" x=\"{LEFT}\" y=\"24\">less is better</text>\n\
         <path class=\"l\" d=\"M{whole} 32V{bottom}\"/>\n",
        left = LEFT - 12.0,
        whole = LEFT + WHOLE,
        end = WIDTH - 16,
        bottom = height - 8,
    );
    for (number, (reading, part)) in rows.iter().enumerate() {
        let top = TOP + number * ROW - 14;
        let (bar, base) = (part.min(LONGEST) * WHOLE, top + 12);
        let Reading { case, unit, .. } = reading;
        writeln!(
            svg,
            "<text class=\"e\" x=\"{}\" y=\"{base}\">{case}</text>\n\
             <rect class=\"b\" x=\"{LEFT}\" y=\"{top}\" width=\"{bar:.1}\" height=\"15\" rx=\"2\"/>\n\
             <text class=\"s e\" x=\"{}\" y=\"{base}\">{}, {} {unit}</text>",
            LEFT - 12.0,
            WIDTH - 16,
            figure(reading.firn.median),
            figure(reading.stock.median),
        )?;
    }
    Ok(svg + "</svg>\n")
}

/// With three digits or so.
fn figure(value: f64) -> String {
    match value {
        ..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/evidence")
    }

    #[test]
    fn less_is_better_in_every_bar() {
        let reading = |unit, stock, firn| {
            let json = format!(
                "{{\"case\":\"c\",\"unit\":\"{unit}\",\"stock\":{{\"median\":{stock}}},\
                 \"firn\":{{\"median\":{firn}}}}}"
            );
            serde_json::from_str::<Reading>(&json).unwrap().part()
        };
        assert_eq!(reading("ms", 100.0, 50.0), Some(0.5));
        assert_eq!(reading("MB/s", 100.0, 200.0), Some(0.5));
        assert_eq!(reading("us/s", 100.0, 0.0), None);
    }

    /// The pictures are those of the readings, and the page has the readings.
    #[test]
    fn pictures_and_page_show_the_readings_that_are_kept() {
        let page = fs::read_to_string(evidence().join("benchmarks.md")).unwrap();
        let mut pictures = 0;
        for entry in fs::read_dir(evidence().join("benchmarks")).unwrap() {
            let file = entry.unwrap().path();
            if file.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let json = fs::read_to_string(&file).unwrap();
            let svg = fs::read_to_string(file.with_extension("svg")).unwrap();
            assert!(
                svg == drawn(&file, &json).unwrap(),
                "{} is another picture",
                file.display()
            );
            for line in json.lines() {
                let reading: Reading = serde_json::from_str(line).unwrap();
                let Reading { case, unit, .. } = &reading;
                let (stock, firn) = (reading.stock.median, reading.firn.median);
                let row = format!("\n| {case} | {unit} | {stock:.2} | {firn:.2} |");
                assert!(page.contains(&row), "the page has not {row}");
            }
            pictures += 1;
        }
        assert!(pictures > 0);
    }
}
