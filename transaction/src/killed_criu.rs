//! A container whose CRIU was killed in a dump: its TCP sockets are in repair mode, rules of the packet
//! filter drop what it receives, and links that CRIU has made of files are left. firn-hook ends all that, in
//! a process of its own, because it enters the container's network namespace, runs iptables, and looks at
//! directories of the container.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use firn_config::{Config, find_program, names};
use firn_host::Chain;

use crate::cancel::CancellationToken;
use crate::container::Container;
use crate::reaper::Reaper;
use crate::warn::OrWarn;

/// CRIU's log of a dump in its work directory.
pub(crate) const DUMP_LOG: &str = "dump.log";

/// How long it may take while the container waits.
const LIMIT: Duration = Duration::from_secs(10);

/// The same once the container is killed: only what others share matters then.
pub const LIMIT_KILLED: Duration = Duration::from_millis(1500);

/// Releases a container whose dump has the log `log`. Does nothing after a CRIU that has released it. May be
/// repeated.
pub(crate) async fn release(container: &Container, log: &Path, cancel: &CancellationToken, reaper: &Reaper) {
    let limit = match cancel.is_cancelled() {
        true => LIMIT_KILLED,
        false => LIMIT,
    };
    let init = container.init.pid();
    let mut pids = container
        .cgroup()
        .and_then(|cgroup| cgroup.pids())
        .unwrap_or_default();
    // Init first: its network namespace is the container's.
    pids.sort_unstable_by_key(|pid| *pid != init);
    release_of(&container.bundle, log, &pids, limit, reaper).await;
}

/// The same of the container in `bundle` with these processes, which may have ended.
pub async fn release_of(bundle: &Path, log: &Path, pids: &[i32], limit: Duration, reaper: &Reaper) {
    let config = Config::load().or_log().unwrap_or_default();
    let Some(hook) = find_program(names::HOOK_PROGRAM, config.hook.path.as_deref()).or_log() else {
        return;
    };
    let mut command = Command::new(hook);
    command.arg("release").args([bundle, log]);
    command.args(pids.iter().map(ToString::to_string));
    let output = reaper.output(&mut command, limit).await;
    let output = output.map_err(|error| Chain(&error).to_string());
    if let Err(error) = output.and_then(|output| output.printed()) {
        let bundle = bundle.display();
        log::warn!(
            "connections of the container in {bundle} may hang, and files link_remap.N may be left: {error}"
        );
    }
}
