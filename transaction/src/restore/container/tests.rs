//! The processes of the manifest are found among those of the restored container.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use firn_gpu::CudaState;
use firn_process::sys;

use super::*;

fn listed(pid: i32, restore_tid: i32) -> CheckpointedProcess {
    CheckpointedProcess {
        pid,
        restore_tid,
        state: CudaState::Running,
    }
}

#[tokio::test]
async fn processes_are_found_by_their_ids_in_the_container() {
    let mut command = Command::new("unshare");
    let script = "sleep 1000 & echo $$ $!; exec sleep 1000";
    command.args(["--pid", "--fork", "--kill-child", "sh", "-c", script]);
    sys::die_with_parent(&mut command);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let line = BufReader::new(child.stdout.take().unwrap()).lines().next();
    assert_eq!(line.unwrap().unwrap(), "1 2");
    let child_of = |pid: i32| -> i32 {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        children.unwrap().trim().parse().unwrap()
    };
    let init = child_of(child.id().try_into().unwrap());
    let other = child_of(init);
    let found = find(&[listed(2, 2), listed(1, 1)], &outer_pids(&[init, other])).unwrap();
    let ids: Vec<(i32, i32)> = found
        .iter()
        .map(|process| (process.pid, process.restore_tid))
        .collect();
    assert_eq!(ids, [(other, other), (init, init)]);
    for missing in [listed(3, 1), listed(1, 3)] {
        let error = find(&[listed(2, 2), missing], &outer_pids(&[init, other]));
        assert!(matches!(error, Err(Cause::ProcessMissing { .. })), "{error:?}");
    }
    let _ = child.kill();
    // The reaper of another test may have reaped it.
    let _ = child.wait();
}
