//! The action `delete`: containerd runs it for a container whose shim is gone, and kills it after 5 s.
//!
//! The bundle may be that of another shim (the stock one, an older firn), and the shim may have died
//! anywhere: in the middle of a dump, of a restore, before the runtime knew the container. So nothing is
//! relied on but the bundle's files; each step tries, warns on stderr when it fails, and lets the next one
//! try too. What is gone already is no failure.

mod leftover_processes;

use std::convert::Infallible;
use std::fs;
use std::future::Future;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use containerd_shim_protos::api::DeleteResponse;
use firn_config::names;
use firn_oci::Spec;
use firn_process::cgroup::Cgroup;
use firn_process::reaper::Reaper;
use firn_process::unmount::unmount_recursive;
use protobuf::well_known_types::timestamp::Timestamp;
use protobuf::{Message, MessageField};

use crate::action_io::{print, runtime};
use crate::args::Args;
use crate::bootstrap;
use crate::error::{ActionError, failed};
use crate::logger;
use crate::task::{INIT_PID, pid_field};
use firn_host::Chain;
use firn_transaction::history::{self, HistoryDir};
use firn_transaction::huge_pages;
use firn_transaction::journal::Operation;
use firn_transaction::killed_criu;
use firn_transaction::options::RuncOptions;
use firn_transaction::recording;
use firn_transaction::recovery::Recovery;
use firn_transaction::runc::{Runc, read_pid};
use firn_transaction::{criu_leftovers, restore};

/// How long the container's processes may take to die.
const KILL_LIMIT: Duration = Duration::from_secs(1);
/// How long each of the other steps may take.
const STEP_LIMIT: Duration = Duration::from_millis(1500);
/// How long all of them may take together: containerd waits 5 s.
const TOTAL_LIMIT: Duration = Duration::from_millis(4500);
/// 128 + SIGKILL: what becomes of a container without a shim.
const EXIT_STATUS: u32 = 137;

/// Cleans up after the container and answers on stdout.
pub fn delete(args: &Args) -> Result<(), ActionError> {
    logger::init(args.debug, format!("id={} namespace={}", args.id, args.namespace))
        .expect("the logger is set once per process");
    let bundle = bundle(args)?;
    // Read first: cleaning up may take the file away. A container that never ran has none.
    let pid = read_pid(&bundle.join(INIT_PID)).map_or(0, pid_field);
    let runtime = runtime()?;
    runtime.block_on(async {
        let reaper = Reaper::start().map_err(failed("watch for child processes"))?;
        // Its log lines name the transaction that was cut off.
        recording::within_call(clean_up(args, &bundle, reaper)).await;
        Ok::<_, ActionError>(())
    })?;
    // A call that is stuck in the kernel must not keep the answer back.
    runtime.shutdown_background();
    let answer = DeleteResponse {
        pid,
        exit_status: EXIT_STATUS,
        exited_at: MessageField::some(Timestamp::from(SystemTime::now())),
        ..DeleteResponse::default()
    };
    print(&answer.write_to_bytes().map_err(ActionError::Encode)?)
}

/// The bundle: as given, or the one next to the working directory (containerd runs us in a bundle).
fn bundle(args: &Args) -> Result<PathBuf, ActionError> {
    if let Some(bundle) = &args.bundle {
        return Ok(bundle.clone());
    }
    let here = std::env::current_dir().map_err(failed("find the working directory"))?;
    Ok(here.with_file_name(&args.id))
}

