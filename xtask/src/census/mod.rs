//! `cargo xtask census`: the size of the tree in figures.

#[cfg(test)]
mod sizes;
mod source;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::tools::cargo;
use crate::workspace;
use source::{Source, crates, sources};

/// Files with more lines are listed.
const LONG_FILE: usize = 400;

/// The programs that are installed.
const PROGRAMS: [&str; 6] = [
    "containerd-shim-firn-v2",
    "firn-gpu",
    "firn-hook",
    "firn-runc",
    "firn",
    "libfirn_criu.so",
];

/// Where release builds are found, in the order in which they are looked for.
const RELEASES: [&str; 3] = [
    "target/x86_64-unknown-linux-musl/release",
    "target/aarch64-unknown-linux-musl/release",
    "target/release",
];

/// Count lines, long files, public items, dependencies and program sizes
///
/// Lines are those that are not blank. A line belongs to a crate's code, to its comments, to its unit tests
/// (modules `tests` and `fuzz`), or to the suites (crates below tests/, and directories `tests` of crates).
#[derive(clap::Args)]
pub struct Cmd {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Root of another checkout
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

pub fn run(cmd: &Cmd) -> Result<ExitCode> {
    let census = match &cmd.root {
        Some(root) => Census::of(root)?,
        None => Census::of(&workspace()?)?,
    };
    if cmd.json {
        println!("{:#}", census.json())
    } else {
        census.print()
    }
    Ok(ExitCode::SUCCESS)
}

struct Census {
    rows: Vec<Row>,
    /// Lines and names of long files, the longest first.
    long_files: Vec<(usize, String)>,
    long_product_files: usize,
    /// Packages of others that the shim is built from; `None` where cargo cannot resolve them offline.
    shim_dependencies: Option<usize>,
    /// Packages of others in Cargo.lock.
    all_dependencies: usize,
    /// Bytes of the release programs that have been built.
    programs: Vec<(&'static str, u64)>,
}

/// What a row counts.
const FIGURES: [&str; 6] = [
    "files",
    "code",
    "comments",
    "unit tests",
    "suites",
    "public items",
];

struct Row {
    name: String,
    figures: [usize; FIGURES.len()],
}

impl Row {
    fn of(name: String, sources: &[Source]) -> Self {
        let sum = |count: fn(&Source) -> usize| sources.iter().map(count).sum();
        Self {
            name,
            figures: [
                sources.len(),
                sum(|source| source.code),
                sum(|source| source.comments),
                sum(|source| source.tests),
                sum(|source| source.suites),
                sum(|source| source.public_items),
            ],
        }
    }

    fn sum<'r>(name: &str, rows: impl Iterator<Item = &'r Self> + Clone) -> Self {
        Self {
            name: name.to_owned(),
            figures: std::array::from_fn(|at| rows.clone().map(|row| row.figures[at]).sum()),
        }
    }
}

/// Whether a crate is installed on nodes, rather than used to build and test.
fn is_product(krate: &Path) -> bool {
    !["tests", "xtask", "bench", "fuzz"]
        .iter()
        .any(|tools| krate.starts_with(tools))
}

impl Census {
    fn of(root: &Path) -> Result<Self> {
        let crates = crates(root)?;
        let (mut rows, mut long_files) = (Vec::new(), Vec::new());
        let mut long_product_files = 0;
        for krate in &crates {
            let sources = sources(root, krate, &crates)?;
            rows.push(Row::of(krate.display().to_string(), &sources));
            for source in sources {
                if source.lines > LONG_FILE {
                    long_files.push((source.lines, source.path.display().to_string()));
                    long_product_files += usize::from(is_product(krate));
                }
            }
        }
        long_files.sort_by(|a, b| b.cmp(a));
        let lock = fs::read_to_string(root.join("Cargo.lock")).context("read Cargo.lock")?;
        Ok(Self {
            rows,
            long_files,
            long_product_files,
            shim_dependencies: dependencies(root, "firn-shim"),
            all_dependencies: lock.lines().filter(|line| line.starts_with("source = ")).count(),
            programs: PROGRAMS
                .iter()
                .filter_map(|name| Some((*name, size(root, name)?)))
                .collect(),
        })
    }

    fn sums(&self) -> [Row; 2] {
        let product = self.rows.iter().filter(|row| is_product(Path::new(&row.name)));
        [Row::sum("product", product), Row::sum("all", self.rows.iter())]
    }

    fn print(&self) {
        let heads = FIGURES.map(|head| format!("{head:>12}"));
        println!("{:<20} {}", "crate", heads.join(" "));
        for row in self.rows.iter().chain(&self.sums()) {
            let figures = row.figures.map(|figure| format!("{figure:>12}"));
            println!("{:<20} {}", row.name, figures.join(" "));
        }
        let (long, product) = (self.long_files.len(), self.long_product_files);
        println!("\nfiles of more than {LONG_FILE} lines: {long}, of the product {product}");
        self.long_files
            .iter()
            .for_each(|(lines, path)| println!("{lines:>6} {path}"));
        let shim = self
            .shim_dependencies
            .map_or("unknown".to_owned(), |count| count.to_string());
        println!(
            "\ndependencies: {shim} of the shim, {} in all",
            self.all_dependencies
        );
        for (name, bytes) in &self.programs {
            println!("{:>9} KiB {name}", bytes / 1024);
        }
    }

    fn json(&self) -> Value {
        let row = |row: &Row| {
            let figures = FIGURES.iter().zip(row.figures);
            let figures = figures.map(|(head, figure)| (head.replace(' ', "_"), json!(figure)));
            (row.name.clone(), Value::Object(figures.collect()))
        };
        let rows: serde_json::Map<String, Value> = self.rows.iter().chain(&self.sums()).map(row).collect();
        let programs = self
            .programs
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), json!(bytes)));
        json!({
            "crates": rows,
            "long_files": self.long_files,
            "long_product_files": self.long_product_files,
            "dependencies": { "shim": self.shim_dependencies, "all": self.all_dependencies },
            "programs": programs.collect::<serde_json::Map<_, _>>(),
        })
    }
}

/// Number of packages, not of the workspace, that a package is built from.
fn dependencies(root: &Path, package: &str) -> Option<usize> {
    let mut cargo = cargo();
    cargo
        .args(["tree", "--offline", "--locked", "--edges", "normal"])
        .args(["--prefix", "none", "--format", "{p}", "--package", package])
        .current_dir(root);
    let output = cargo.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    // `name v1.2.3`, of the workspace `name v1.2.3 (/path)`, repeated `name v1.2.3 (*)`, macros
    // `(proc-macro)`.
    let packages = text.lines().filter(|line| !line.contains("(/"));
    let names = packages.map(|line| line.split_once(" (").map_or(line, |(name, _)| name));
    let names: BTreeSet<&str> = names.filter(|name| !name.is_empty()).collect();
    Some(names.len())
}

/// Bytes of a release program.
fn size(root: &Path, program: &str) -> Option<u64> {
    let found = RELEASES
        .iter()
        .find_map(|dir| fs::metadata(root.join(dir).join(program)).ok())?;
    Some(found.len())
}
