use std::time::Instant;

use containerd_shim_protos::api::StartRequest;
use containerd_shim_protos::events::task::TaskStart;
use firn_host::cgroup_mounts::Version;
use firn_process::cgroup::testing::{LIMIT, fake, until};
use firn_process::testing::log::warnings;
use firn_process::tracer::TracedThreads;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::{sleep, timeout};

use super::*;
use crate::procfs;
use crate::task::start::start;
use crate::task::stub::{GPU, ID, PLAIN, Stub, shell};
use firn_transaction::container::ContainerTraits;

/// A container whose processes share a pid namespace with others.
const SHARED_PIDS: ContainerTraits = ContainerTraits {
    private_pids: false,
    ..PLAIN
};

/// Wait for something that should not happen.
const SHORT: Duration = Duration::from_millis(50);

fn end(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
}

/// Ends init, and waits until its exit was handled.
async fn end_init(container: &Container) {
    end(container.init.pid());
    until("the end of init", || !procfs::is_alive(container.init.pid())).await;
    sleep(SHORT).await;
}

#[tokio::test]
async fn an_exit_event_has_the_process_the_status_and_the_time() {
    let mut stub = Stub::start().await;
    let container = stub.container(PLAIN);
    let begun = SystemTime::now();
    // Whichever ends first, init's exit is published last.
    let exec_pid = stub.run_exec(&container, "job", "exit 5");
    let pid = stub.run_init(&container, &mut shell("exit 3"));
    for (id, pid, code) in [("job", exec_pid, 5), (ID, pid, 3)] {
        let exit: TaskExit = stub.events.next().await;
        assert_eq!((&*exit.container_id, &*exit.id), (ID, id));
        assert_eq!((exit.pid, exit.exit_status), (pid_field(pid), code));
        let at: SystemTime = exit.exited_at.unwrap().into();
        assert!(begun <= at && at <= SystemTime::now());
        let process = container.process(if id == ID { "" } else { id }).unwrap();
        assert_eq!(process.exit().map(|exit| exit.code), Some(code));
    }
    assert_eq!(container.state(), InitState::Stopped);
}

#[tokio::test]
async fn inits_exit_is_published_after_those_of_all_its_execs() {
    let mut stub = Stub::start().await;
    let container = stub.running(PLAIN);
    let execs = ["one", "two"].map(|exec| stub.run_exec(&container, exec, "exec sleep 1000"));
    // An exec that was announced, and does not start.
    container.begin_exec().unwrap();
    end_init(&container).await;
    assert!(
        container.begin_exec().is_err(),
        "an exec of a container that ends"
    );
    for pid in execs {
        assert!(stub.events.is_empty());
        assert_eq!(container.state(), InitState::Running);
        end(pid);
        let exit: TaskExit = stub.events.next().await;
        assert_eq!(exit.pid, pid_field(pid));
    }
    assert!(stub.events.is_empty());
    exec_ended(&stub.service, &container);
    assert_eq!(stub.events.next::<TaskExit>().await.id, ID);
}

#[tokio::test]
async fn an_exit_during_start_is_published_after_it() {
    let mut stub = Stub::start().await;
    let container = stub.running(PLAIN);
    container.set_state(InitState::Created);
    stub.runtime_does(
        "start",
        "kill -KILL $pid; while [ -e /proc/$pid ]; do sleep 0.01; done",
    );
    let request = StartRequest {
        id: ID.to_owned(),
        ..StartRequest::default()
    };
    start(&stub.service, request).await.unwrap();
    let started: TaskStart = stub.events.next().await;
    assert_eq!(started.pid, pid_field(container.init.pid()));
    assert_eq!(stub.events.next::<TaskExit>().await.exit_status, 137);
}

