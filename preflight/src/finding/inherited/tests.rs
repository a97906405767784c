use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::*;

#[test]
fn in_a_chain_of_32000_processes_every_parent_is_read_once() {
    const LENGTH: i32 = 32_000;
    let reads = std::cell::Cell::new(0);
    let parent = |pid| {
        reads.set(reads.get() + 1);
        (pid > 1).then(|| pid - 1)
    };
    for (cuda, forked) in [(1, true), (LENGTH + 1, false)] {
        reads.set(0);
        let mut descent = Descent::of([cuda]);
        assert!((2..=LENGTH).all(|pid| descent.includes(pid, parent) == forked));
        assert!(descent.includes(LENGTH, parent) == forked);
        assert!(reads.get() <= LENGTH, "{}", reads.get());
    }
    let mut descent = Descent::of([1]);
    let cycle = |pid| Some(if pid == 7 { 8 } else { 7 });
    assert!(!descent.includes(7, cycle), "a cycle");
}

/// A process: pid, parent, mapped file, open files by number.
pub(crate) type Process<'a> = (i32, i32, &'a str, &'a [(i32, &'a str)]);

pub(crate) fn processes(all: &[Process<'_>]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (pid, parent, mapped, open) in all {
        let process = root.path().join(pid.to_string());
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::write(process.join("status"), format!("Name:\tx\nPPid:\t{parent}\n")).unwrap();
        let maps = format!("7f10-7f20 rw-s 00000000 00:0e 77    {mapped}\n");
        fs::write(process.join("maps"), maps).unwrap();
        for (fd, to) in *open {
            symlink(to, process.join("fd").join(fd.to_string())).unwrap();
        }
    }
    root
}

const CONTROL: &str = "/dev/nvidiactl";
const GPU: &str = "/dev/nvidia0";
const CUDA: &str = "/lib/libcuda.so.1";
const PARENT: Process<'_> = (7, 1, CUDA, &[(3, CONTROL), (4, GPU)]);

