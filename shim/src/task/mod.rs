//! The task service: one file per verb, each a function over [`Service`].
//!
//! ttrpc drops a handler when its client goes away or its deadline passes, so every verb runs in a task of
//! its own and the handler only waits for it: nothing is left half done by a client.

mod checkpoint;
mod commands;
mod create;
mod delete;
mod error;
mod exec;
mod exit;
mod kill;
mod moves;
mod pause;
mod pod;
mod start;
mod state;
#[cfg(test)]
mod stub;
mod update;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use containerd_shim_protos::api::{
    CheckpointTaskRequest, CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest,
    CreateTaskResponse, DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest,
    PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest, StartResponse,
    StateRequest, StateResponse, StatsRequest, StatsResponse, UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::shim_async::Task;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use ttrpc::r#async::TtrpcContext;

pub(crate) use create::INIT_PID;
pub(crate) use error::TaskError;
pub(crate) use state::pid_field;

use firn_process::cancel::CancellationToken;
use firn_process::reaper::Reaper;

use crate::daemon;
use crate::events::Publisher;
use crate::history::History;
use crate::server::Context;
use firn_host::Chain;
use firn_transaction::container::{Container, Exits};
use firn_transaction::journal::Operation;
use firn_transaction::recording::{self, Recording};

/// SIGKILL as the protocol numbers signals.
const SIGKILL: u32 = 9;

/// Everything that the verbs share.
pub(crate) struct Service {
    namespace: String,
    /// containerd's gRPC socket.
    address: String,
    reaper: Reaper,
    publisher: Publisher,
    /// Gets the container's transactions when they have ended.
    history: Arc<History>,
    exits: Exits,
    /// Cancelled to end the shim.
    serving: CancellationToken,
    containers: Mutex<BTreeMap<String, Slot>>,
    /// Checkpoints of several containers that are in progress.
    pods: Mutex<Vec<Arc<pod::Progress>>>,
}

/// A transaction in progress.
struct Transaction {
    recording: Arc<Recording>,
    /// The name of the container's image. It is read meanwhile: the container may be gone at the end.
    image: JoinHandle<String>,
}

/// A container id that is in use.
enum Slot {
    /// Create is under way; the id is taken. Whoever cancels it ends what it waits for.
    Reserved(CancellationToken),
    /// As before, but the client has asked to delete it: nobody waits for it any more.
    Cancelled,
    Ready(Arc<Container>),
}

impl Service {
    /// A service without containers; exits are handled from now on.
    pub(crate) fn start(context: Context) -> Arc<Self> {
        let service = Arc::new(Self {
            namespace: context.namespace,
            address: context.address,
            reaper: context.reaper,
            publisher: context.publisher,
            history: context.history,
            exits: Exits::default(),
            serving: context.serving,
            containers: Mutex::new(BTreeMap::new()),
            pods: Mutex::default(),
        });
        tokio::spawn(exit::handle_all(service.clone(), service.reaper.subscribe()));
        service
    }

    fn container(&self, id: &str) -> Result<Arc<Container>, TaskError> {
        match self.containers().get(id) {
            Some(Slot::Ready(container)) => Ok(container.clone()),
            Some(Slot::Reserved(_) | Slot::Cancelled) | None => Err(TaskError::NoContainer),
        }
    }

    /// Begins a transaction of a container.
    fn begin(&self, operation: Operation, container: &str) -> Transaction {
        let image = daemon::image(&self.address, &self.namespace, container);
        Transaction {
            recording: recording::begin(operation, container, &self.namespace),
            image: tokio::spawn(image),
        }
    }

    /// Ends a transaction: publishes its result, if it was firn's own, and has it written into the history.
    /// Returns the result.
    fn end<T>(
        &self,
        container: &Container,
        transaction: Transaction,
        result: Result<T, TaskError>,
    ) -> Result<T, TaskError> {
        let failure = result.as_ref().err();
        let outcome = transaction.recording.outcome(container, failure.is_none());
        let code = match failure {
            None => Ok(()),
            Some(error) => Err(error.of_firn()),
        };
        self.end_as(container.traits.by_firn(), transaction, outcome, code);
        result
    }