#[tokio::test]
async fn leftover_processes_end_before_inits_exit_is_published() {
    use InitState::{Paused, Pausing, Running};
    for (traits, state, calls, freezer) in [
        (PLAIN, Running, &[][..], "1"),
        (PLAIN, Paused, &[], "0"),
        (PLAIN, Pausing, &[], "0"),
        (SHARED_PIDS, Running, &["kill --all box 9"], "1"),
        (SHARED_PIDS, Paused, &["kill --all box 9"], "0"),
    ] {
        let mut stub = Stub::start().await;
        let container = stub.running(traits.clone());
        let (_dir, cgroup) = fake(Version::V2, &FREEZES);
        container.set_cgroup(cgroup.clone());
        container.set_state(state);
        for verb in ["kill", "resume"] {
            // Each call takes a while, and records its end.
            stub.runtime_does(verb, "sleep 0.02; echo done >>calls");
        }
        end(container.init.pid());
        stub.events.next::<TaskExit>().await;
        let calls: Vec<_> = calls.iter().flat_map(|call| [*call, "done"]).collect();
        assert_eq!(stub.calls(), calls, "{state:?}");
        let frozen = std::fs::read_to_string(cgroup.primary_dir().join("cgroup.freeze"));
        assert_eq!(frozen.unwrap(), freezer, "{state:?}");
    }
}

/// The freezer is on, and the kernel has not frozen all: with the runtime's resume, which waits for that, an
/// exit was published after 10 s.
const FREEZES: [(&str, &str); 2] = [
    ("cgroup.freeze", "1"),
    ("cgroup.events", "populated 1\nfrozen 0\n"),
];

#[tokio::test]
async fn a_suspended_container_whose_init_ends_is_released_and_thawed() {
    let mut stub = Stub::start().await;
    let container = stub.running(GPU);
    let (_dir, cgroup) = fake(Version::V2, &FREEZES);
    container.set_cgroup(cgroup.clone());
    container.keep_held(TracedThreads::hold(Vec::new(), LIMIT).await.unwrap());
    container.set_state(InitState::Suspended);
    end(container.init.pid());
    stub.events.next::<TaskExit>().await;
    let freezer = std::fs::read_to_string(cgroup.primary_dir().join("cgroup.freeze"));
    assert_eq!(freezer.unwrap(), "0");
    assert!(!container.is_held(), "threads are still held");
    assert!(stub.calls().is_empty());
}

#[tokio::test]
async fn a_failed_kill_is_logged_unless_there_are_no_processes() {
    let cannot_end = "cannot end the processes that box left: no room";
    for (output, logged) in [
        ("no room", &[cannot_end][..]),
        ("container not running", &[]),
        ("box does not exist", &[]),
    ] {
        let mut stub = Stub::start().await;
        let container = stub.running(SHARED_PIDS);
        stub.runtime_does("kill", &format!("echo '{output}' >&2; exit 1"));
        warnings();
        end(container.init.pid());
        stub.events.next::<TaskExit>().await;
        assert_eq!(warnings(), logged, "{output}");
    }
}

#[tokio::test]
async fn a_failed_thaw_is_logged_unless_the_cgroup_has_gone() {
    use InitState::{Paused, Suspended};
    let broken = &[("freezer.state", "MELTED AWAY")];
    for (files, state, is_logged) in [
        (&[][..], Suspended, false),
        (broken, Suspended, true),
        (broken, Paused, true),
    ] {
        let mut stub = Stub::start().await;
        let container = stub.running(GPU);
        let (_dir, cgroup) = fake(Version::V1, files);
        container.set_cgroup(cgroup);
        container.set_state(state);
        warnings();
        end(container.init.pid());
        stub.events.next::<TaskExit>().await;
        let logged = warnings();
        assert_eq!(logged.len(), usize::from(is_logged), "{logged:?}");
        assert!(
            logged.iter().all(|line| line.starts_with("cannot thaw box: ")),
            "{logged:?}"
        );
    }
}

#[tokio::test]
async fn a_kill_is_answered_before_the_exit_that_it_has_caused() {
    for traits in [PLAIN, SHARED_PIDS] {
        let mut stub = Stub::start().await;
        let container = stub.running(traits.clone());
        let killing = container.killing();
        end_init(&container).await;
        assert!(stub.events.is_empty());
        drop(killing);
        stub.events.next::<TaskExit>().await;
    }
}

