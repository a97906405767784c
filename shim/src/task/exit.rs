//! Exits of container processes: who ended, in which order exits are published, and out-of-memory events
//! before them.

use firn_host::Absent;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use containerd_shim_protos::events::task::{TaskExit, TaskOOM};
use firn_process::cgroup::CgroupError;
use firn_process::reaper::Exit;
use tokio::sync::mpsc::UnboundedReceiver;

use super::state::{exited_at, id_of, pid_field};
use super::{SIGKILL, Service};
use firn_host::Chain;
use firn_transaction::container::{Container, Expectation, InitState, Owner, Process};
use firn_transaction::runc::RuncError;

/// Handles exits for as long as the shim lives.
pub(super) async fn handle_all(service: Arc<Service>, mut exits: UnboundedReceiver<Exit>) {
    while let Some(exit) = exits.recv().await {
        for owner in service.exits.take(&exit) {
            handle(&service, &owner, exit);
        }
    }
}

/// Has the exit of a process that was started handled, also if it has ended already.
pub(super) fn claim(
    service: &Arc<Service>,
    expectation: Expectation<Owner>,
    container: &Arc<Container>,
    process: &Arc<Process>,
) {
    let owner = Owner {
        container: Arc::downgrade(container),
        process: process.clone(),
    };
    if let Some(early) = expectation.claim(process.pid(), owner.clone()) {
        handle(service, &owner, early);
    }
}

/// One process has ended. Init's exit is published last: a client that sees it may delete the container.
fn handle(service: &Arc<Service>, owner: &Owner, exit: Exit) {
    let Some(container) = owner.container.upgrade() else {
        return;
    };
    if !owner.process.exec_id.is_empty() {
        publish(service, &container, &owner.process, exit);
        exec_ended(service, &container);
        return;
    }
    if let Some(exit) = container.keep_while_starting(exit) {
        init_exited(service, &container, exit);
    }
}

/// How long the answer to a call that has ended init may hold back the news.
const ANSWER: Duration = Duration::from_secs(2);

/// Init has ended. What it left in the container goes with it.
pub(super) fn init_exited(service: &Arc<Service>, container: &Arc<Container>, exit: Exit) {
    container.set_init_gone();
    if container.traits.by_firn() {
        // The runtime's own dump of a container without GPUs ends it by itself.
        drop(container.transaction.cancel());
    }
    let was = container.state();
    // What is frozen does not end, and the runtime does not delete it.
    let is_frozen = matches!(
        was,
        InitState::Paused | InitState::Pausing | InitState::Parked | InitState::Suspended
    );
    if container.traits.private_pids && !is_frozen && !container.is_being_killed() {
        init_gone(service, container, exit);
        return;
    }
    // Concurrent with the handling of other exits: each of these may take its time.
    let (service, container) = (service.clone(), container.clone());
    tokio::spawn(async move {
        if !container.traits.private_pids {
            log_unless_gone(&container, container.runc.kill(SIGKILL, true).await);
        }
        if is_frozen {
            // Not by the runtime's resume: it first waits until all is frozen, with cgroup v2 for up to 10 s,
            // which may not come to be while processes end.
            drop(container.take_held());
            container.free_pieces();
            thaw(&container).await;
        }
        container.is_killed(ANSWER).await;
        init_gone(&service, &container, exit);
    });
}

/// A restore was cut off by who has the client's word that the container ends. There was no init that could
/// have run, but whoever waits for its end has to hear of one.
pub(super) async fn restore_killed(service: &Service, container: &Container) {
    container.set_init_gone();
    container.init.begin();
    container.is_killed(ANSWER).await;
    let exit = Exit {
        pid: 0,
        code: 128 + SIGKILL,
        at: SystemTime::now(),
    };
    init_ended(service, container, exit);
}

/// How long the freezer of a container may take whose init has ended.
const THAW: Duration = Duration::from_secs(10);

/// Turns off the freezer, of which the runtime need not know.
async fn thaw(container: &Container) {
    let thawed = async { container.cgroup()?.thaw(THAW).await };
    if let Err(error) = thawed.await
        && !error.is_absent()
    {
        log::warn!("cannot thaw {}: {}", container.id, Chain(&error));
    }
}

/// Logs that the processes could not be killed that init has left. It is no failure if there are none.
fn log_unless_gone(container: &Container, killed: Result<(), RuncError>) {
    if let Err(error) = killed
        && !error.is_finished()
        && !error.is_absent()
    {
        log::warn!(
            "cannot end the processes that {} left: {}",
            container.id,
            Chain(&error)
        );
    }
}

fn init_gone(service: &Service, container: &Container, exit: Exit) {
    if let Some(exit) = container.end_init(exit) {
        init_ended(service, container, exit);
    }
}

/// An exec is over (or never began): publishes init's exit when that was waiting for it.
pub(super) fn exec_ended(service: &Arc<Service>, container: &Arc<Container>) {
    if let Some(exit) = container.end_exec() {
        init_ended(service, container, exit);
    }
}

fn init_ended(service: &Service, container: &Container, exit: Exit) {
    container.set_state(InitState::Stopped);
    publish(service, container, &container.init, exit);
}

fn publish(service: &Service, container: &Container, process: &Process, exit: Exit) {
    // Order matters: a client that sees an exit of 137 looks for the reason among the events before it.
    if container.oom.get().is_some_and(|watch| watch.take()) {
        publish_oom(service, &container.id);
    }
    process.set_exit(exit);
    service.publisher.publish(&TaskExit {
        container_id: container.id.clone(),
        id: id_of(container, process).to_owned(),
        pid: pid_field(exit.pid),
        exit_status: exit.code,
        exited_at: exited_at(Some(&exit)),
        ..TaskExit::default()
    });
}

/// Publishes an event whenever the kernel kills a process of the container for lack of memory.
pub(super) fn watch_oom(service: &Arc<Service>, container: &Arc<Container>) {
    if container.init.pid() == 0 {
        return;
    }
    let watch = container.cgroup().and_then(|cgroup| cgroup.watch_oom());
    let watch = match watch {
        Ok(watch) => Arc::clone(container.oom.get_or_init(|| Arc::new(watch))),
        // Nothing is wrong with a container of a host that accounts no memory.
        Err(error @ CgroupError::NoMemory) => {
            return log::debug!("no OOM events for {}: {}", container.id, Chain(&error));
        }
        Err(error) => return log::warn!("no OOM events for {}: {}", container.id, Chain(&error)),
    };
    let (service, id) = (service.clone(), container.id.clone());
    tokio::spawn(async move {
        while watch.recv().await.is_some() {
            publish_oom(&service, &id);
        }
    });
}

fn publish_oom(service: &Service, id: &str) {
    service.publisher.publish(&TaskOOM {
        container_id: id.to_owned(),
        ..TaskOOM::default()
    });
}

#[cfg(test)]
mod tests;