    /// As [`Service::end`], by the outcome and the code of the error.
    fn end_as(
        &self,
        publishes: bool,
        Transaction { recording, image }: Transaction,
        outcome: &'static str,
        result: Result<(), Option<String>>,
    ) {
        let code = result.clone().err().flatten();
        if publishes {
            let operation = recording.operation.name();
            self.publisher
                .publish_end(&recording.container, operation, result);
        }
        let image = async { image.await.unwrap_or_default() };
        let log = recording.take_log();
        self.history.write(recording.entry(outcome, code), log, image);
    }

    /// Notes that a container which is being made is not wanted any more.
    fn cancel_create(&self, id: &str) {
        if let Some(slot) = self.containers().get_mut(id)
            && let Slot::Reserved(cancel) = slot
        {
            cancel.cancel();
            *slot = Slot::Cancelled;
        }
    }

    fn is_cancelled(&self, id: &str) -> bool {
        matches!(self.containers().get(id), Some(Slot::Cancelled))
    }

    /// Whether there is a container, or one being made, that somebody wants.
    fn is_used(&self) -> bool {
        let containers = self.containers();
        containers.values().any(|slot| !matches!(slot, Slot::Cancelled))
    }

    fn containers(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The service as ttrpc calls it.
pub(crate) struct TaskService(pub(crate) Arc<Service>);

/// Runs a verb to its end whatever becomes of the caller.
async fn detached<T: Send + 'static>(
    verb: &'static str,
    work: impl Future<Output = Result<T, TaskError>> + Send + 'static,
) -> ttrpc::Result<T> {
    let (send, done) = oneshot::channel();
    // Boxed for the reason that `blocking` boxes its work.
    let work: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(async move {
        let done = work.await;
        if let Err(error) = &done {
            log::info!("{verb}: {}", Chain(error));
        }
        drop(send.send(done));
    });
    let panic = tokio::spawn(recording::within_call(work)).await;
    match done.await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => {
            if let Err(panic) = panic {
                log::error!("{verb}: {panic}");
            }
            Err(ttrpc::Error::RpcStatus(ttrpc::get_status(
                ttrpc::Code::INTERNAL,
                format!("{verb} panicked"),
            )))
        }
    }
}

macro_rules! verbs {
    ($($verb:ident($request:ty) -> $response:ty = $function:path;)*) => {
        #[async_trait]
        impl Task for TaskService {
            $(async fn $verb(&self, _: &TtrpcContext, request: $request) -> ttrpc::Result<$response> {
                let service = self.0.clone();
                detached(stringify!($verb), async move { $function(&service, request).await }).await
            })*
        }
    };
}

verbs! {
    state(StateRequest) -> StateResponse = state::state;
    create(CreateTaskRequest) -> CreateTaskResponse = create::create;
    start(StartRequest) -> StartResponse = start::start;
    delete(DeleteRequest) -> DeleteResponse = delete::delete;
    pids(PidsRequest) -> PidsResponse = state::pids;
    pause(PauseRequest) -> Empty = pause::pause;
    resume(ResumeRequest) -> Empty = pause::resume;
    checkpoint(CheckpointTaskRequest) -> Empty = checkpoint::checkpoint;
    kill(KillRequest) -> Empty = kill::kill;
    exec(ExecProcessRequest) -> Empty = exec::exec;
    resize_pty(ResizePtyRequest) -> Empty = exec::resize_pty;
    close_io(CloseIORequest) -> Empty = exec::close_io;
    update(UpdateTaskRequest) -> Empty = update::update;
    wait(WaitRequest) -> WaitResponse = state::wait;
    stats(StatsRequest) -> StatsResponse = state::stats;
    connect(ConnectRequest) -> ConnectResponse = state::connect;
    shutdown(ShutdownRequest) -> Empty = delete::shutdown;
}
