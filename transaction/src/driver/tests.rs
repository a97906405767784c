use firn_process::testing::write_program;
use nix::sys::ptrace;
use nix::unistd::Pid;

use super::*;

fn program(directory: &Path, script: &str) -> PathBuf {
    let program = directory.join("firn-gpu");
    write_program(&program, &format!("#!/bin/sh\n{script}\n"));
    program
}

/// As the worker answers when it has let go of the others.
#[tokio::test]
async fn the_reason_of_a_failed_lock_is_that_of_the_process_that_was_not_locked() {
    let directory = tempfile::tempdir().unwrap();
    let running = r#"{"process":{"pid":7,"state":"running"}}"#;
    let error = r#"{"call":"cuCheckpointProcessLock","code":600,"name":"CUDA_ERROR_NOT_READY"}"#;
    let late = format!(r#"{{"process":{{"pid":8,"state":"running","error":{error}}}}}"#);
    let done = r#"{"done":{}}"#;
    let lines = format!("echo '{running}' >&3; echo '{late}' >&3; echo '{done}' >&3");
    let script = format!("while read -r line <&3; do {lines}; done");
    let program = program(directory.path(), &script);
    let mut gpu = Driver::new(program, Reaper::start().unwrap(), Deadlines::default());
    let refused = gpu.try_lock(&[7, 8], LEAST).await.unwrap_err();
    assert_eq!(refused.code(), "FIRN-GPU-TIMEOUT", "{refused}");
    assert!(
        matches!(refused, WorkerError::Process { pid: 8, .. }),
        "{refused:?}"
    );
}

/// The driver's answer to a call on process 7.
fn refused(call: &str, name: &str) -> WorkerError {
    let source = DriverError {
        call: call.to_owned(),
        code: 801,
        name: name.to_owned(),
    };
    WorkerError::Process { pid: 7, source }
}

#[test]
fn a_lock_that_is_not_supported_names_profilers_and_only_a_refused_checkpoint_is_kept() {
    let at_lock = refused("cuCheckpointProcessLock", "CUDA_ERROR_NOT_SUPPORTED");
    assert_eq!(at_lock.code(), "FIRN-GPU-UNSUPPORTED");
    assert!(at_lock.hint().contains("torch.profiler") && at_lock.refusal().is_none());
    let at_checkpoint = refused("cuCheckpointProcessCheckpoint", "CUDA_ERROR_NOT_SUPPORTED");
    assert!(at_checkpoint.hint().contains("managed memory"));
    assert_eq!(at_checkpoint.refusal(), Some((7, "CUDA_ERROR_NOT_SUPPORTED")));
    for name in ["CUDA_ERROR_UNKNOWN", "CUDA_ERROR_OUT_OF_MEMORY"] {
        assert!(refused("cuCheckpointProcessCheckpoint", name).refusal().is_none());
    }
}

#[tokio::test]
async fn a_gpu_without_enough_memory_is_named_and_the_worker_continues() {
    let directory = tempfile::tempdir().unwrap();
    let uuid = "GPU-01010101-0101-0101-0101-010101010101";
    let answer = format!(r#"{{"no_memory":{{"gpu":"{uuid}","free":1048576,"needed":8388609}}}}"#);
    let script = format!("while read -r line <&3; do echo '{answer}' >&3; done");
    let program = program(directory.path(), &script);
    let mut gpu = Driver::new(program, Reaper::start().unwrap(), Deadlines::default());
    let mut workers = Vec::new();
    for _ in 0..2 {
        let refused = gpu
            .restore(&[7], &[], Default::default(), Vec::new())
            .await
            .unwrap_err();
        assert_eq!(refused.code(), "FIRN-GPU-OCCUPIED");
        let text = refused.to_string();
        let figures = "has 1 MiB of memory free, and 9 MiB are needed";
        assert!(
            text.starts_with("GPU-01010101-") && text.ends_with(figures),
            "{text}"
        );
        workers.push(gpu.worker.as_ref().map(|worker| worker.child.pid()));
    }
    assert!(workers[0].is_some() && workers[0] == workers[1], "{workers:?}");
}

#[tokio::test]
async fn no_call_begins_before_a_killed_worker_has_ended() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path(), "exec sleep 1000");
    let deadlines = Deadlines {
        worker_end: Duration::from_secs(1),
        inventory: Duration::from_millis(1),
        ..Deadlines::default()
    };
    let mut gpu = Driver::new(program, Reaper::start().unwrap(), deadlines);
    gpu.warm_up().unwrap();
    let worker = Pid::from_raw(gpu.worker.as_ref().unwrap().child.pid());
    // As in a call that cannot be interrupted: after SIGKILL the worker stops at its exit and stays.
    ptrace::seize(worker, ptrace::Options::PTRACE_O_TRACEEXIT).unwrap();
    let overrun = gpu.inventory().await;
    assert!(
        matches!(overrun, Err(WorkerError::Deadline { .. })),
        "{overrun:?}"
    );
    let refused = gpu.inventory().await;
    assert!(matches!(refused, Err(WorkerError::Stuck { .. })), "{refused:?}");
    ptrace::detach(worker, None).unwrap();
    let again = gpu.inventory().await;
    assert!(matches!(again, Err(WorkerError::Deadline { .. })), "{again:?}");
}
