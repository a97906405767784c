//! `firn status`: the transactions that are in progress, by their journals.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use firn_config::names;
use firn_host::{UnlessAbsent, clock, procfs};
use firn_image::memory::progress::Progress;
use firn_transaction::journal::{Outcome, Record};
use serde_json::json;

use crate::args::StatusArgs;
use crate::containerd::BUNDLES;
use crate::output::{self, line};
use crate::text;

/// A shim's program as the kernel has its name.
const SHIM: &str = "containerd-shim";

/// A transaction, with the container's bundle.
pub struct Transaction {
    namespace: String,
    record: Record,
    /// Of a copy that is going on.
    progress: Option<Progress>,
}

/// True: done.
pub fn run(args: &StatusArgs) -> Result<bool> {
    let state = &args.state;
    fs::metadata(state).with_context(|| format!("read {}, containerd's state directory", state.display()))?;
    let bundles = bundles(state, args.namespace.as_deref(), args.id.as_deref())?;
    if let (Some(id), true) = (&args.id, bundles.is_empty()) {
        let state = args.state.display();
        bail!("no container {id} runs here. hint: --namespace, or --state where containerd's is not {state}");
    }
    let found: Vec<Transaction> = bundles
        .iter()
        .filter_map(|bundle| Transaction::of(bundle).transpose())
        .collect::<Result<_>>()?;
    if args.json {
        let all: Vec<_> = found.iter().map(Transaction::as_json).collect();
        output::json(&json!({ "transactions": all }))?;
    } else if found.is_empty() {
        line!("nothing is in progress");
    } else {
        const HEAD: [&str; 9] = [
            "CONTAINER",
            "NAMESPACE",
            "OPERATION",
            "PHASE",
            "SINCE",
            "IN ALL",
            "COPIED",
            "RATE",
            "LEFT",
        ];
        output::table(HEAD, found.iter().map(Transaction::row));
    }
    Ok(true)
}

/// All transactions in progress; none where there is no containerd.
pub fn all(state: &Path) -> Result<Vec<Transaction>> {
    let bundles = bundles(state, None, None)?;
    let found = bundles.iter().map(|bundle| Transaction::of(bundle));
    found.filter_map(Result::transpose).collect()
}

/// The bundles of the containers that are asked for.
fn bundles(state: &Path, namespace: Option<&str>, id: Option<&str>) -> Result<Vec<PathBuf>> {
    let mut bundles = Vec::new();
    for namespace in entries(&state.join(BUNDLES), namespace)? {
        bundles.extend(entries(&namespace, id)?);
    }
    bundles.sort();
    Ok(bundles)
}

/// What is in a directory, or of that one name alone. A directory may go at any time.
fn entries(dir: &Path, only: Option<&str>) -> Result<Vec<PathBuf>> {
    let list = || fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect();
    let listed: std::io::Result<Option<Vec<PathBuf>>> = std::io::Result::if_present(list());
    let mut listed = listed
        .with_context(|| format!("list {}", dir.display()))?
        .unwrap_or_default();
    listed.retain(|path| only.is_none_or(|only| path.file_name().is_some_and(|name| name == only)));
    Ok(listed)
}

impl Transaction {
    /// None where nothing is in progress.
    fn of(bundle: &Path) -> Result<Option<Self>> {
        let read = Record::read(bundle);
        let record = read.with_context(|| format!("read the journal in {}", bundle.display()))?;
        let namespace = bundle.parent().and_then(Path::file_name).unwrap_or_default();
        Ok(record.map(|record| Self {
            namespace: namespace.to_string_lossy().into_owned(),
            progress: Progress::read(&bundle.join(names::BUNDLE_PROGRESS)),
            record,
        }))
    }

    pub fn container(&self) -> &str {
        &self.record.begin.container
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn is_of(&self, namespace: &str, container: &str) -> bool {
        self.namespace() == namespace && self.container() == container
    }

    /// The operation.
    pub fn kind(&self) -> &'static str {
        self.record.begin.op.name()
    }

    /// When it began, in milliseconds since 1970.
    pub fn begun(&self) -> u64 {
        self.record.begun
    }

    /// `running`, `suspended` or `killed`.
    pub fn state(&self) -> &'static str {
        let shim = procfs::comm(self.record.shim.cast_signed());
        match self.record.outcome {
            Some(Outcome::Suspended) => "suspended",
            _ if self.record.same_boot && shim.starts_with(SHIM) => "running",
            _ => "killed",
        }
    }

    pub fn phase(&self) -> &str {
        match (&self.progress, self.record.phase) {
            (Some(progress), _) => &progress.phase,
            (None, Some(phase)) => phase.name(),
            (None, None) => "begin",
        }
    }

    /// When the phase began, in milliseconds since 1970.
    fn phase_begun(&self) -> u64 {
        self.progress
            .as_ref()
            .map_or(self.record.entered, |progress| progress.begun)
    }

    fn as_json(&self) -> serde_json::Value {
        let ms = |since| u64::try_from(clock::since(since).as_millis()).unwrap_or(u64::MAX);
        let copied = self.progress.as_ref();
        json!({
            "container": self.record.begin.container, "namespace": self.namespace,
            "operation": self.record.begin.op, "phase": self.phase(), "state": self.state(),
            "ms": ms(self.record.begun), "phase_ms": ms(self.phase_begun()),
            "copied": copied.map(|copied| copied.done), "of": copied.map(|copied| copied.all),
            "per_s": copied.and_then(Progress::rate),
            "left_s": copied.and_then(Progress::left).map(|left| left.as_secs()),
        })
    }

    fn row(&self) -> [String; 9] {
        let begin = &self.record.begin;
        let seconds = |since| format!("{:.1} s", clock::since(since).as_secs_f64());
        let phase = match self.state() {
            "running" => self.phase().to_owned(),
            "suspended" => "suspended".to_owned(),
            _ => format!("{}, its shim was killed", self.phase()),
        };
        let copied = self.progress.as_ref();
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            begin.container.clone(),
            self.namespace.clone(),
            begin.op.name().to_owned(),
            phase,
            seconds(self.phase_begun()),
            seconds(self.record.begun),
            or_none(
                copied.map(|copied| format!("{} of {}", text::bytes(copied.done), text::bytes(copied.all))),
            ),
            or_none(
                copied
                    .and_then(Progress::rate)
                    .map(|rate| format!("{}/s", text::bytes(rate))),
            ),
            or_none(
                copied
                    .and_then(Progress::left)
                    .map(|left| format!("{} s", left.as_secs())),
            ),
        ]
    }
}
