//! A counter's log, read as it grows: every iteration once, in order, with the sum that an undisturbed run
//! would print.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use firn_node::wait_for;
use firn_workloads::counter::checksum;

use crate::{BUNDLES, GpuHost, Lines};

/// How long a few iterations may take.
const STEP: Duration = Duration::from_secs(30);
/// In which a container that stands still writes nothing: several steps of the counter.
const STILL: Duration = Duration::from_millis(150);

/// See the module head.
pub(super) struct Counting {
    log: PathBuf,
    offset: u64,
    begun: String,
    /// Last iteration of each counter.
    last: BTreeMap<(i32, u32, u32), u64>,
    counters: usize,
    bytes: usize,
    /// The log of a restored container was copied before its dump: each counter may lack iterations once.
    restored: bool,
    skipped: BTreeSet<(i32, u32, u32)>,
}

impl Counting {
    /// This log in a container with so many counters of so many bytes each.
    pub(super) fn new(host: &GpuHost, id: &str, log: &str, counters: usize, bytes: usize) -> Self {
        Self {
            log: host.node().path(format!("{BUNDLES}/{id}/rootfs{log}")),
            offset: 0,
            begun: String::new(),
            last: BTreeMap::new(),
            counters,
            bytes,
            restored: false,
            skipped: BTreeSet::new(),
        }
    }

    /// The log of one that was restored: it holds lines of its source.
    pub(super) fn restored(self) -> Self {
        Self {
            restored: true,
            ..self
        }
    }

    /// Reads and checks what has been written since.
    fn read(&mut self) -> Result<usize> {
        let mut file = match File::open(&self.log) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(error).with_context(|| format!("read {}", self.log.display())),
        };
        file.seek(SeekFrom::Start(self.offset))?;
        let mut text = String::new();
        self.offset += file.read_to_string(&mut text)? as u64;
        self.begun.push_str(&text);
        let whole = self.begun.rfind('\n').map_or(0, |end| end + 1);
        let rest = self.begun.split_off(whole);
        let lines = Lines::parse(&std::mem::replace(&mut self.begun, rest)).0;
        for line in &lines {
            ensure!(line.ok, "not ok: {line:?}");
            let iteration = u32::try_from(line.iter)?;
            let expected = checksum(self.bytes, iteration).to_string();
            ensure!(
                line.checksum == expected,
                "the checksum should be {expected}: {line:?}"
            );
            let key = (line.pid, line.thread, line.gpu);
            if let Some(before) = self.last.insert(key, line.iter)
                && line.iter != before + 1
            {
                ensure!(
                    self.restored && line.iter > before && self.skipped.insert(key),
                    "iteration {before} of {key:?} was followed by {}",
                    line.iter
                );
            }
        }
        Ok(lines.len())
    }

    fn reached(&self) -> u64 {
        if self.last.len() < self.counters {
            0
        } else {
            self.last.values().copied().min().unwrap_or(0)
        }
    }

    /// Waits until all counters have gone `more` iterations further.
    pub(super) fn goes_on(&mut self, more: u64) -> Result<()> {
        self.read()?;
        let from = self.reached();
        wait_for(&format!("{more} iterations after {from}"), STEP, || {
            self.read()?;
            Ok((self.reached() >= from + more).then_some(()))
        })
    }

    /// Makes sure that nothing is written for a while.
    pub(super) fn stands_still(&mut self) -> Result<()> {
        self.read()?;
        // A span, not a condition: nothing must happen in it.
        std::thread::sleep(STILL);
        match self.read()? {
            0 => Ok(()),
            lines => bail!("it continued by {lines} lines"),
        }
    }
}