async fn clean_up(args: &Args, bundle: &Path, reaper: Reaper) {
    let options = RuncOptions::load(bundle).unwrap_or_else(|error| {
        log::warn!("{}; continuing with default options", Chain(&error));
        RuncOptions::default()
    });
    let runc = Runc::new(&args.id, &args.namespace, bundle, &options, reaper.clone());
    let cgroup = own_cgroup(args, bundle, &options);
    let mut recovery = Recovery::of(bundle);

    // CRIU continues without its shim, holds the tasks, and writes to an image.
    let steps = Steps::begin();
    if let Some(recovery) = &mut recovery {
        recovery.record().adopt();
        // Order matters: containerd removes its directory at this very moment.
        recovery.rescue(bundle).await;
        recovery.report_image();
    }
    // Order matters: all of the host's programs have them, and the rest may take all of the time. Whatever
    // the journal shows: it may be unreadable.
    steps.put_huge_pages_back().await;
    if let Some(recovery) = &mut recovery {
        recovery.end_programs(KILL_LIMIT).await;
        // Containers of the same pod share its network.
        let is_dump = recovery.record().begin.op == Operation::Checkpoint;
        if is_dump && recovery.record().outcome.is_none() {
            let pids = cgroup.as_ref().and_then(|cgroup| cgroup.pids().ok());
            let (log, pids) = (recovery.criu_log(), pids.unwrap_or_default());
            killed_criu::release_of(bundle, &log, &pids, killed_criu::LIMIT_KILLED, &reaper).await;
        }
    }
    // Order matters: a restore that was cut off leaves processes that the runtime does not know, and a frozen
    // cgroup would keep the runtime waiting, so the processes go first. Then the mount that a cut off restore
    // leaves in the runtime's state, which would make the runtime's own cleaning fail.
    if let Some(cgroup) = &cgroup {
        let killed = cgroup.kill_all(KILL_LIMIT);
        steps.attempt("kill the container", KILL_LIMIT * 2, killed).await;
    }
    // What `ctr containers restore` makes runs under its source's cgroup name, which may be somebody else's.
    leftover_processes::kill(&bundle.join("rootfs"), KILL_LIMIT).await;
    steps
        .unmount("unmount the runtime's state", &runc.state_dir())
        .await;
    let deleted = runc.ensure_deleted();
    steps
        .attempt("remove the container from the runtime", STEP_LIMIT, deleted)
        .await;
    if let Some(cgroup) = &cgroup {
        let removed = cgroup.remove(KILL_LIMIT);
        steps.attempt("remove the cgroup", STEP_LIMIT, removed).await;
    }
    let rootfs = bundle.join("rootfs");
    steps.unmount("unmount the root file system", &rootfs).await;
    // CRIU's mounts (.criu.cgyard.*): containerd removes the directory next, and must not walk into a cgroup.
    let work = bundle.join("work");
    steps.unmount("unmount the work directory", &work).await;
    criu_leftovers::remove_roots(&work.join(restore::LOG)).await;
    remove_dead_socket(bundle);
    if let Some(recovery) = &recovery {
        steps.write_history(bundle).await;
        let cleared = async {
            recovery.clear().await;
            Ok::<(), Infallible>(())
        };
        steps.attempt("clear the image", TOTAL_LIMIT, cleared).await;
    }
}

/// The cgroup that the spec names, when it is this container's alone: its name ends with the id, as
/// containerd's do, and a restore has not found others in it.
fn own_cgroup(args: &Args, bundle: &Path, options: &RuncOptions) -> Option<Cgroup> {
    if bundle.join(names::BUNDLE_OTHERS_CGROUP).exists() {
        return None;
    }
    let spec = Spec::load(bundle).ok()?;
    let path = spec.cgroups_path()?;
    if path.rsplit(['/', ':']).next() != Some(&args.id) {
        return None;
    }
    match Cgroup::by_spec(path, &args.id, options.systemd_cgroup) {
        Ok(cgroup) => cgroup.exists().then_some(cgroup),
        Err(error) => {
            log::warn!("cannot find the cgroup: {}", Chain(&error));
            None
        }
    }
}

/// The steps of the cleaning, which share the time that there is.
struct Steps {
    end: Instant,
}

impl Steps {
    fn begin() -> Self {
        Self {
            end: Instant::now() + TOTAL_LIMIT,
        }
    }

    async fn unmount(&self, what: &'static str, path: &Path) {
        // `work` is a link; a container that was never created has no state.
        if let Ok(path) = path.canonicalize() {
            self.attempt(what, STEP_LIMIT, unmount_recursive(&path)).await;
        }
    }

