use std::time::Duration;

use containerd_shim_protos::api::KillRequest;
use containerd_shim_protos::events::task::TaskExit;
use firn_host::cgroup_mounts::Version;
use firn_process::cgroup::testing::{LIMIT, Scratch, fake, until};
use firn_process::testing::log::warnings;
use firn_process::tracer::TracedThreads;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::task::JoinHandle;
use ttrpc::Code;

use super::*;
use crate::task::stub::{GPU, ID, PLAIN, Stub};
use firn_transaction::container::{Process, StdioPaths};

const SIGTERM: u32 = 15;
/// Ignored by processes without a handler.
const SIGURG: u32 = 23;

type Answer = Result<(), (Code, String)>;

/// Signals init or an exec, and returns the response.
fn signal(stub: &Stub, exec_id: &str, signal: u32) -> JoinHandle<Answer> {
    send(
        stub,
        KillRequest {
            id: ID.to_owned(),
            exec_id: exec_id.to_owned(),
            signal,
            ..KillRequest::default()
        },
    )
}

fn send(stub: &Stub, request: KillRequest) -> JoinHandle<Answer> {
    let service = stub.service.clone();
    tokio::spawn(async move {
        match kill(&service, request).await.map_err(ttrpc::Error::from) {
            Ok(_) => Ok(()),
            Err(ttrpc::Error::RpcStatus(status)) => Err((status.code(), status.message)),
            Err(other) => panic!("{other}"),
        }
    })
}

fn error(code: Code, text: &str) -> Answer {
    Err((code, text.to_owned()))
}

fn finished() -> Answer {
    error(Code::NOT_FOUND, "process already finished: not found")
}

/// Kills a process without the runtime.
async fn end(pid: i32) {
    nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    until("its end", || !procfs::is_alive(pid)).await;
}

#[tokio::test]
async fn init_is_signalled_by_the_runtime() {
    let mut stub = Stub::start().await;
    stub.running(PLAIN);
    let request = KillRequest {
        id: ID.to_owned(),
        signal: 18,
        all: true,
        ..KillRequest::default()
    };
    assert_eq!(send(&stub, request).await.unwrap(), Ok(()));
    assert_eq!(signal(&stub, "", SIGTERM).await.unwrap(), Ok(()));
    assert_eq!(stub.calls(), ["kill --all box 18", "kill box 15"]);
    assert_eq!(stub.events.next::<TaskExit>().await.exit_status, 128 + SIGTERM);
}

#[tokio::test]
async fn errors_of_the_runtimes_kill_have_the_form_that_clients_know() {
    let stub = Stub::start().await;
    stub.running(PLAIN);
    for (output, code, text) in [
        (
            "container not running",
            Code::NOT_FOUND,
            "process already finished: not found",
        ),
        (
            "box does not exist",
            Code::NOT_FOUND,
            "no such container: not found",
        ),
        ("no room", Code::UNKNOWN, "unknown error after kill: "),
    ] {
        stub.runtime_does("kill", &format!("echo '{output}' >&2; exit 7"));
        for number in [SIGTERM, SIGKILL] {
            let (actual, message) = signal(&stub, "", number).await.unwrap().unwrap_err();
            assert_eq!(actual, code, "{output}");
            assert!(message.starts_with(text), "{message}");
            if code == Code::UNKNOWN {
                assert!(message.contains("exit status 7: no room"), "{message}");
            } else {
                assert_eq!(message, text);
            }
        }
    }
    let request = KillRequest {
        id: "other".to_owned(),
        ..KillRequest::default()
    };
    let absent = error(Code::NOT_FOUND, "container not created: not found");
    assert_eq!(send(&stub, request).await.unwrap(), absent);
}

#[tokio::test]
async fn sigkill_goes_to_the_runtime_in_every_state_except_suspended() {
    use InitState::{Created, Deleted, Paused, Pausing, Running, Stopped};
    let stub = Stub::start().await;
    let container = stub.running(PLAIN);
    stub.runtime_does("kill", "");
    let states = [Created, Running, Pausing, Paused, Stopped, Deleted];
    for state in states {
        container.set_state(state);
        assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), Ok(()), "{state:?}");
    }
    assert_eq!(stub.calls(), ["kill box 9"; 6]);
}

