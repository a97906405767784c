//! What /proc shows of the processes of a container.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{FileId, bounded, proc_maps};

/// Pid of a process or thread in its own pid namespace, the innermost one.
pub fn inner_pid(task: &str) -> Option<i32> {
    field(&format!("{task}/status"), "NSpid:")?
        .split_whitespace()
        .last()?
        .parse()
        .ok()
}

/// Thread of `pid` that has the id `inner_tid` in its own pid namespace.
pub fn outer_tid(pid: i32, inner_tid: i32) -> Option<i32> {
    let is_it = |tid: &i32| inner_pid(&format!("{pid}/task/{tid}")) == Some(inner_tid);
    threads(pid).ok()?.into_iter().find(is_it)
}

/// The threads of a process.
pub fn threads(pid: i32) -> io::Result<Vec<i32>> {
    let mut tids = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        tids.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<i32>().ok()),
        );
    }
    Ok(tids)
}

/// Whether a process exists and has not ended.
pub fn is_alive(pid: i32) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Scheduler state of a process or thread.
pub fn state(tid: i32) -> Option<char> {
    stat_field(tid, 0)?.chars().next()
}

/// Process group of a process.
pub fn group(pid: i32) -> Option<i32> {
    stat_field(pid, 2)?.parse().ok()
}

/// Whether the working directory of a process is `dir`.
pub fn is_in(pid: i32, dir: &Path) -> bool {
    let cwd = PathBuf::from(format!("/proc/{pid}/cwd"));
    // Order matters: the working directory of the process may be on a file system that hangs. In most cases
    // its path shows already that it is another one.
    if fs::read_link(&cwd).ok() != fs::canonicalize(dir).ok() {
        return false;
    }
    match (fs::metadata(cwd), fs::metadata(dir)) {
        (Ok(cwd), Ok(dir)) => FileId::of(&cwd) == FileId::of(&dir),
        _ => false,
    }
}

/// Every process.
pub fn all() -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .collect()
}

/// Whether root runs the process, on the file system that this process sees: neither a user's nor a
/// container's, whatever it calls itself.
pub fn is_of_host(pid: i32) -> bool {
    let root = |process: &str| {
        let root = fs::metadata(format!("/proc/{process}/root")).ok()?;
        Some(FileId::of(&root))
    };
    let own = root("self");
    let is_roots = |users: String| users.split_whitespace().all(|user| user == "0");
    // The owner of its directory in /proc proves nothing: root has those of programs that cannot be read.
    field(&format!("{pid}/status"), "Uid:").is_some_and(is_roots)
        && own.is_some()
        && root(&pid.to_string()) == own
}

/// When a process was started, in clock ticks since the boot.
pub fn started(pid: i32) -> Option<u64> {
    stat_field(pid, 19)?.parse().ok()
}

/// The `nth` field of stat behind the name, which may hold anything.
pub fn stat_field(tid: i32, nth: usize) -> Option<String> {
    let stat = text(&format!("{tid}/stat"))?;
    let fields = stat.get(stat.rfind(')')? + 1..)?;
    fields.split_whitespace().nth(nth).map(str::to_owned)
}

/// Whether a tracer holds the thread; not when it has gone.
pub fn is_traced(tid: i32) -> bool {
    field(&format!("{tid}/status"), "TracerPid:").is_some_and(|pid| pid.trim() != "0")
}

/// The CPUs that a thread may use, as the kernel writes the list.
pub fn allowed_cpus(tid: i32) -> Option<String> {
    let list = field(&format!("{tid}/status"), "Cpus_allowed_list:")?;
    Some(list.trim().to_owned())
}

/// Name of a process, for messages.
pub fn comm(pid: i32) -> String {
    proc_maps::comm(Path::new("/proc"), pid)
}

/// Those of `pids` that are `root` or descend from it.
pub fn tree(root: i32, pids: &[i32]) -> BTreeSet<i32> {
    tree_by(root, pids, parent)
}

/// The parent of each is read once, however long the chains are.
fn tree_by(root: i32, pids: &[i32], parent: impl Fn(i32) -> Option<i32>) -> BTreeSet<i32> {
    let parents = crate::ordered::map_of(pids.iter().filter_map(|&pid| Some((pid, parent(pid)?))));
    let mut descent = Descent::of([root]);
    let descends = |pid: &i32| descent.includes(*pid, |pid| parents.get(&pid).copied());
    crate::ordered::set_of(pids.iter().copied().filter(descends))
}

