//! `firn inspect --processes`: the tree of the processes that a checkpoint holds.

use std::collections::BTreeMap;
use std::path::Path;

use firn_host::ProblemReport;
use firn_image::criu::{self, Process};
use firn_image::manifest::Manifest;
use serde::Serialize;

use crate::output::line;

/// Deepest level of the tree that is indented.
const DEEPEST: usize = 32;

/// The processes, parents first.
pub struct Tree {
    all: Vec<Process>,
    /// Those whose GPU state the image holds.
    gpu: Vec<u32>,
}

/// A process of a checkpoint.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ProcessRow<'a> {
    /// Its pid in the container.
    pid: u32,
    /// Pid of its parent in the container; 0 if that is not in the checkpoint.
    parent: u32,
    /// Number of its threads.
    threads: usize,
    /// Its name.
    comm: &'a str,
    /// Whether it had ended, and its parent had not yet asked for its status.
    ended: bool,
    /// Whether the checkpoint holds GPU state of it.
    gpu: bool,
}

impl Tree {
    pub fn read(dir: &Path, manifest: Option<&Manifest>) -> Result<Self, ProblemReport> {
        let processes = manifest.iter().flat_map(|manifest| &manifest.processes);
        let gpu = processes.filter_map(|process| u32::try_from(process.pid).ok());
        Ok(Self {
            all: criu::processes(dir)?,
            gpu: gpu.collect(),
        })
    }

    pub fn shown(&self) -> Vec<ProcessRow<'_>> {
        let all = self.all.iter();
        all.map(|process| ProcessRow {
            pid: process.pid,
            parent: process.parent,
            threads: process.threads,
            comm: &process.comm,
            ended: process.ended,
            gpu: self.gpu.contains(&process.pid),
        })
        .collect()
    }

    pub fn print(&self) {
        let mut depths: BTreeMap<u32, usize> = BTreeMap::new();
        for process in self.in_order() {
            let depth = depths.get(&process.parent).map_or(0, |depth| depth + 1);
            depths.insert(process.pid, depth);
            let threads = match process.threads {
                1 => String::new(),
                count => format!(", {count} threads"),
            };
            let gpu = if self.gpu.contains(&process.pid) {
                ", GPU state"
            } else {
                ""
            };
            let ended = if process.ended { ", has ended" } else { "" };
            let indent = "  ".repeat(depth.min(DEEPEST));
            line!(
                "           {indent}{} {}{threads}{gpu}{ended}",
                process.pid,
                process.comm
            );
        }
    }

    /// Each process before its children, and these before the next one. What leads in a circle is left out.
    fn in_order(&self) -> Vec<&Process> {
        let mut children: BTreeMap<u32, Vec<&Process>> = BTreeMap::new();
        for process in &self.all {
            children.entry(process.parent).or_default().push(process);
        }
        let is_root = |process: &&Process| !self.all.iter().any(|other| other.pid == process.parent);
        let mut waiting: Vec<&Process> = self.all.iter().filter(is_root).rev().collect();
        let mut order = Vec::new();
        while let Some(process) = waiting.pop() {
            order.push(process);
            waiting.extend(children.remove(&process.pid).into_iter().flatten().rev());
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(of: &[(u32, u32)]) -> Vec<u32> {
        let process = |&(pid, parent)| Process {
            pid,
            parent,
            threads: 1,
            comm: "sh".to_owned(),
            ended: false,
        };
        let tree = Tree {
            all: of.iter().map(process).collect(),
            gpu: Vec::new(),
        };
        tree.in_order().iter().map(|process| process.pid).collect()
    }

    #[test]
    fn children_follow_their_parent() {
        assert_eq!(tree(&[(1, 0), (5, 1), (7, 1), (9, 5)]), [1, 5, 9, 7]);
        assert_eq!(tree(&[(1, 0), (2, 3), (3, 2)]), [1], "a circle");
    }
}