#[tokio::test]
async fn the_runtime_is_not_awaited_once_sigkill_has_ended_init() {
    let stub = Stub::start().await;
    stub.running(PLAIN);
    stub.runtime_does("kill", "kill -KILL $pid; exec sleep 1000");
    let answer = tokio::time::timeout(LIMIT, signal(&stub, "", SIGKILL)).await;
    assert_eq!(answer.expect("an answer").unwrap(), Ok(()));
}

#[tokio::test]
async fn the_runtimes_error_for_another_signal_is_returned() {
    let stub = Stub::start().await;
    stub.running(PLAIN);
    stub.runtime_does(
        "kill",
        "kill -TERM $pid; sleep 0.3; echo 'container not running' >&2; exit 1",
    );
    assert_eq!(signal(&stub, "", SIGTERM).await.unwrap(), finished());
}

#[tokio::test]
async fn sigkill_cancels_a_transaction_and_kills_init_after_criu() {
    let stub = Stub::start().await;
    let container = stub.running(PLAIN);
    stub.runtime_does("kill", "");
    let transaction = container.transaction.begin();
    let criu = transaction.cancel.criu();
    assert_eq!(signal(&stub, "", SIGTERM).await.unwrap(), Ok(()));
    assert!(!transaction.cancel.is_cancelled(), "SIGTERM cancelled it");
    assert_eq!(stub.calls(), ["kill box 15"]);

    let killed = signal(&stub, "", SIGKILL);
    tokio::time::timeout(LIMIT, transaction.cancel.cancelled())
        .await
        .unwrap();
    sleep(Duration::from_millis(50)).await;
    assert_eq!(stub.calls().len(), 1, "CRIU still holds the tasks");
    drop(criu);
    assert_eq!(killed.await.unwrap(), Ok(()));
    assert_eq!(stub.calls()[1..], ["kill box 9"]);
}

#[tokio::test]
async fn a_cancelled_restore_has_no_init_to_signal() {
    let stub = Stub::start().await;
    let container = stub.container(PLAIN);
    stub.runtime_does("kill", "echo 'box does not exist' >&2; exit 1");
    let restore = container.transaction.begin();
    assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), Ok(()));
    assert!(restore.cancel.is_cancelled());
    assert!(stub.calls().is_empty());
    drop(restore);
    // Without a restore in progress the runtime reports that there is no such container.
    let absent = error(Code::NOT_FOUND, "no such container: not found");
    assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), absent);
}

#[tokio::test]
async fn a_kill_succeeds_when_the_call_that_it_cancelled_has_ended_init() {
    /// State of init when the runtime finds no process.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Init {
        Runs,
        /// Its exit is published after Start.
        Dead,
        Published,
    }
    for (transaction, hooks, number, init, answer) in [
        (true, false, SIGKILL, Init::Published, Ok(())),
        (true, false, SIGKILL, Init::Dead, Ok(())),
        (true, false, SIGKILL, Init::Runs, finished()),
        (false, true, SIGKILL, Init::Published, Ok(())),
        (false, true, SIGKILL, Init::Dead, Ok(())),
        (false, true, SIGKILL, Init::Runs, finished()),
        (false, false, SIGKILL, Init::Published, finished()),
        (false, false, SIGKILL, Init::Dead, finished()),
        (true, true, SIGTERM, Init::Published, finished()),
    ] {
        let mut stub = Stub::start().await;
        let container = stub.running(PLAIN);
        stub.runtime_does("kill", "echo 'container not running' >&2; exit 1");
        let _transaction = transaction.then(|| container.transaction.begin());
        let _hooks = hooks.then(|| container.hooks.begin());
        if init == Init::Dead {
            container.begin_start();
        }
        if init != Init::Runs {
            end(container.init.pid()).await;
        }
        if init == Init::Published {
            stub.events.next::<TaskExit>().await;
        }
        let case = format!("{transaction} {hooks} {number} {init:?}");
        assert_eq!(signal(&stub, "", number).await.unwrap(), answer, "{case}");
    }
}

