//! Which processes of a container CRIU dumps, and which it leaves out.

use std::collections::BTreeSet;

use firn_config::Exec;
use firn_host::ordered::set_of;
use firn_host::procfs;

use crate::Refusal;

/// The processes of a container, as CRIU sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// Init and its descendants: CRIU dumps them.
    pub dumped: BTreeSet<i32>,
    /// The others, which CRIU leaves out.
    pub outside: Vec<i32>,
}

impl Tree {
    /// The tree of `init` among these processes. Processes that have ended are in neither part.
    pub fn of(init: i32, all: &[i32]) -> Self {
        let mut dumped = procfs::tree(init, all);
        if dumped.len() < all.len() {
            // A process whose parent ends between two reads seems to have none. The second read finds its new
            // parent.
            dumped.append(&mut procfs::tree(init, all));
        }
        let is_outside = |pid: &i32| !dumped.contains(pid) && !procfs::has_ended(*pid);
        let outside = all.iter().copied().filter(is_outside).collect();
        Self { dumped, outside }
    }
}

/// Refuses processes that CRIU leaves out. A process of an exec that uses no CUDA is accepted with
/// [`Exec::Omit`].
pub(crate) fn by_left_out(left_out: &[i32], cuda: &[i32], exec: Exec) -> Option<Refusal> {
    let with_cuda = set_of(cuda.iter().copied());
    if let Some(&pid) = left_out.iter().find(|pid| with_cuda.contains(pid)) {
        let comm = procfs::comm(pid);
        return Some(Refusal::CudaExec { pid, comm });
    }
    let &pid = left_out.first().filter(|_| exec == Exec::Refuse)?;
    let comm = procfs::comm(pid);
    Some(Refusal::Exec { pid, comm })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_left_out_are_refused_or_omitted_and_with_cuda_always_refused() {
        for exec in [Exec::Refuse, Exec::Omit] {
            assert!(by_left_out(&[], &[5], exec).is_none());
            let refused = by_left_out(&[7, 8], &[5, 8], exec).unwrap();
            assert!(matches!(refused, Refusal::CudaExec { pid: 8, .. }), "{refused}");
        }
        let refused = by_left_out(&[7], &[5], Exec::Refuse).unwrap();
        assert!(matches!(refused, Refusal::Exec { pid: 7, .. }), "{refused}");
        assert!(by_left_out(&[7], &[5], Exec::Omit).is_none());
    }

    #[test]
    fn children_are_in_the_tree_and_ended_processes_in_neither_part() {
        let me = i32::try_from(std::process::id()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let tree = Tree::of(me, &[me, pid, i32::MAX]);
        assert_eq!(tree.dumped, BTreeSet::from([me, pid]));
        assert!(tree.outside.is_empty());
        assert_eq!(Tree::of(pid, &[me, pid]).outside, [me]);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
