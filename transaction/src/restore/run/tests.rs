//! A restore is committed, or nothing of the container is left; and what a restore checks before.

use std::fs;
use std::sync::{Arc, Mutex};

use firn_config::names;
use firn_host::procfs;
use firn_process::testing::log::warnings;
use firn_process::testing::write_program;

use super::super::testing::{Stub, container, prepared};
use super::*;
use crate::image_dir::rescue::tests::make_image;
use crate::journal::Record;
use crate::restore::error::Refusal;

/// A front end that fails where a test wants it. As the runtime of these tests does nothing, it starts the
/// process that is restored.
struct Client<'a> {
    stub: &'a Stub,
    reaper: &'a Reaper,
    /// The method that fails.
    fails: &'static str,
    /// The container is killed while its stdio is connected.
    is_killed: bool,
    calls: &'a Mutex<Vec<&'static str>>,
}

#[derive(Debug)]
enum ClientError {
    Failed(&'static str),
    Restore(RestoreError),
}

impl From<RestoreError> for ClientError {
    fn from(error: RestoreError) -> Self {
        Self::Restore(error)
    }
}

impl Client<'_> {
    fn call(&self, name: &'static str) -> Result<(), ClientError> {
        self.calls.lock().unwrap().push(name);
        assert!(self.fails != format!("{name} panics"), "on purpose");
        if self.fails == name {
            return Err(ClientError::Failed(name));
        }
        Ok(())
    }
}

impl FrontEnd for Client<'_> {
    type Error = ClientError;

    async fn open(&mut self) -> Result<(), ClientError> {
        self.call("open")
    }

    fn pid_file(&self) -> PathBuf {
        self.stub.container.bundle.join("pid")
    }

    fn console(&self) -> Option<PathBuf> {
        None
    }

    fn attach(&mut self, _: &mut Command) {
        self.call("attach").unwrap();
        let task = self.stub.scratch.spawn(self.reaper, "", "exec sleep 1000");
        // The runtime starts after this: what it restores is in the cgroup, also when it fails.
        self.stub.scratch.wait_all_entered();
        fs::write(self.pid_file(), task.pid().to_string()).unwrap();
    }

    async fn connect(&mut self) -> Result<(), ClientError> {
        if self.is_killed {
            self.stub.container.transaction.cancel();
        }
        self.call("connect")
    }

    async fn close(&mut self) {
        self.call("close").unwrap();
    }
}

/// How a restore with such a front end ends: its calls, whether its process is alive, its result. Whatever
/// it is, no journal and no transaction is left, and only a container that was not restored has its
/// checkpoint.
async fn end_of(
    fails: &'static str,
    runtime: &str,
    is_killed: bool,
) -> Option<(Vec<&'static str>, bool, Result<(), NotRestored<ClientError>>)> {
    let reaper = Reaper::start().unwrap();
    let (stub, calls) = (Stub::new(runtime, &reaper)?, Mutex::default());
    let client = Client {
        stub: &stub,
        reaper: &reaper,
        fails,
        is_killed,
        calls: &calls,
    };
    let container = &stub.container;
    let done = Box::pin(run(container, prepared(Path::new("/image")), &reaper, client)).await;
    assert_eq!(Record::read(&container.bundle).unwrap(), None);
    assert!(!container.transaction.is_taken());
    assert_eq!(container.take_checkpoint().is_some(), done.is_err());
    let pid = fs::read_to_string(container.bundle.join("pid")).ok();
    let is_alive = pid.is_some_and(|pid| procfs::is_alive(pid.parse().unwrap()));
    if done.is_ok() {
        assert!(procfs::is_alive(container.init.pid()));
    }
    let calls = calls.lock().unwrap().clone();
    Some((calls, is_alive, done))
}

#[tokio::test]
async fn a_committed_restore_keeps_running_and_leaves_no_journal() {
    let Some((calls, is_alive, done)) = end_of("", "true", false).await else {
        return;
    };
    assert!(done.is_ok() && is_alive);
    assert_eq!(calls, ["open", "attach", "connect"]);
}