#[tokio::test]
async fn all_processes_of_a_suspended_container_are_killed_then_released() {
    for scratch in Scratch::all() {
        let mut stub = Stub::start().await;
        let container = stub.container(GPU);
        container.set_cgroup(scratch.cgroup.clone());
        let init = stub.run_init(&container, &mut scratch.shell("", "exec sleep 1000"));
        let other = scratch.spawn(&stub.service.reaper, "below", "exec sleep 1000");
        scratch.all_entered().await;
        scratch.cgroup.freeze(LIMIT).await.unwrap();
        container.keep_held(TracedThreads::hold(vec![init], LIMIT).await.unwrap());
        container.set_state(InitState::Suspended);
        let resume = container.transaction.begin();

        stub.runtime_does("kill", "");
        assert_eq!(signal(&stub, "", SIGTERM).await.unwrap(), Ok(()));
        assert_eq!(stub.calls(), ["kill box 15"]);
        assert!(container.is_held() && !resume.cancel.is_cancelled());
        assert_eq!(scratch.cgroup.freezer_state().unwrap(), FreezerState::Frozen);

        assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), Ok(()));
        assert!(!procfs::is_alive(init) && !procfs::is_alive(other.pid()));
        assert!(!container.is_held(), "threads are still held");
        assert!(resume.cancel.is_cancelled(), "the resume was not cancelled");
        assert_eq!(stub.calls().len(), 1, "the runtime was called");
        assert_eq!(stub.events.next::<TaskExit>().await.exit_status, 128 + SIGKILL);
    }
}

/// With cgroup v1 a frozen process does not die.
#[tokio::test]
async fn sigkill_ends_a_frozen_init_and_with_gpus_no_other_process_runs() {
    for traits in [PLAIN, GPU] {
        for scratch in Scratch::all() {
            let mut stub = Stub::start().await;
            let container = stub.container(traits.clone());
            container.set_cgroup(scratch.cgroup.clone());
            stub.run_init(&container, &mut scratch.shell("", "exec sleep 1000"));
            let other = scratch.spawn(&stub.service.reaper, "", "exec sleep 1000");
            scratch.all_entered().await;
            scratch.cgroup.freeze(LIMIT).await.unwrap();
            assert_eq!(signal(&stub, "", SIGURG).await.unwrap(), Ok(()));
            if scratch.cgroup.is_v1() {
                sleep(LOOK * 3 / 2).await;
                assert_eq!(scratch.cgroup.freezer_state().unwrap(), FreezerState::Frozen);
            }
            assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), Ok(()));
            assert_eq!(stub.events.next::<TaskExit>().await.exit_status, 128 + SIGKILL);
            if scratch.cgroup.is_v1() && traits.by_firn() {
                until("the end of the other", || !procfs::is_alive(other.pid())).await;
            } else {
                assert!(procfs::is_alive(other.pid()));
            }
        }
    }
}

#[tokio::test]
async fn an_init_that_does_not_end_by_sigkill_is_thawed_for_half_a_minute() {
    let stub = Stub::start().await;
    let container = stub.running(PLAIN);
    let (_dir, cgroup) = fake(Version::V1, &[("freezer.state", "FROZEN")]);
    container.set_cgroup(cgroup.clone());
    let freeze = || std::fs::write(cgroup.primary_dir().join("freezer.state"), "FROZEN").unwrap();
    let state = || cgroup.freezer_state().unwrap();
    stub.runtime_does("kill", "");
    let transaction = container.transaction.begin();
    assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), Ok(()));
    tokio::time::pause();
    sleep(LOOK * 5).await;
    assert_eq!(state(), FreezerState::Frozen, "a transaction ends it itself");
    drop(transaction);
    for _ in 0..2 {
        sleep(LOOK * 5).await;
        assert_eq!(state(), FreezerState::Thawed);
        freeze();
    }
    sleep(KILLED).await;
    freeze();
    sleep(LOOK * 5).await;
    assert_eq!(state(), FreezerState::Frozen);
}