/// What is wrong, by pid, and the pids of those that have only inherited files.
type Seen = (Vec<(i32, &'static str, Certainty)>, Vec<i32>);

type IsSame<'a> = &'a dyn Fn(Descriptor, Descriptor) -> bool;

fn seen_with(all: &[Process<'_>], processes: Processes<'_>, file: IsSame<'_>) -> Seen {
    let memory: &dyn Fn(i32, i32) -> bool = &|_, _| false;
    seen_by(all, processes, Same { file, memory })
}

/// The process 7 uses CUDA.
fn seen_by(all: &[Process<'_>], processes: Processes<'_>, same: Same<'_>) -> Seen {
    let found = found_by(all, processes, same);
    let row = |finding: Finding| match finding.refusal {
        Refusal::LeakedGpu { pid, .. } => (pid, "open", finding.certainty),
        Refusal::InheritedGpu { pid, .. } => (pid, "no plugin", finding.certainty),
        Refusal::Vfork { pid, .. } => (pid, "vfork", finding.certainty),
        other => panic!("{other}"),
    };
    let pids = found.inherited.iter().map(|inherited| inherited.pid).collect();
    (found.findings.into_iter().map(row).collect(), pids)
}

fn found_by(all: &[Process<'_>], processes: Processes<'_>, same: Same<'_>) -> OfGpus {
    let root = self::processes(all);
    let holders: Vec<i32> = all
        .iter()
        .map(|process| process.0)
        .filter(|pid| *pid != 7)
        .collect();
    let processes = Processes {
        cuda: &[7],
        ..processes
    };
    inspect(root.path(), &processes, &holders, same).unwrap()
}

const PLUGIN: Processes<'_> = Processes {
    dumped: &[],
    cuda: &[],
    ranks: false,
    criu_plugin: true,
    inherited_before: &[],
    may_start: false,
};

fn seen(all: &[Process<'_>], is_same: IsSame<'_>) -> Seen {
    seen_with(all, PLUGIN, is_same)
}

#[test]
fn a_child_whose_files_are_all_those_of_a_cuda_process_has_inherited_them() {
    let all: &[Process<'_>] = &[
        (1, 0, "/bin/sh", &[]),
        PARENT,
        (8, 7, CUDA, &[(0, "/dev/null"), (4, GPU)]),
        // A child of that child, which has given the descriptor another number.
        (9, 8, CUDA, &[(12, CONTROL)]),
        // It has closed all, and keeps a mapping.
        (10, 7, GPU, &[]),
        (11, 7, "/bin/sleep", &[(0, "/dev/null")]),
    ];
    let number = |descriptor: Descriptor| match (descriptor.pid, descriptor.number) {
        (7 | 8, 4) => 104,
        (7, 3) | (9, 12) => 103,
        other => other.0 * 1000 + other.1,
    };
    let is_same = |a, b| number(a) == number(b);
    assert_eq!(seen(all, &is_same), (vec![], vec![8, 9, 10]));
    assert_eq!(seen(&all[..2], &|_, _| true), (vec![], vec![]));
    let without = Processes {
        criu_plugin: false,
        ..PLUGIN
    };
    let (refused, _) = seen_with(all, without, &is_same);
    assert_eq!(
        refused,
        [8, 9, 10].map(|pid| (pid, "no plugin", Certainty::Certain))
    );
}

#[test]
fn one_file_of_its_own_shows_that_a_child_uses_the_driver() {
    let own: &[(i32, &str)] = &[(3, CONTROL), (4, GPU), (9, CONTROL)];
    let same_number = |a: Descriptor, b: Descriptor| a.number == b.number;
    let refused = (vec![(8, "open", Certainty::Certain)], vec![]);
    assert_eq!(seen(&[PARENT, (8, 7, CUDA, own)], &same_number), refused);
    // The node was removed: an image could not name it.
    let removed = &[(4, "/dev/nvidia0 (deleted)")];
    assert_eq!(seen(&[PARENT, (8, 7, CUDA, removed)], &|_, _| true), refused);
    // No child of a CUDA process.
    let monitor: Process<'_> = (12, 1, "/lib/libnvidia-ml.so.1", &[(3, CONTROL)]);
    let with = |certainty| (vec![(12, "open", certainty)], vec![]);
    let none = |_, _| false;
    assert_eq!(seen(&[PARENT, monitor], &none), with(Certainty::Suspected));
    // Its parent has ended, or the file was sent to it.
    let sent = seen(&[PARENT, monitor], &|_, _| true);
    assert_eq!(sent, with(Certainty::Certain));
    let child: Process<'_> = (8, 7, CUDA, &[(3, CONTROL)]);
    assert_eq!(
        seen(&[PARENT, child, monitor], &same_number),
        (vec![(12, "open", Certainty::Certain)], vec![8]),
        "the plugin would dump it"
    );
}

/// The driver does not know a process yet that is in cuInit.
#[test]
fn a_process_with_libcuda_and_a_node_may_be_in_cu_init() {
    let all: &[Process<'_>] = &[
        PARENT,
        (8, 7, CUDA, &[(4, GPU)]),
        (9, 7, CUDA, &[(3, CONTROL)]),
        (10, 1, "/opt/lib/libcuda.so.580.159.04", &[(9, CONTROL)]),
        (11, 1, "/lib/libcudart.so.13", &[(9, CONTROL)]),
    ];
    // 8 has what its parent has.
    let same = Same {
        file: &|a, b| a.number == b.number && a.pid == 8 && b.pid == 7,
        memory: &|_, _| false,
    };
    let found = |may_start| {
        let found = found_by(all, Processes { may_start, ..PLUGIN }, same);
        (found.starting, found.findings.len(), found.inherited.len())
    };
    assert_eq!(found(true), (vec![9, 10], 1, 1));
    assert_eq!(found(false), (vec![], 3, 1), "they have had their time");
    let alone = Processes {
        criu_plugin: false,
        ..PLUGIN
    };
    let none: IsSame<'_> = &|_, _| false;
    let (refused, _) = seen_with(&all[3..], alone, none);
    let wanted = [
        (10, "open", Certainty::Certain),
        (11, "open", Certainty::Suspected),
    ];
    assert_eq!(refused, wanted);
}

#[test]
fn a_process_with_its_parents_memory_cannot_be_dumped() {
    let child: Process<'_> = (8, 7, CUDA, &[(3, CONTROL)]);
    let same = Same {
        file: &|_, _| true,
        memory: &|pid, parent| (pid, parent) == (8, 7),
    };
    let other: Process<'_> = (9, 7, CUDA, &[(3, CONTROL)]);
    assert_eq!(
        seen_by(&[PARENT, child, other], PLUGIN, same),
        (vec![(8, "vfork", Certainty::Certain)], vec![9])
    );
}

#[test]
fn what_is_kept_in_a_bundle_is_read_again() {
    let bundle = tempfile::tempdir().unwrap();
    let path = bundle.path().join(names::BUNDLE_INHERITED);
    let all = [Inherited {
        pid: 8,
        open: vec![3, 4],
    }];
    Inherited::keep(&[], bundle.path()).unwrap();
    assert!(!path.exists());
    Inherited::keep(&all, bundle.path()).unwrap();
    assert_eq!(Inherited::read(&path), all);
    fs::write(&path, "[{").unwrap();
    assert_eq!(Inherited::read(&path), []);
    Inherited::keep(&[], bundle.path()).unwrap();
    assert!(!path.exists());
}

/// The driver has opened the files of the CUDA process again: those of the children are others.
#[test]
fn what_the_last_checkpoint_found_stays_inherited() {
    let before = [Inherited {
        pid: 8,
        open: vec![3, 4],
    }];
    let processes = Processes {
        inherited_before: &before,
        ..PLUGIN
    };
    // A child of that child has the same files as it.
    let is_same =
        |a: Descriptor, b: Descriptor| a.number == b.number && (a.pid - b.pid).abs() == 1 && b.pid != 7;
    let all = |open| [PARENT, (8, 7, CUDA, open), (9, 8, CUDA, open)];
    let same: &[(i32, &str)] = &[(3, CONTROL), (4, GPU)];
    assert_eq!(seen_with(&all(same), processes, &is_same), (vec![], vec![8, 9]));
    assert_eq!(
        seen_with(&all(&same[1..]), processes, &is_same),
        (vec![], vec![8, 9])
    );
    let more: &[(i32, &str)] = &[(3, CONTROL), (5, GPU)];
    let refused = [8, 9].map(|pid| (pid, "open", Certainty::Certain));
    assert_eq!(
        seen_with(&all(more), processes, &is_same),
        (refused.into(), vec![])
    );
}
