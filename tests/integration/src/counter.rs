//! What gpu-counter prints.

use std::collections::BTreeMap;

/// One line of gpu-counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Pid in the container.
    pub pid: i32,
    /// Number of the thread.
    pub thread: u32,
    /// Ordinal of the GPU.
    pub gpu: u32,
    /// UUID as the process knows it.
    pub uuid: String,
    /// Iteration.
    pub iter: u64,
    /// Sum over the buffer.
    pub checksum: String,
    /// Whether every element was right.
    pub ok: bool,
}

impl Line {
    fn parse(text: &str) -> Option<Self> {
        let fields = text.strip_prefix("counter ")?;
        let mut values: BTreeMap<&str, &str> = BTreeMap::new();
        let mut ok = false;
        for word in fields.split_whitespace() {
            match word.split_once('=') {
                Some((key, value)) => drop(values.insert(key, value)),
                None => ok |= word == "ok",
            }
        }
        Some(Self {
            pid: values.get("pid")?.parse().ok()?,
            thread: values.get("thread")?.parse().ok()?,
            gpu: values.get("gpu")?.parse().ok()?,
            uuid: (*values.get("uuid")?).to_owned(),
            iter: values.get("iter")?.parse().ok()?,
            checksum: (*values.get("checksum")?).to_owned(),
            ok,
        })
    }
}

/// All lines that a container's counters have written, in the order written.
#[derive(Clone, Debug, Default)]
pub struct Lines(pub Vec<Line>);

impl Lines {
    /// Reads a log; a last line without its end is left out.
    pub fn parse(text: &str) -> Self {
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        Self(whole.lines().filter_map(Line::parse).collect())
    }

    /// The last line of each counter (process, thread and GPU).
    pub fn last(&self) -> BTreeMap<(i32, u32, u32), Line> {
        self.0
            .iter()
            .map(|line| ((line.pid, line.thread, line.gpu), line.clone()))
            .collect()
    }

    /// The iteration that all counters have reached; 0 with fewer than `counters` of them.
    pub fn reached(&self, counters: usize) -> u64 {
        let last = self.last();
        if last.len() < counters {
            return 0;
        }
        last.values().map(|line| line.iter).min().unwrap_or(0)
    }

    /// What is wrong with the lines: an element that was not right, or an iteration that was left out or
    /// repeated.
    pub fn fault(&self) -> Option<String> {
        self.fault_if_carried(0)
    }

    /// As [`Lines::fault`], for the log of a restored container.
    ///
    /// `ctr containers checkpoint --rw` copies the log before the dump, and the counter writes on until the
    /// driver has locked it. A log that was `carried` so many times may lack some iterations at as many
    /// places.
    pub fn fault_if_carried(&self, carried: usize) -> Option<String> {
        let mut last: BTreeMap<(i32, u32, u32), (u64, usize)> = BTreeMap::new();
        for line in &self.0 {
            if !line.ok {
                return Some(format!("not ok: {line:?}"));
            }
            let key = (line.pid, line.thread, line.gpu);
            let Some((before, gaps)) = last.get(&key).copied() else {
                last.insert(key, (line.iter, 0));
                continue;
            };
            let gap = line.iter > before + 1;
            if line.iter <= before || gaps + usize::from(gap) > carried {
                return Some(format!(
                    "iteration {before} of {key:?} was followed by {}",
                    line.iter
                ));
            }
            last.insert(key, (line.iter, gaps + usize::from(gap)));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Lines {
        Lines::parse(text)
    }

    #[test]
    fn a_gap_a_repetition_and_a_wrong_element_are_faults() {
        let good = "counter pid=7 thread=0 gpu=0 uuid=GPU-1 iter=1 checksum=5 ok\n";
        let next = "counter pid=7 thread=0 gpu=0 uuid=GPU-1 iter=2 checksum=6 ok\n";
        let later = "counter pid=7 thread=0 gpu=0 uuid=GPU-1 iter=4 checksum=6 ok\n";
        let bad = "counter pid=7 thread=0 gpu=0 uuid=GPU-1 iter=2 checksum=6 mismatches=1\n";
        assert_eq!(lines(&[good, next].concat()).fault(), None);
        assert!(lines(&[good, later].concat()).fault().is_some());
        assert!(lines(&[good, good].concat()).fault().is_some());
        assert!(lines(&[good, bad].concat()).fault().is_some());
        assert_eq!(lines(&[good, later].concat()).fault_if_carried(1), None);
        assert!(lines(&[good, later, next].concat()).fault_if_carried(1).is_some());
    }

    #[test]
    fn a_line_that_is_being_written_does_not_count() {
        let text = "counter pid=7 thread=0 gpu=0 uuid=GPU-1 iter=1 checksum=5 ok\ncounter pid=7 thread";
        assert_eq!(lines(text).0.len(), 1);
        assert_eq!(lines(text).reached(1), 1);
        assert_eq!(lines(text).reached(2), 0);
    }
}