#[tokio::test]
async fn the_cgroup_is_not_thawed_once_init_has_ended_or_with_cgroup_v2() {
    let v1 = ("freezer.state", "FROZEN");
    let v2 = [
        ("cgroup.freeze", "1"),
        ("cgroup.events", "populated 1\nfrozen 0\n"),
    ];
    for (version, files) in [(Version::V1, &[v1][..]), (Version::V2, &v2)] {
        let stub = Stub::start().await;
        let container = stub.running(PLAIN);
        let (_dir, cgroup) = fake(version, files);
        container.set_cgroup(cgroup.clone());
        stub.runtime_does("kill", "");
        // Its exit is published after Start, which is in progress.
        container.begin_start();
        assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), Ok(()));
        if version == Version::V1 {
            end(container.init.pid()).await;
            sleep(LOOK * 2).await;
            std::fs::write(cgroup.primary_dir().join(v1.0), v1.1).unwrap();
        }
        tokio::time::pause();
        sleep(LOOK * 5).await;
        tokio::time::resume();
        assert_ne!(cgroup.freezer_state().unwrap(), FreezerState::Thawed);
    }
}

#[tokio::test]
async fn a_freezer_that_cannot_be_read_is_logged_unless_the_cgroup_has_gone() {
    for (text, is_logged) in [(None, false), (Some("MELTED"), true)] {
        let stub = Stub::start().await;
        let container = stub.running(PLAIN);
        let (_dir, cgroup) = fake(Version::V1, text.map(|text| ("freezer.state", text)).as_slice());
        container.set_cgroup(cgroup);
        stub.runtime_does("kill", "");
        warnings();
        assert_eq!(signal(&stub, "", SIGKILL).await.unwrap(), Ok(()));
        tokio::time::pause();
        sleep(LOOK * 5).await;
        tokio::time::resume();
        let logged = warnings();
        let is_thaw =
            |line: &String| line.starts_with("cannot thaw box, which was killed: cannot understand ");
        assert_eq!(logged.iter().any(is_thaw), is_logged, "{logged:?}");
        assert_eq!(logged.is_empty(), !is_logged, "{logged:?}");
    }
}

#[tokio::test]
async fn an_exec_is_signalled_without_the_runtime() {
    let mut stub = Stub::start().await;
    let container = stub.running(PLAIN);
    stub.run_exec(&container, "runs", "exec sleep 1000");
    let process = |exec_id, pid| {
        let process = Process::new(exec_id, StdioPaths::default(), Vec::new());
        process.set_pid(pid);
        assert!(container.add_exec(Arc::new(process)));
    };
    process("new", 0);
    // It was reaped, and its pid is reused.
    process("gone", 1);
    assert_eq!(
        signal(&stub, "runs", 99).await.unwrap(),
        error(
            Code::UNKNOWN,
            "exec kill error: unknown error after kill: invalid argument"
        )
    );
    assert_eq!(signal(&stub, "runs", SIGTERM).await.unwrap(), Ok(()));
    let exit = stub.events.next::<TaskExit>().await;
    assert_eq!((&*exit.id, exit.exit_status), ("runs", 128 + SIGTERM));
    assert_eq!(signal(&stub, "runs", SIGTERM).await.unwrap(), finished());
    assert_eq!(signal(&stub, "gone", SIGTERM).await.unwrap(), finished());
    assert_eq!(
        signal(&stub, "new", SIGTERM).await.unwrap(),
        error(
            Code::FAILED_PRECONDITION,
            "process not created: failed precondition"
        )
    );
    assert_eq!(
        signal(&stub, "none", SIGTERM).await.unwrap(),
        error(Code::NOT_FOUND, "process does not exist none: not found")
    );
    assert!(stub.calls().is_empty());
    assert!(procfs::is_alive(container.init.pid()));
}