/// Which processes descend from others. The parent of each is read once.
pub struct Descent(BTreeMap<i32, bool>);

impl Descent {
    pub fn of(ancestors: impl IntoIterator<Item = i32>) -> Self {
        Self(crate::ordered::map_of(
            ancestors.into_iter().map(|pid| (pid, true)),
        ))
    }

    /// Whether a process is one of the ancestors, or descends from one.
    pub fn includes(&mut self, pid: i32, parent: impl Fn(i32) -> Option<i32>) -> bool {
        let (mut chain, mut at) = (Vec::new(), Some(pid));
        let descends = loop {
            let Some(pid) = at else { break false };
            // A parent chain has no cycle, but it is read while processes come and go.
            if let Some(descends) = self.0.insert(pid, false) {
                self.0.insert(pid, descends);
                break descends;
            }
            chain.push(pid);
            at = parent(pid);
        };
        self.0.extend(chain.into_iter().map(|pid| (pid, descends)));
        descends
    }
}

fn parent(pid: i32) -> Option<i32> {
    stat_field(pid, 1)?.parse().ok()
}

/// Bytes of memory of a process that no file is behind, in memory or swapped out; none when it has gone.
pub fn anonymous(pid: i32) -> u64 {
    let status = text(&format!("{pid}/status")).unwrap_or_default();
    let bytes = |name| {
        let text = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = text.split_whitespace().next()?.parse().ok()?;
        Some(kib << 10)
    };
    bytes("RssAnon:").unwrap_or(0) + bytes("VmSwap:").unwrap_or(0)
}

/// Bytes of the files that no path leads to any more and that these processes have open or mapped, each file
/// once: CRIU puts them into the image. Shared memory and memfds are such files, too.
pub fn unlinked(pids: &[i32]) -> u64 {
    let (mut files, mut bytes) = (BTreeSet::new(), 0_u64);
    for (path, _) in pids.iter().flat_map(|pid| deleted(*pid)) {
        if let Ok(file) = fs::metadata(&path)
            && file.is_file()
            && file.nlink() == 0
            && files.len() < MOST_UNLINKED
            && files.insert(FileId::of(&file))
        {
            bytes = bytes.saturating_add(file.blocks().saturating_mul(512));
        }
    }
    bytes
}

/// How the kernel marks a name that was deleted.
const DELETED: &[u8] = b" (deleted)";

/// Files that a process has open or mapped by names that `is_wanted`: entries of /proc/PID/fd and map_files,
/// and the names, as the process's mount namespace has them. The process, or a file of it, may be gone
/// meanwhile.
pub fn named_files(pid: i32, is_wanted: impl Fn(&Path) -> bool) -> impl Iterator<Item = (PathBuf, PathBuf)> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let mut mapped = Vec::new();
    // Quicker than reading all links in map_files.
    let read = proc_maps::each(Path::new("/proc"), pid, |mapping| {
        if is_wanted(Path::new(OsStr::from_bytes(mapping.path))) {
            mapped.push(process.join(format!("map_files/{:x}-{:x}", mapping.start, mapping.end)));
        }
        ControlFlow::Continue(())
    });
    drop(read);
    open.map(|entry| entry.path())
        .chain(mapped)
        .filter_map(move |entry| {
            let name = fs::read_link(&entry).ok()?;
            is_wanted(&name).then_some((entry, name))
        })
}

/// Whether the kernel names a file so whose name was deleted. A file may have that name in full, too.
pub fn is_deleted(name: &Path) -> bool {
    name.as_os_str().as_bytes().ends_with(DELETED)
}

/// Files that a process has open or mapped by deleted names: entries of /proc/PID/fd and map_files, and the
/// names.
pub(crate) fn deleted(pid: i32) -> impl Iterator<Item = (PathBuf, PathBuf)> {
    named_files(pid, is_deleted).filter_map(|(entry, name)| {
        let bare = name.as_os_str().as_bytes().strip_suffix(DELETED)?;
        Some((entry, OsStr::from_bytes(bare).into()))
    })
}

