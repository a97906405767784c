//! The files of the history: `transactions.jsonl`, the one before it, and the totals of what was in earlier
//! ones.
//!
//! A line is appended by one call under a lock, and synced; a line that was cut short is no entry. When the
//! file is full it takes the place of the one before it, whose entries are added to the totals first. So
//! counters never go down, and these files stay below some 2 MiB. Readers take no lock: one that is
//! stopped must keep nobody waiting.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use firn_config::names;
use firn_host::{FileId, UnlessAbsent, atomic_file};

use serde_json::Value;

use super::logs::{self, LOGS};
use super::{Entry, Totals, totals};

const FILE: &str = "transactions.jsonl";
const BEFORE: &str = "transactions.1.jsonl";
const TOTALS: &str = "totals.json";

/// Size of a file from which on the next one is begun.
pub const LIMIT: u64 = 1 << 20;

/// How often a reader begins again because a file was replaced meanwhile.
const ATTEMPTS: usize = 5;

/// The directory of the history.
#[derive(Clone, Debug)]
pub struct HistoryDir(PathBuf);

/// What is in it.
#[derive(Debug, Default)]
pub struct History {
    /// The oldest first.
    pub entries: Vec<Entry>,
    /// All transactions that were ever written, those of the entries too.
    pub totals: Totals,
}

impl Default for HistoryDir {
    fn default() -> Self {
        Self(names::HISTORY.into())
    }
}

impl HistoryDir {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// Appends an entry, unless the file has it already.
    pub(super) fn append(&self, entry: &Entry) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        let lock = File::open(&self.0)?;
        lock.lock()?;
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        let mut file = self.open()?;
        let mut length = file.metadata()?.len();
        if length > 0 && length + line.len() as u64 > LIMIT {
            self.rotate()?;
            file = self.open()?;
            length = 0;
        }
        if entry.outcome == "killed" && parsed(&mut file)?.iter().any(|old| old["id"] == *entry.id) {
            return Ok(());
        }
        if length > 0 {
            let mut last = [0];
            file.read_exact_at(&mut last, length - 1)?;
            // The last line was cut short.
            if last != *b"\n" {
                line.insert(0, b'\n');
            }
        }
        let written = file.write_all(&line).and_then(|()| file.sync_data());
        // The part of a line that a full disk has taken.
        written.inspect_err(|_| drop(file.set_len(length)))
    }

    /// Keeps CRIU's log of an entry by this name.
    pub(super) fn keep_log(&self, log: &File, name: &str) -> io::Result<()> {
        logs::keep(&self.0, log, name)
    }

    /// Where CRIU's log of an entry is, if it is kept.
    pub fn log_of(&self, entry: &Entry) -> Option<PathBuf> {
        let name = Path::new(&entry.criu_log).file_name()?;
        let path = std::path::absolute(&self.0).ok()?.join(LOGS).join(name);
        (name == entry.criu_log.as_str() && path.exists()).then_some(path)
    }

    fn open(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let options = options.read(true).append(true).create(true).mode(0o600);
        options.custom_flags(libc::O_NOFOLLOW).open(self.0.join(FILE))
    }

    fn rotate(&self) -> io::Result<()> {
        let before = self.parse(BEFORE)?;
        let mut totals = self.totals()?;
        // Order matters: if this ends in between, the totals name what they have.
        if totals::add_all(&mut totals, &before) {
            atomic_file::write(&self.0, TOTALS, &serde_json::to_vec(&totals)?, 0o600)?;
        }
        fs::rename(self.0.join(FILE), self.0.join(BEFORE))
    }

    /// Id of the last transaction that was added, and what [`Totals`] has.
    fn totals(&self) -> io::Result<Value> {
        let text = fs::read(self.0.join(TOTALS)).if_present()?;
        let totals = text.and_then(|text| serde_json::from_slice(&text).ok());
        Ok(totals.filter(Value::is_object).unwrap_or(Value::Null))
    }

    fn parse(&self, name: &str) -> io::Result<Vec<Value>> {
        match File::open(self.0.join(name)).if_present()? {
            Some(mut file) => parsed(&mut file),
            None => Ok(Vec::new()),
        }
    }

    /// Reads all of it.
    pub fn read(&self) -> io::Result<History> {
        for _ in 0..ATTEMPTS {
            let is = self.identity()?;
            let (mut totals, before, last) = (self.totals()?, self.parse(BEFORE)?, self.parse(FILE)?);
            if self.identity()? == is {
                totals::add_all(&mut totals, &before);
                totals::add_all(&mut totals, &last);
                let entries = before.into_iter().chain(last);
                let entries = entries.filter_map(|entry| serde_json::from_value(entry).ok());
                return Ok(History {
                    entries: entries.collect(),
                    totals: match totals {
                        Value::Null => Totals::default(),
                        totals => serde_json::from_value(totals)?,
                    },
                });
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Changes when the files are replaced.
    fn identity(&self) -> io::Result<[Option<FileId>; 3]> {
        let of = |name| {
            let metadata = fs::symlink_metadata(self.0.join(name)).if_present()?;
            Ok::<_, io::Error>(metadata.map(|metadata| FileId::of(&metadata)))
        };
        Ok([of(FILE)?, of(BEFORE)?, of(TOTALS)?])
    }
}

/// The entries of a file, without lines that are none.
fn parsed(file: &mut File) -> io::Result<Vec<Value>> {
    let mut text = Vec::new();
    file.take(2 * LIMIT).read_to_end(&mut text)?;
    let lines = text.split(|byte| *byte == b'\n');
    Ok(lines
        .filter_map(|line| serde_json::from_slice(line).ok())
        .filter(Value::is_object)
        .collect())
}