    async fn put_huge_pages_back(&self) {
        let recovered = async {
            huge_pages::recover().await;
            Ok::<(), Infallible>(())
        };
        let what = "put the host's huge pages back";
        self.attempt(what, KILL_LIMIT, recovered).await;
    }

    async fn write_history(&self, bundle: &Path) {
        let written = async {
            history::write_killed(&HistoryDir::default(), bundle).await;
            Ok::<(), Infallible>(())
        };
        self.attempt("write the history", KILL_LIMIT, written).await;
    }

    async fn attempt<T, E: std::error::Error>(
        &self,
        what: &str,
        limit: Duration,
        step: impl Future<Output = Result<T, E>>,
    ) {
        let limit = limit.min(self.end.saturating_duration_since(Instant::now()));
        match tokio::time::timeout(limit, step).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => log::warn!("cannot {what}: {}", Chain(&error)),
            Err(_) => log::warn!("cannot {what}: not done within {limit:?}"),
        }
    }
}

/// A shim that was killed leaves its socket; `start` would replace it, but may never come.
fn remove_dead_socket(bundle: &Path) {
    let Some(address) = address(bundle) else { return };
    let Some(path) = address.trim().strip_prefix("unix://").map(Path::new) else {
        return;
    };
    if !fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        return;
    }
    if let Err(error) = bootstrap::remove_dead_socket(path) {
        log::warn!("{}", Chain(&error));
    }
}

/// Where the shim listened: the file that it wrote itself, or (the stock shim writes none any more)
/// containerd's.
fn address(bundle: &Path) -> Option<String> {
    if let Ok(address) = fs::read_to_string(bundle.join("address")) {
        return Some(address);
    }
    let json = fs::read(bundle.join("bootstrap.json")).ok()?;
    let params: serde_json::Value = serde_json::from_slice(&json).ok()?;
    Some(params.get("address")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn args(line: &str) -> Args {
        Args::parse(line.split(' ').map(OsString::from)).unwrap()
    }

    #[test]
    fn the_bundle_is_the_given_one_or_a_sibling() {
        let given = args("-namespace n -id c1 -bundle /run/b/c1 delete");
        assert_eq!(bundle(&given).unwrap(), Path::new("/run/b/c1"));
        let here = std::env::current_dir().unwrap();
        let sibling = bundle(&args("-namespace n -id c2 delete")).unwrap();
        assert_eq!(sibling, here.parent().unwrap().join("c2"));
    }

    #[test]
    fn a_cgroup_that_others_may_share_is_not_killed() {
        let bundle = tempfile::tempdir().unwrap();
        let args = args("-namespace n -id c1 delete");
        // The root of every hierarchy exists on any host; only the name shows whose it is.
        for path in ["/", "", "/shared", "/c1/other", "system.slice:runc:other"] {
            let spec = serde_json::json!({"linux": {"cgroupsPath": path}});
            fs::write(bundle.path().join("config.json"), spec.to_string()).unwrap();
            assert_eq!(
                own_cgroup(&args, bundle.path(), &RuncOptions::default()),
                None,
                "{path:?}"
            );
        }
    }

    #[test]
    fn sockets_of_dead_shims_go_and_those_of_living_ones_stay() {
        let bundle = tempfile::tempdir().unwrap();
        let (dead, alive) = (bundle.path().join("dead"), bundle.path().join("alive"));
        drop(UnixListener::bind(&dead).unwrap());
        let _owner = UnixListener::bind(&alive).unwrap();
        let bootstrap = serde_json::json!({"version": 3, "address": format!("unix://{}", dead.display())});
        fs::write(bundle.path().join("bootstrap.json"), bootstrap.to_string()).unwrap();
        remove_dead_socket(bundle.path());
        assert!(!dead.exists());
        for file in [&alive, &bundle.path().join("bootstrap.json")] {
            fs::write(
                bundle.path().join("address"),
                format!("unix://{}", file.display()),
            )
            .unwrap();
            remove_dead_socket(bundle.path());
            assert!(file.exists(), "{}", file.display());
        }
    }
}
