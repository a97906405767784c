//! The shim process proper: one thread that serves the task API on the listener which `start` made.
//!
//! Life: adopt the listener, become the subreaper, log to containerd, serve, wait for the Shutdown RPC or a
//! signal, then end in order: the socket disappears (a new `start` makes its own shim instead of finding a
//! dying one), no more connections, events to containerd, answers under way, the history. All of that within
//! [`SHUTDOWN_LIMIT`].
//!
//! The service is served under both of its names, `containerd.task.v2.Task` and `containerd.task.v3.Task`,
//! which are the same on the wire: whichever a daemon of whatever age has on record for this shim, it is
//! understood.

mod accept;

use std::collections::HashMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::shim_async::{Task, create_task};
use firn_host::FileId;
use firn_process::cancel::CancellationToken;
use firn_process::reaper::Reaper;
use firn_process::sys;
use nix::sys::prctl;
use nix::unistd::geteuid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, timeout};
use ttrpc::r#async::Server;

use crate::action_io::runtime;
use crate::args::Args;
use crate::bootstrap::{LISTENER_FD, env};
use crate::error::{ActionError, failed, failed_at};
use crate::events::Publisher;
use crate::history::History;
use crate::logger;
use firn_transaction::history::HistoryDir;

/// The fifo in the bundle that containerd reads.
const LOG_FIFO: &str = "log";
/// How long the shim may take to end.
pub const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Part of it that is kept for connections after the events.
const DISCONNECT_LIMIT: Duration = Duration::from_secs(1);

/// What the task service works with.
pub struct Context {
    /// containerd namespace of all containers of this shim.
    pub namespace: String,
    /// containerd's gRPC socket, a path or `unix://` and a path.
    pub address: String,
    /// Reaps every process of this shim.
    pub reaper: Reaper,
    /// Takes the events.
    pub publisher: Publisher,
    /// Takes the transactions that have ended.
    pub history: Arc<History>,
    /// Cancelled to end the shim.
    pub serving: CancellationToken,
}

/// Runs the shim until it is asked to end. `service` makes the task service inside the runtime.
pub fn run(
    args: &Args,
    service: impl FnOnce(Context) -> Arc<dyn Task + Send + Sync>,
) -> Result<(), ActionError> {
    let listener = match &args.socket {
        Some(path) => UnixListener::bind(path).map_err(failed_at("listen on", path))?,
        None => adopt(LISTENER_FD)?,
    };
    prctl::set_child_subreaper(true).map_err(failed("become the subreaper"))?;
    // A shim that is run by hand has no fifo and keeps its terminal.
    if Path::new(LOG_FIFO).exists() {
        logger::redirect_stderr(Path::new(LOG_FIFO)).map_err(failed("open the log fifo"))?;
    }
    let fields = format!(
        "id={} namespace={} pid={}",
        args.id,
        args.namespace,
        std::process::id()
    );
    logger::init(args.debug, fields).expect("the logger is set once per process");

    let runtime = runtime()?;
    let served = runtime.block_on(async {
        let publisher = Publisher::new(&env::ttrpc_address(), &args.namespace);
        let serving = CancellationToken::default();
        let history = Arc::new(History::new(HistoryDir::default()));
        let service = service(Context {
            namespace: args.namespace.clone(),
            address: args.address.clone(),
            reaper: Reaper::start().map_err(failed("watch for child processes"))?,
            publisher: publisher.clone(),
            history: history.clone(),
            serving: serving.clone(),
        });
        handle_signals(serving.clone())?;
        serve(listener, service, &serving, &publisher, &history).await
    });
    // A stuck blocking call must not keep a shim alive that has ended its service.
    runtime.shutdown_background();
    served
}

/// Serves until `serving` is cancelled, then ends in order.
pub async fn serve(
    listener: UnixListener,
    service: Arc<dyn Task + Send + Sync>,
    serving: &CancellationToken,
    publisher: &Publisher,
    history: &History,
) -> Result<(), ActionError> {
    let socket = SocketFile::of(&listener);
    let listener = accept::listener(listener, geteuid()).map_err(failed("watch the listener"))?;
    let mut services = create_task(service.clone());
    for table in create_task(service).into_values() {
        services.insert("containerd.task.v2.Task".to_owned(), table);
    }
    // A service that daemons ask for and that is not here: without a name of its own it would be an invalid
    // argument instead of an unimplemented method.
    let absent = ttrpc::r#async::Service {
        methods: HashMap::new(),
        streams: HashMap::new(),
    };
    services.insert("containerd.runtime.sandbox.v1.Sandbox".to_owned(), absent);
    let mut server = Server::new().add_listener(listener).register_service(services);
    server.start().await.map_err(ActionError::Serve)?;
    log::debug!("serving");

    serving.cancelled().await;
    let ending = Instant::now();
    // Order matters: see the module head.
    socket.remove();
    server.stop_listen().await;
    let limit = SHUTDOWN_LIMIT - DISCONNECT_LIMIT;
    if !publisher.flush(limit).await {
        log::error!("not all events were delivered to containerd within {limit:?}");
    }
    // Calls that wait for a container that will never exit do not hold up the end.
    if timeout(DISCONNECT_LIMIT, server.disconnect()).await.is_err() {
        log::warn!("ending with calls unanswered");
    }
    // Order matters: transactions that have just been answered are written, too.
    let limit = ending + SHUTDOWN_LIMIT - Instant::now();
    if !history.flush(limit).await {
        log::warn!("not all transactions were written into the history within {limit:?}");
    }
    Ok(())
}

fn adopt(fd: i32) -> Result<UnixListener, ActionError> {
    let adopted = || {
        let listener = UnixListener::from(sys::take_inherited(fd)?);
        // Fails on anything but a unix socket.
        listener.local_addr().map(|_| listener)
    };
    adopted().map_err(|source| ActionError::Listener { fd, source })
}

/// SIGTERM and SIGINT end the shim and leave its containers alone, SIGUSR1 logs its number of tasks.
fn handle_signals(serving: CancellationToken) -> Result<(), ActionError> {
    let listen = |kind| signal(kind).map_err(failed("watch for signals"));
    let (mut term, mut int) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let mut usr1 = listen(SignalKind::user_defined1())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = term.recv() => serving.cancel(),
                _ = int.recv() => serving.cancel(),
                _ = usr1.recv() => {
                    let metrics = tokio::runtime::Handle::current().metrics();
                    log::info!("{} tasks alive", metrics.num_alive_tasks());
                }
            }
        }
    });
    Ok(())
}

/// The listener's file, and which file it was: another shim may have put its own there since.
struct SocketFile(Option<(PathBuf, FileId)>);

impl SocketFile {
    fn of(listener: &UnixListener) -> Self {
        let found = || {
            let address = listener.local_addr().ok()?;
            let path = address.as_pathname()?;
            Some((path.to_owned(), identity(path)?))
        };
        Self(found())
    }

    fn remove(&self) {
        let Some((path, file)) = &self.0 else { return };
        if identity(path) == Some(*file)
            && let Err(error) = fs::remove_file(path)
        {
            log::warn!("cannot remove {}: {error}", path.display());
        }
    }
}

fn identity(path: &Path) -> Option<FileId> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some(FileId::of(&metadata))
}

#[cfg(test)]
mod tests;
