//! A restore is committed, or nothing of the container is left; and what a restore checks before.

use std::fs;
use std::sync::Arc;

use firn_config::names;
use firn_host::procfs;
use firn_process::testing::log::warnings;

use super::super::testing::{Stub, container, prepared};
use super::*;
use crate::image_dir::rescue::tests::make_image;
use crate::journal::Record;
use crate::restore::error::Refusal;

#[tokio::test]
async fn a_committed_restore_keeps_running_and_leaves_no_journal() {
    let reaper = Reaper::start().unwrap();
    let Some(stub) = Stub::new("true", &reaper) else {
        return;
    };
    let task = stub.scratch.spawn(&reaper, "", "exec sleep 1000");
    stub.scratch.all_entered().await;
    let restored = Restored {
        pid: task.pid(),
        journal: stub.journal().await,
        was_free: true,
    };
    assert_eq!(restored.pid(), task.pid());
    restored.commit().await;
    assert!(procfs::is_alive(task.pid()));
    assert_eq!(Record::read(&stub.container.bundle).unwrap(), None);
}

/// Processes that were in the cgroup before are not killed: then the runtime alone deletes its state.
#[tokio::test]
async fn a_restore_that_is_rolled_back_kills_its_own_processes_only() {
    let reaper = Reaper::start().unwrap();
    for was_free in [true, false] {
        let Some(stub) = Stub::new("false", &reaper) else {
            return;
        };
        let task = stub.scratch.spawn(&reaper, "", "exec sleep 1000");
        stub.scratch.all_entered().await;
        let restored = Restored {
            pid: task.pid(),
            journal: stub.journal().await,
            was_free,
        };
        warnings();
        let prepared = prepared(Path::new("/image"));
        let killed = restored.roll_back(&stub.container, &prepared).await;
        assert!(matches!(
            killed,
            RestoreError::Failed {
                cause: Cause::Killed,
                ..
            }
        ));
        assert_eq!(procfs::is_alive(task.pid()), !was_free);
        let logged = warnings();
        assert_eq!(logged.len(), 1, "the runtime is called once: {logged:?}");
        assert!(logged[0].starts_with("cannot delete "), "{logged:?}");
        assert_eq!(Record::read(&stub.container.bundle).unwrap(), None);
    }
}

#[tokio::test]
async fn a_restore_that_panics_is_rolled_back_and_enters_that_phase() {
    let reaper = Reaper::start().unwrap();
    let Some(stub) = Stub::new("true", &reaper) else {
        return;
    };
    let task = stub.scratch.spawn(&reaper, "", "exec sleep 1000");
    stub.scratch.all_entered().await;
    let (journal, bundle) = (stub.journal().await, &stub.container.bundle);
    roll_back_after_panic(&stub.container, true, &journal).await;
    assert!(!procfs::is_alive(task.pid()));
    let record = Record::read(bundle).unwrap().unwrap();
    assert_eq!(record.phase, Some(Phase::Rollback));
}

#[tokio::test]
async fn a_cgroup_with_other_processes_is_not_free() {
    let reaper = Reaper::start().unwrap();
    let Some(stub) = Stub::new("true", &reaper) else {
        return;
    };
    assert!(free_cgroup(&stub.container).is_ok());
    stub.scratch.spawn(&reaper, "", "exec sleep 1000");
    stub.scratch.all_entered().await;
    let busy = free_cgroup(&stub.container);
    assert!(matches!(busy, Err(Cause::CgroupBusy)), "{busy:?}");
}

#[tokio::test]
async fn an_image_that_was_changed_after_it_was_checked_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let verified = make_image(&image).verify_images(&image).unwrap();
    let mut prepared = prepared(&image);
    let unknown = check_again(&prepared, &CancellationToken::default()).await;
    assert!(unknown.is_ok(), "there was nothing to check: {unknown:?}");
    prepared.verified = Some(Arc::new(verified));
    assert!(
        check_again(&prepared, &CancellationToken::default())
            .await
            .is_ok()
    );
    fs::write(image.join("pages-1.img"), "other pages").unwrap();
    let changed = check_again(&prepared, &CancellationToken::default()).await;
    assert!(
        matches!(
            changed,
            Err(RestoreError::Refused {
                cause: Refusal::Damaged(_),
                ..
            })
        ),
        "{changed:?}"
    );
}

#[tokio::test]
async fn errors_of_an_earlier_restore_are_not_reported() {
    let reaper = Reaper::start().unwrap();
    let bundle = tempfile::tempdir().unwrap();
    let container = container("box", bundle.path(), "true", &reaper);
    let log = bundle.path().join(LOG);
    let refusal = ProblemReport {
        code: "FIRN-HOST-MEMORY".to_owned(),
        message: "no node".to_owned(),
        hint: "make it".to_owned(),
    };
    let leave = || {
        let json = serde_json::to_vec(&refusal).unwrap();
        fs::write(bundle.path().join(names::BUNDLE_SCRIPT_REFUSAL), json).unwrap();
        fs::write(&log, "(00.1) Error (criu/x.c:1): no memory\n(00.2) done\n").unwrap();
    };
    leave();
    assert_eq!(last_errors(&log).await, ["(criu/x.c:1): no memory"]);
    assert_eq!(refusal_of_script(&container).await, Some(refusal.clone()));
    leave();
    warnings();
    // The second time there is nothing to remove.
    for _ in 0..2 {
        forget_log(&log).await;
        forget_refusal(&container).await;
    }
    assert_eq!(warnings(), Vec::<String>::new());
    assert_eq!(last_errors(&log).await, Vec::<String>::new());
    assert_eq!(refusal_of_script(&container).await, None);
    fs::create_dir(&log).unwrap();
    forget_log(&log).await;
    assert!(warnings()[0].starts_with("cannot remove "));
}

#[tokio::test]
async fn the_runtimes_error_is_reported() {
    let reaper = Reaper::start().unwrap();
    let bundle = tempfile::tempdir().unwrap();
    let runtime = bundle.path().join("runtime");
    let script = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'runc version 1.3.6' && exit\nexit 1\n";
    // Another process writes the script: a child that is forked here meanwhile would keep it open for
    // writing, and it could not be run.
    let write = ["-c", "printf %s \"$1\" >\"$0\" && chmod 700 \"$0\""];
    let mut write_it = Command::new("sh");
    write_it.args(write).arg(&runtime).arg(script);
    let written = reaper
        .output(&mut write_it, Duration::from_secs(20))
        .await
        .unwrap();
    assert!(written.success());
    let container = container("job", bundle.path(), runtime.to_str().unwrap(), &reaper);
    let (prepared, pid_file) = (prepared(bundle.path()), bundle.path().join("pid"));
    let cancel = CancellationToken::default();
    let restored = Box::pin(run(
        &container,
        &prepared,
        &pid_file,
        None,
        &reaper,
        &cancel,
        |_| {},
    ));
    match restored.await.err().unwrap() {
        RestoreError::Plain { error, .. } => {
            assert!(error.to_string().contains("restore failed"), "{error}");
        }
        other => panic!("{other}"),
    }
}
