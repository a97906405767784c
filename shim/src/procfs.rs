//! What /proc tells of the processes of a container.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Pid of a process or thread in its own pid namespace, the innermost one.
pub(crate) fn inner_pid(task: &str) -> Option<i32> {
    status_field(
        &fs::read_to_string(format!("/proc/{task}/status")).ok()?,
        "NSpid:",
    )?
    .split_whitespace()
    .last()?
    .parse()
    .ok()
}

/// Thread of `pid` that has the id `inner_tid` in its own pid namespace.
pub(crate) fn outer_tid(pid: i32, inner_tid: i32) -> Option<i32> {
    fs::read_dir(format!("/proc/{pid}/task"))
        .ok()?
        .flatten()
        .find_map(|entry| {
            let name = entry.file_name();
            let tid = name.to_str()?;
            (inner_pid(&format!("{pid}/task/{tid}"))? == inner_tid).then(|| tid.parse().ok())?
        })
}

/// Whether a process exists and has not ended.
pub(crate) fn is_alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.get(stat.rfind(')')? + 2..)?.chars().next())
        .is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Name of a process, for messages.
pub(crate) fn comm(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm"))
        .map(|name| name.trim_end().to_owned())
        .unwrap_or_default()
}

/// Those of `pids` that are `root` or descend from it.
pub(crate) fn tree(root: i32, pids: &[i32]) -> BTreeSet<i32> {
    let parents: BTreeMap<i32, i32> = pids.iter().filter_map(|&pid| Some((pid, parent(pid)?))).collect();
    let descends = |mut pid: i32| {
        // A parent chain has no cycle, but it is read while processes come and go.
        for _ in 0..=pids.len() {
            if pid == root {
                return true;
            }
            match parents.get(&pid) {
                Some(&parent) => pid = parent,
                None => return false,
            }
        }
        false
    };
    pids.iter().copied().filter(|&pid| descends(pid)).collect()
}

fn parent(pid: i32) -> Option<i32> {
    status_field(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, "PPid:")?
        .trim()
        .parse()
        .ok()
}

fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> i32 {
        i32::try_from(std::process::id()).unwrap()
    }

    #[test]
    fn a_process_outside_namespaces_has_its_own_pid() {
        assert_eq!(inner_pid("self"), Some(me()));
        assert_eq!(outer_tid(me(), me()), Some(me()));
        assert_eq!(outer_tid(me(), 1), None);
    }

    #[test]
    fn only_descendants_are_in_the_tree() {
        let parent = parent(me()).unwrap();
        assert_eq!(tree(parent, &[parent, me(), 1]), BTreeSet::from([parent, me()]));
        assert_eq!(tree(me(), &[parent, me()]), BTreeSet::from([me()]));
    }
}