/// Stdio that was opened is closed, once, unless it was connected.
#[tokio::test]
async fn a_front_end_that_fails_leaves_nothing_of_the_container() {
    for (fails, wanted) in [
        ("open", &["open"][..]),
        ("connect", &["open", "attach", "connect"]),
    ] {
        let Some((calls, is_alive, done)) = end_of(fails, "true", false).await else {
            return;
        };
        let NotRestored { error, is_killed } = done.err().unwrap();
        assert!(
            matches!(error, ClientError::Failed(failed) if failed == fails),
            "{error:?}"
        );
        assert!(!is_killed && !is_alive, "{fails}");
        assert_eq!(calls, wanted);
    }
    let Some((calls, is_alive, done)) = end_of("", "false", false).await else {
        return;
    };
    let NotRestored { error, is_killed } = done.err().unwrap();
    assert!(
        matches!(error, ClientError::Restore(RestoreError::Plain { .. })),
        "{error:?}"
    );
    assert!(!is_killed && !is_alive);
    assert_eq!(calls, ["open", "attach", "close"]);
}

#[tokio::test]
async fn a_front_end_that_panics_leaves_nothing_of_the_container() {
    for fails in ["open panics", "connect panics"] {
        let Some((_, is_alive, done)) = end_of(fails, "true", false).await else {
            return;
        };
        let NotRestored { error, is_killed } = done.err().unwrap();
        let ClientError::Restore(RestoreError::Failed { cause, .. }) = error else {
            panic!("{error:?}");
        };
        assert!(matches!(cause, Cause::Panicked), "{cause:?}");
        assert!(!is_killed && !is_alive, "{fails}");
    }
}

/// A kill that comes before the commit finds the transaction, and the container ends.
#[tokio::test]
async fn a_container_that_is_killed_before_the_commit_is_rolled_back() {
    let Some((_, is_alive, done)) = end_of("", "true", true).await else {
        return;
    };
    let NotRestored { error, is_killed } = done.err().unwrap();
    let ClientError::Restore(RestoreError::Failed { cause, .. }) = error else {
        panic!("{error:?}");
    };
    assert!(matches!(cause, Cause::Killed), "{cause:?}");
    assert!(is_killed && !is_alive);
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
            transaction: stub.transaction(&reaper).await,
            was_free,
        };
        warnings();
        restored.roll_back().await;
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
    let (transaction, bundle) = (stub.transaction(&reaper).await, &stub.container.bundle);
    roll_back_after_panic(&stub.container, true, &transaction.journal).await;
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
    assert_eq!(read_log(&log).await, ["(criu/x.c:1): no memory"]);
    assert_eq!(refusal_of_script(&container).await, Some(refusal.clone()));
    leave();
    warnings();
    // The second time there is nothing to remove.
    for _ in 0..2 {
        forget_log(&log).await;
        forget_refusal(&container).await;
    }
    assert_eq!(warnings(), Vec::<String>::new());
    assert_eq!(read_log(&log).await, Vec::<String>::new());
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
    write_program(&runtime, script);
    let container = container("job", bundle.path(), runtime.to_str().unwrap(), &reaper);
    let (prepared, cancel) = (prepared(bundle.path()), CancellationToken::default());
    let transaction = begin(&container, &prepared, &reaper, &cancel).await.unwrap();
    let (pid_file, work) = (bundle.path().join("pid"), work_dir(&container));
    let restore = Restore {
        image: &prepared.image,
        work: &work,
        bundle: bundle.path(),
        pid_file: &pid_file,
        console_socket: None,
        no_pivot: false,
        flags: &prepared.flags,
        plugins: None,
        bounds: Bounds {
            deadline: None,
            journal: &transaction.journal,
            cancel: transaction.cancel(),
            freezer: None,
        },
    };
    let restored = Box::pin(plain(
        &transaction,
        &prepared,
        restore,
        work.join(LOG),
        true,
        |_| {},
    ));
    match restored.await.err().unwrap() {
        RestoreError::Plain { error, .. } => {
            assert!(error.to_string().contains("restore failed"), "{error}");
        }
        other => panic!("{other}"),
    }
}