/// How many files without a path are counted separately. Those beyond count for nothing: what is known is
/// what is needed at least.
const MOST_UNLINKED: usize = 1 << 18;

/// The mount that an open file is on.
pub fn mount_of(pid: i32, fd: i32) -> Option<u32> {
    field(&format!("{pid}/fdinfo/{fd}"), "mnt_id:")?
        .trim()
        .parse()
        .ok()
}

/// The flags with which a file is open, as open(2) has them.
pub fn flags_of(pid: i32, fd: i32) -> Option<i32> {
    let flags = field(&format!("{pid}/fdinfo/{fd}"), "flags:")?;
    i32::from_str_radix(flags.trim(), 8).ok()
}

/// Whether no thread of a process is left.
pub fn has_ended(pid: i32) -> bool {
    !is_alive(pid) && threads(pid).map_or(0, |threads| threads.len()) < 2
}

/// The rest of the line that begins with `name`.
fn field(file: &str, name: &str) -> Option<String> {
    let text = text(file)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map(str::to_owned)
}

/// A process names itself, in any bytes: a name in UTF-8 that was cut at 15 of them is none any more.
fn text(file: &str) -> Option<String> {
    let bytes = bounded::read(&Path::new("/proc").join(file)).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Which of `places` these processes have something of open, mapped, or as their program and directory, by
/// the paths that they see themselves; none when one cannot be looked at.
pub fn in_use(pids: &[i32], places: &[PathBuf]) -> Option<Vec<bool>> {
    let mut used = vec![false; places.len()];
    let mut note = |path: &Path| {
        for (place, used) in places.iter().zip(&mut used) {
            *used |= path.starts_with(place);
        }
    };
    for pid in pids {
        let process = PathBuf::from(format!("/proc/{pid}"));
        for entry in fs::read_dir(process.join("fd")).ok()? {
            // One that is closed meanwhile is not open.
            if let Ok(path) = fs::read_link(entry.ok()?.path()) {
                note(&path);
            }
        }
        for link in ["exe", "cwd"] {
            note(&fs::read_link(process.join(link)).ok()?);
        }
        let read = bounded::each(&process.join("maps"), b'\n', bounded::LINES, |line| {
            if let Some(at) = line.iter().position(|byte| *byte == b'/') {
                note(Path::new(OsStr::from_bytes(&line[at..])));
            }
            ControlFlow::Continue(())
        });
        read.ok()?;
    }
    Some(used)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn files_without_a_path_count_once_and_only_for_what_they_hold() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 4 << 20]).unwrap();
        // A hole takes nothing.
        file.set_len(1 << 30).unwrap();
        let named = tempfile::NamedTempFile::new().unwrap();
        fs::write(named.path(), vec![1; 4 << 20]).unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("100")
            .stdin(file.try_clone().unwrap())
            .stdout(file.try_clone().unwrap())
            .stderr(named.reopen().unwrap())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let found = unlinked(&[pid, pid, i32::MAX]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, file.metadata().unwrap().blocks() * 512);
        assert!((4 << 20..8 << 20).contains(&found), "{found}");
    }

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    #[test]
    fn only_roots_processes_on_this_file_system_are_of_the_host() {
        use std::process::{Child, Command, Stdio};
        let root = tempfile::tempdir().unwrap();
        let program = fs::canonicalize("/bin/sleep").unwrap();
        let used = Command::new("ldd").arg(&program).output().unwrap().stdout;
        let used = String::from_utf8(used).unwrap();
        let libraries = used.split_whitespace().filter(|word| word.starts_with('/'));
        for file in libraries.map(Path::new).chain([&*program]) {
            let copy = root.path().join(file.strip_prefix("/").unwrap());
            fs::create_dir_all(copy.parent().unwrap()).unwrap();
            fs::copy(file, copy).unwrap();
        }
        let begin = |words: &[&str]| {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).args([program.to_str().unwrap(), "100"]);
            command.stdin(Stdio::null()).spawn().unwrap()
        };
        let is_of_host = |mut child: Child| {
            let pid = i32::try_from(child.id()).unwrap();
            let sleeps = || fs::read(format!("/proc/{pid}/comm")).unwrap_or_default() == b"sleep\n";
            let limit = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while !sleeps() && std::time::Instant::now() < limit {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            let (found, sleeps) = (super::is_of_host(pid), sleeps());
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(sleeps, "it has not begun");
            found
        };
        assert!(is_of_host(begin(&["env"])));
        assert!(!is_of_host(begin(&["chroot", root.path().to_str().unwrap()])));
        assert!(!is_of_host(begin(&[
            "setpriv",
            "--reuid",
            "1000",
            "--clear-groups"
        ])));
        assert!(!super::is_of_host(i32::MAX));
    }

    #[test]
    fn a_process_outside_namespaces_has_its_own_pid() {
        assert_eq!(inner_pid("self"), Some(me()));
        assert_eq!(outer_tid(me(), me()), Some(me()));
        assert_eq!(outer_tid(me(), 1), None);
    }

    #[test]
    fn a_name_that_is_no_text_hides_nothing() {
        let (send, received) = std::sync::mpsc::channel();
        let (leave, left) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            fs::write("/proc/thread-self/comm", b"\xc3\n) Z (").unwrap();
            send.send(nix::unistd::gettid().as_raw()).unwrap();
            left.recv().unwrap();
        });
        let tid = received.recv().unwrap();
        assert!(
            fs::read_to_string(format!("/proc/{tid}/status")).is_err(),
            "it is text"
        );
        assert_eq!(inner_pid(&tid.to_string()), Some(tid));
        assert_eq!(outer_tid(me(), tid), Some(tid));
        assert!(is_alive(tid) && parent(tid).is_some() && !is_traced(tid));
        assert_eq!(comm(tid), "\u{fffd}?) Z (");
        leave.send(()).unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn anonymous_memory_is_what_a_process_has_written() {
        let before = anonymous(me());
        let written = vec![1_u8; 32 << 20];
        assert!(anonymous(me()) >= before + (16 << 20), "{before}");
        drop(written);
        assert!(!has_ended(me()));
        assert!(has_ended(i32::MAX));
        assert_eq!(anonymous(i32::MAX), 0);
    }

    #[test]
    fn files_in_use_are_those_that_are_open_mapped_or_run() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let program = std::env::current_exe().unwrap();
        let directory = program.parent().unwrap().to_owned();
        let mut other = program.clone().into_os_string();
        other.push("-other");
        let places = [file.path().to_owned(), program, directory, other.into()];
        assert_eq!(in_use(&[me()], &places), Some(vec![true, true, true, false]));
        assert_eq!(in_use(&[i32::MAX], &places), None);
    }

    #[test]
    fn in_a_chain_of_32000_processes_nothing_is_read_twice() {
        const LENGTH: i32 = 32_000;
        let pids: Vec<i32> = (1..=LENGTH).collect();
        let reads = std::cell::Cell::new(0);
        let parent = |pid: i32| {
            reads.set(reads.get() + 1);
            (pid > 1).then(|| pid - 1)
        };
        assert_eq!(tree_by(1, &pids, parent).len(), pids.len());
        assert_eq!(tree_by(LENGTH / 2, &pids, parent).len(), pids.len() / 2 + 1);
        assert_eq!(tree_by(LENGTH + 1, &pids, parent).len(), 0);
        assert_eq!(reads.get(), 3 * LENGTH);
        // Nor is a part of a chain followed twice, also where that leads to no ancestor.
        for ancestor in [1, LENGTH + 1] {
            let mut descent = Descent::of([ancestor]);
            reads.set(0);
            for pid in (1..=LENGTH).rev() {
                assert_eq!(descent.includes(pid, parent), ancestor == 1);
            }
            assert!(reads.get() <= LENGTH, "{} steps from {ancestor}", reads.get());
        }
        let cycle = |pid: i32| Some(if pid == 7 { 8 } else { 7 });
        assert_eq!(tree_by(1, &[7, 8], cycle), BTreeSet::new());
        assert_eq!(tree_by(8, &[7, 8], cycle), BTreeSet::from([7, 8]));
    }

    #[test]
    fn only_descendants_are_in_the_tree() {
        let parent = parent(me()).unwrap();
        assert_eq!(tree(parent, &[parent, me(), 1]), BTreeSet::from([parent, me()]));
        assert_eq!(tree(me(), &[parent, me()]), BTreeSet::from([me()]));
    }
}
