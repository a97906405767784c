use tonic::Status;

use firn_containerd::tasks::{GetResponse, Process, status};

use super::*;
use crate::containerd::block_on;
use crate::containerd::fake::{Fake, Reply, reply};

const PID: u32 = 41;

fn task(pid: u32, status: i32) -> Reply {
    let process = Some(Process {
        pid,
        status,
        ..Process::default()
    });
    reply(Ok(GetResponse { process }))
}

fn paused() -> Reply {
    task(PID, status::PAUSED)
}

fn lost() -> Reply {
    reply::<()>(Err(Status::unavailable("containerd has ended")))
}

async fn source(fake: &Fake, dir: &Path) -> Source {
    Source {
        containerd: Containerd::connect(&fake.socket(), "default").await.unwrap(),
        container: Container {
            id: "job".to_owned(),
            ..Container::default()
        },
        namespace: "default".to_owned(),
        overrides: HashMap::new(),
        lease: String::new(),
        pid: PID,
        was_paused: false,
        paused_for: None,
        not_ours: AtomicBool::new(false),
        _alone: Alone::take(dir, "default", "job").unwrap().unwrap(),
    }
}

#[test]
fn a_container_ends_though_containerd_is_started_again_meanwhile() {
    let fake = Fake::new(|call, before| {
        let is_first = !before.iter().any(|made| made == call);
        match call {
            "Tasks/Get" => paused(),
            _ if is_first => lost(),
            "Tasks/Delete" => reply::<()>(Err(Status::not_found("gone"))),
            _ => reply(Ok(())),
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let ended = block_on(async {
        let source = source(&fake, dir.path()).await;
        source.end(EndProof::of_test(), &mut Steps::new(true)).await
    });
    ended.unwrap().unwrap();
    for call in ["Tasks/Kill", "Tasks/Wait", "Tasks/Delete"] {
        assert_eq!(fake.count(call), 2, "{call}");
    }
}

fn refused() -> Reply {
    reply::<()>(Err(Status::failed_precondition("not in this state")))
}

fn done() -> Reply {
    reply(Ok(()))
}

/// How containerd's calls end: an update by the shim, a pause, and the state of the task after it.
/// Returns the calls of Pause and Resume, whether it was paused for this command, and by its user.
fn paused_after(updated: fn() -> Reply, pause: fn() -> Reply, now: i32) -> ([usize; 2], bool, bool) {
    let fake = Fake::new(move |call, _| match call {
        "Tasks/Update" => updated(),
        "Tasks/Pause" => pause(),
        "Tasks/Get" => task(PID, now),
        _ => done(),
    });
    let dir = tempfile::tempdir().unwrap();
    let source = block_on(async {
        let mut source = source(&fake, dir.path()).await;
        source.pause(&mut Steps::new(true)).await.unwrap();
        source.stay_paused().await.unwrap();
        source.resume(StaysHere::never_sent()).await.unwrap();
        source
    });
    let source = source.unwrap();
    let calls = ["Tasks/Pause", "Tasks/Resume"].map(|call| fake.count(call));
    assert!(source.paused_for.is_none() || source.paused_for == ProcessTag::own());
    (calls, source.paused_for.is_some(), source.was_paused())
}

#[test]
fn a_shim_that_does_not_pause_for_a_command_gets_a_plain_pause() {
    use status::{PAUSED, RUNNING, UNKNOWN};
    let unknown = || reply::<()>(Err(Status::unimplemented("no such update")));
    assert_eq!(paused_after(unknown, done, RUNNING), ([1, 1], false, false));
    assert_eq!(paused_after(done, done, RUNNING), ([1, 1], false, false));
    assert_eq!(paused_after(done, done, PAUSED), ([0, 1], true, false));
    assert_eq!(paused_after(done, done, UNKNOWN), ([0, 1], true, false));
    // Its user has paused it since it was looked at.
    assert_eq!(paused_after(refused, refused, PAUSED), ([0, 0], false, true));
}

/// What containerd answers when a command withdraws its name, and then whether its pause is its own.
#[test]
fn a_pause_of_another_is_left_alone() {
    for (kept, now, wanted) in [
        (refused as fn() -> Reply, status::PAUSED, false),
        (refused, status::RUNNING, false),
        (refused, status::STOPPED, true),
        (lost, status::PAUSED, true),
    ] {
        let fake = Fake::new(move |call, before| match call {
            // The answer is lost once.
            "Tasks/Update" if before.iter().filter(|made| *made == call).count() == 1 => kept(),
            "Tasks/Get" if before.contains(&"Tasks/Update".to_owned()) => task(PID, now),
            _ => done(),
        });
        let dir = tempfile::tempdir().unwrap();
        let kept = block_on(async {
            let mut source = source(&fake, dir.path()).await;
            source.paused_for = ProcessTag::own();
            source
                .annotate(names::ANNOTATION_PAUSE_FOR, ProcessTag::own().unwrap())
                .await
                .unwrap();
            let kept = source.stay_paused().await;
            source.resume(StaysHere::never_sent()).await.unwrap();
            kept
        });
        let kept = kept.unwrap();
        let resumed = fake.count("Tasks/Resume") == 1;
        assert_eq!((kept.is_ok(), resumed), (wanted, wanted), "{now}");
        if let Err(error) = kept {
            assert!(error.shown().contains("FIRN-FREEZER: "), "{}", error.shown());
        }
    }
}

#[test]
fn a_container_with_a_pause_of_another_is_not_ended() {
    for (kept, kills) in [(refused as fn() -> Reply, 0), (done, 1)] {
        let fake = Fake::new(move |call, _| match call {
            "Tasks/Update" => kept(),
            "Tasks/Get" => paused(),
            _ => done(),
        });
        let dir = tempfile::tempdir().unwrap();
        let ended = block_on(async {
            let mut source = source(&fake, dir.path()).await;
            source.paused_for = ProcessTag::own();
            crate::checkpoint::end(&source, EndProof::of_test(), &mut Steps::new(true)).await
        });
        assert_eq!(ended.unwrap().is_ok(), kills == 1);
        assert_eq!(fake.count("Tasks/Kill"), kills);
    }
}

/// What it has done since is in no checkpoint.
#[test]
fn a_container_that_somebody_has_resumed_or_started_again_is_not_ended() {
    for (pid, status) in [(PID, 2), (PID + 1, 4), (PID + 1, 2)] {
        let fake = Fake::new(move |call, _| match call {
            "Tasks/Get" => task(pid, status),
            _ => reply(Ok(())),
        });
        let dir = tempfile::tempdir().unwrap();
        let ended = block_on(async {
            let source = source(&fake, dir.path()).await;
            source.end(EndProof::of_test(), &mut Steps::new(true)).await
        });
        let shown = ended.unwrap().unwrap_err().shown();
        assert!(shown.contains("FIRN-FREEZER: "), "{shown}");
        for call in ["Tasks/Kill", "Tasks/Delete"] {
            assert_eq!(fake.count(call), 0, "{call}");
        }
    }
}

#[test]
fn a_container_that_cannot_be_ended_is_paused_next_to_its_checkpoint() {
    let fake = Fake::new(|call, _| if call == "Tasks/Get" { paused() } else { lost() });
    let dir = tempfile::tempdir().unwrap();
    let killed = block_on(async { source(&fake, dir.path()).await.kill(Instant::now()).await });
    let shown = killed
        .unwrap()
        .unwrap_err()
        .with("checkpoint/job".to_owned())
        .shown();
    for part in [
        "FIRN-CONTAINERD: ",
        "checkpoint/job is complete",
        "job was paused",
        "resume",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
}
