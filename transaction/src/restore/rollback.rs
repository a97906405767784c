//! Rollback of a restore that failed: nothing of the container is left but its bundle.
//!
//! Every step is tried, even if another fails, and may be repeated.

use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_config::names;
use firn_host::UnlessAbsent;
use firn_oci::Spec;
use firn_process::OrWarn;
use firn_process::cgroup::Cgroup;

use super::place::is_own;
use crate::container::Container;
use crate::criu_leftovers::{remove_roots, unmount, unmount_yards};
use crate::huge_pages;
use crate::recovery::Recovery;

/// How long killed processes may take to end.
const GONE: Duration = Duration::from_secs(20);

/// CRIU's log in its work directory.
pub const LOG: &str = "restore.log";

/// Kills what was restored and removes what runc and CRIU left.
pub async fn rollback(container: &Container) {
    // runc and CRIU have ended: their call succeeded, or they were killed.
    let spec = Spec::load(&container.bundle);
    let spec = spec.or_warn(format_args!("cannot find the cgroup of {}", container.id));
    if let Some(spec) = spec {
        kill_cgroup(container, &spec).await;
    }
    let work = work_dir(container);
    sweep(&container.runc.state_dir(), &work).await;
    remove_roots(&work.join(LOG)).await;
    let deleted = container.runc.ensure_deleted().await;
    deleted.or_warn(format_args!("cannot delete {}", container.id));
    let state = container.runc.state_dir();
    let removed = std::fs::remove_dir_all(&state).unless_absent();
    removed.or_warn(format_args!("cannot remove {}", state.display()));
}

/// Rolls back a restore whose program was killed, by its journal.
pub async fn after_kill(container: &Container, recovery: &Recovery) {
    huge_pages::recover().await;
    // Order matters: CRIU continues without its caller.
    recovery.end_programs(GONE).await;
    if container.bundle.join(names::BUNDLE_OTHERS_CGROUP).exists() {
        let deleted = container.runc.ensure_deleted().await;
        deleted.or_warn(format_args!("cannot delete {}", container.id));
    } else {
        rollback(container).await;
    }
    recovery.clear().await;
    recovery.forget(&container.bundle).await;
}

/// Where CRIU writes its logs of this container.
pub(super) fn work_dir(container: &Container) -> PathBuf {
    match container.options.criu_work_path.as_str() {
        "" => container.bundle.join("work"),
        path => PathBuf::from(path),
    }
}

async fn kill_cgroup(container: &Container, spec: &Spec) {
    let Some(path) = spec.cgroups_path().filter(|_| is_own(&container.id, spec)) else {
        return;
    };
    let ended = async {
        let systemd = container.options.systemd_cgroup;
        let cgroup = Cgroup::by_spec(path, &container.id, systemd)?;
        cgroup.kill_all(GONE).await?;
        cgroup.remove(GONE).await
    };
    let ended = ended.await.unless_absent();
    ended.or_warn(format_args!("cannot end the processes in cgroup {path}"));
}

/// Unmounts what a killed CRIU or runc left: the rootfs bind in runc's state directory, the cgroup tree in
/// the work directory.
async fn sweep(state: &Path, work: &Path) {
    unmount_yards(work).await;
    unmount(&state.join("criu-root")).await;
}

#[cfg(test)]
mod tests {
    use firn_host::procfs;
    use firn_process::reaper::Reaper;
    use firn_process::testing::log::warnings;
    use firn_process::testing::mounts::{private_dir, tmpfs_at};

    use super::super::testing::{Stub, container};
    use super::*;
    use firn_host::mountinfo::mounted;

    #[tokio::test]
    async fn only_the_bundle_is_left_and_a_second_rollback_changes_nothing() {
        let reaper = Reaper::start().unwrap();
        let (Some(_private), Some(stub)) = (private_dir(), Stub::new("true", &reaper)) else {
            return;
        };
        let task = stub.scratch.spawn(&reaper, "", "sleep 1000");
        stub.scratch.all_entered().await;
        let container = &stub.container;
        let (state, work) = (container.runc.state_dir(), work_dir(container));
        assert!(work.starts_with(&container.bundle));
        let left = [state.join("criu-root"), work.join(".criu.cgyard.Ab12Cd")];
        let others = work.join("other");
        for dir in left.iter().chain([&others]) {
            std::fs::create_dir_all(dir).unwrap();
            tmpfs_at(dir);
        }
        warnings();
        for _ in 0..2 {
            rollback(container).await;
            assert_eq!(warnings(), Vec::<String>::new());
        }
        assert!(!procfs::is_alive(task.pid()));
        assert!(!stub.scratch.cgroup.exists() && !state.exists());
        let is_mounted = |dir: &Path| mounted().unwrap().iter().any(|mount| mount.mount_point == dir);
        assert!(!left.iter().any(|dir| is_mounted(dir)) && is_mounted(&others));
        unmount(&others).await;
    }

    #[tokio::test]
    async fn a_step_that_fails_is_logged_and_the_others_are_done() {
        let reaper = Reaper::start().unwrap();
        let bundle = tempfile::tempdir().unwrap();
        let mut container = container("box", bundle.path(), "false", &reaper);
        // systemd has no such name for a cgroup.
        container.options.systemd_cgroup = true;
        std::fs::create_dir_all(container.runc.state_dir()).unwrap();
        warnings();
        rollback(&container).await;
        let logged = warnings();
        assert!(
            logged[0].starts_with("cannot end the processes in cgroup /box: "),
            "{logged:?}"
        );
        assert!(logged[1].starts_with("cannot delete box: "), "{logged:?}");
        assert_eq!(logged.len(), 2, "{logged:?}");
        assert!(!container.runc.state_dir().exists());
    }

    #[tokio::test]
    async fn criu_works_in_the_bundle_unless_the_client_names_a_directory() {
        let reaper = Reaper::start().unwrap();
        let bundle = tempfile::tempdir().unwrap();
        let mut container = container("box", bundle.path(), "true", &reaper);
        assert_eq!(work_dir(&container), bundle.path().join("work"));
        container.options.criu_work_path = "/elsewhere".to_owned();
        assert_eq!(work_dir(&container), Path::new("/elsewhere"));
    }
}