/// The runtime's own dump of a container without GPUs ends it.
#[tokio::test]
async fn with_gpus_a_transaction_is_cancelled_when_init_ends() {
    for traits in [GPU, PLAIN] {
        let mut stub = Stub::start().await;
        let container = stub.running(traits.clone());
        let transaction = container.transaction.begin();
        end(container.init.pid());
        stub.events.next::<TaskExit>().await;
        assert_eq!(transaction.cancel.is_cancelled(), traits.by_firn());
    }
}

#[tokio::test]
async fn a_killed_restore_ends_every_wait() {
    let mut stub = Stub::start().await;
    let container = stub.container(PLAIN);
    let begun = SystemTime::now();
    let killing = container.killing();
    let (service, killed) = (stub.service.clone(), container.clone());
    let ended = tokio::spawn(async move { restore_killed(&service, &killed).await });
    sleep(SHORT).await;
    assert!(stub.events.is_empty(), "the kill is not answered yet");
    assert!(container.begin_exec().is_err());
    drop(killing);
    ended.await.unwrap();
    let exit: TaskExit = stub.events.next().await;
    assert_eq!((&*exit.container_id, &*exit.id), (ID, ID));
    assert_eq!((exit.pid, exit.exit_status), (0, 137));
    let at: SystemTime = exit.exited_at.unwrap().into();
    assert!(begun <= at);
    assert_eq!(container.state(), InitState::Stopped);
    let waited = timeout(LIMIT, container.init.wait()).await.unwrap();
    assert_eq!(waited, container.init.exit());
}

const NO_KILL: [(&str, &str); 2] = [
    ("memory.events", "oom_kill 0\n"),
    ("cgroup.events", "populated 1\nfrozen 0\n"),
];

#[tokio::test]
async fn out_of_memory_is_published_once_and_before_the_exit_that_it_causes() {
    let mut stub = Stub::start().await;
    let container = stub.running(PLAIN);
    let (_dir, cgroup) = fake(Version::V2, &NO_KILL);
    container.set_cgroup(cgroup.clone());
    watch_oom(&stub.service, &container);
    let kills = |count: u32| {
        let file = cgroup.primary_dir().join("memory.events");
        std::fs::write(file, format!("oom_kill {count}\n")).unwrap();
    };
    let begun = Instant::now();
    kills(1);
    assert_eq!(stub.events.next::<TaskOOM>().await.container_id, ID);
    // This kill was not reported yet when the exit comes.
    kills(2);
    let exit = Exit {
        pid: container.init.pid(),
        code: 137,
        at: SystemTime::now(),
    };
    let owner = Owner {
        container: Arc::downgrade(&container),
        process: container.init.clone(),
    };
    handle(&stub.service, &owner, exit);
    assert_eq!(stub.events.next::<TaskOOM>().await.container_id, ID);
    stub.events.next::<TaskExit>().await;
    sleep(SHORT).await;
    assert!(stub.events.is_empty(), "after {:?}", begun.elapsed());
}

#[tokio::test]
async fn memory_is_watched_if_there_are_processes_and_it_is_accounted() {
    for (has_init, files, is_watched, warned) in [
        (true, &NO_KILL[..], true, 0),
        (false, &NO_KILL[..], false, 0),
        (true, &NO_KILL[1..], false, 0),
        (true, &NO_KILL[..1], false, 1),
    ] {
        let stub = Stub::start().await;
        let container = if has_init {
            stub.running(PLAIN)
        } else {
            stub.container(PLAIN)
        };
        let (_dir, cgroup) = fake(Version::V2, files);
        container.set_cgroup(cgroup);
        warnings();
        watch_oom(&stub.service, &container);
        assert_eq!(container.oom.get().is_some(), is_watched);
        assert_eq!(warnings().len(), warned);
    }
}
