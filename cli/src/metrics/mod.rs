//! `firn metrics`: the node's transactions and containers as Prometheus reads them.

pub mod args;
mod text;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use firn_host::atomic_file;
use firn_transaction::history::HistoryDir;
use firn_transaction::lease::Lease;

use self::args::MetricsArgs;
use crate::output;
use crate::ps::args::Where;
use crate::ps::container::{self, Container};

/// True: done.
pub fn run(args: &MetricsArgs) -> Result<bool> {
    let text = of_node(&args.state, &args.dir)?;
    match &args.textfile {
        Some(path) => write(path, &text)?,
        None => output::raw(&text),
    }
    Ok(true)
}

/// The containers under firn; none where there is no containerd.
fn containers(state: &Path) -> Result<Vec<Container>> {
    let at = Where {
        namespace: None,
        state: state.to_owned(),
    };
    if state.exists() {
        container::find(&at, None)
    } else {
        Ok(Vec::new())
    }
}

/// The metrics of this node.
fn of_node(state: &Path, dir: &Path) -> Result<String> {
    let history = HistoryDir::new(dir).read();
    let history = history.with_context(|| format!("read the history in {}: try with sudo", dir.display()))?;
    let now = text::Now {
        containers: containers(state)?,
        leases: Lease::all().context("read which containers have GPUs: try with sudo")?,
    };
    text::of(&history.totals, &now)
}

fn write(path: &Path, text: &str) -> Result<()> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.filter(|name| Path::new(name).extension().is_some_and(|ext| ext == "prom"));
    ensure!(
        name.is_some(),
        "node_exporter does not read {}. hint: name it {}",
        path.display(),
        path.with_extension("prom").display()
    );
    let dir = match path.parent() {
        Some(dir) if dir != Path::new("") => dir,
        _ => Path::new("."),
    };
    let written = atomic_file::write(dir, name.unwrap_or_default(), text.as_bytes(), 0o644);
    written.with_context(|| format!("write {}", path.display()))
}
