//! The calls of containerd's API that firn's commands need. The messages are those of [`firn_containerd`].

mod called;
mod containers;
mod content;
mod events;
#[cfg(test)]
pub mod fake;
mod images;
mod leases;
pub mod process;
mod snapshots;
mod tasks;
mod upload;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use firn_containerd::snapshots::{MountsResponse, SnapshotName};
use firn_containerd::tasks::{self as task_calls, status};
use firn_containerd::{Message, containers as container_calls, snapshots as snapshot_calls};
use firn_host::UnlessAbsent;
use futures_util::Stream;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::AsciiMetadataValue;
use tonic::metadata::errors::InvalidMetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

pub use called::{NERDCTL_STATE, bundles_called, is_id};
pub use containers::ContainerSpec;
pub use content::next;
pub use events::{Phase, Phases};
pub use firn_containerd::containers::{Container, Runtime};
pub use firn_containerd::images::Image;
pub use firn_containerd::tasks::CreateRequest as CreateTask;
pub use firn_containerd::{Any, Descriptor, Mount};
pub use snapshots::Snapshot;
pub use tasks::{Task, TaskState};

/// Directory of the shims' bundles below containerd's state directory: NAMESPACE/ID.
pub const BUNDLES: &str = "io.containerd.runtime.v2.task";

/// Bundles of containerd's containers, in all namespaces. containerd makes their directory when it starts.
pub fn bundles(state: &Path) -> io::Result<Vec<PathBuf>> {
    let mut bundles = Vec::new();
    for namespace in directories(&state.join(BUNDLES))? {
        // Unless its last container ends meanwhile.
        bundles.extend(directories(&namespace).if_present()?.unwrap_or_default());
    }
    bundles.sort();
    Ok(bundles)
}

fn directories(of: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(of)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// How long containerd may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(10);

/// How many bytes of an answer may be under way.
const WINDOW: u32 = 8 << 20;

/// Where the container is.
#[derive(Clone, Debug, clap::Args)]
pub struct ContainerdArgs {
    /// Namespace of the container in containerd.
    #[arg(long, short, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    pub namespace: String,
    #[command(flatten)]
    pub socket: Socket,
}

/// The option that names containerd's socket.
#[derive(Clone, Debug, clap::Args)]
pub struct Socket {
    /// containerd's socket; that of k3s is /run/k3s/containerd/containerd.sock.
    #[arg(
        long,
        short,
        value_name = "SOCKET",
        env = "CONTAINERD_ADDRESS",
        default_value = "/run/containerd/containerd.sock"
    )]
    pub address: PathBuf,
}

/// containerd cannot be reached, or has refused.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("cannot connect to containerd at {}", socket.display())]
    Connect {
        socket: PathBuf,
        source: tonic::transport::Error,
    },
    #[error("the namespace {namespace:?} cannot be sent")]
    Namespace {
        namespace: String,
        source: InvalidMetadataValue,
    },
    #[error("containerd's {call} failed: {}", status.message())]
    Call { call: &'static str, status: Box<Status> },
}

impl CallError {
    /// Whether what was asked for is not there.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Call { status, .. } if status.code() == Code::NotFound)
    }

    /// Whether firn's shim has refused what was asked for, before it touched anything.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Call { status, .. }
            if matches!(status.code(), Code::FailedPrecondition | Code::InvalidArgument)
                && status.message().contains("FIRN-"))
    }

    /// Whether the connection has ended before the answer came: what was asked for may be under way or done.
    pub fn is_lost(&self) -> bool {
        let Self::Call { status, .. } = self else {
            return false;
        };
        // What containerd answers has no cause here.
        std::error::Error::source(&**status).is_some()
            || matches!(status.code(), Code::Unavailable | Code::Cancelled)
    }

    /// A removal of what somebody else has removed is done: a client that is attached to a task deletes it as
    /// soon as it ends.
    pub fn allow_absent(result: Result<(), Self>) -> Result<(), Self> {
        match result {
            Err(error) if error.is_absent() => Ok(()),
            result => result,
        }
    }

    /// Whether what was to be made is there.
    pub fn is_there(&self) -> bool {
        matches!(self, Self::Call { status, .. } if status.code() == Code::AlreadyExists)
    }
}

/// Makes calls from a program that is not asynchronous.
pub fn block_on<T>(calls: impl Future<Output = T>) -> io::Result<T> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    Ok(runtime.enable_all().build()?.block_on(calls))
}

/// A connection, for one namespace.
pub struct Containerd {
    channel: Channel,
    namespace: AsciiMetadataValue,
    /// Keeps what is made by the calls.
    lease: Option<AsciiMetadataValue>,
}

impl Containerd {
    pub async fn connect(socket: &Path, namespace: &str) -> Result<Self, CallError> {
        let value = namespace_value(namespace)?;
        let path = socket.to_owned();
        let dial = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // Not looked at: the connection is a socket's.
        let endpoint = Endpoint::from_static("http://containerd")
            .connect_timeout(CONNECT)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        let channel = endpoint.connect_with_connector(dial).await;
        Ok(Self {
            channel: channel.map_err(|source| CallError::Connect {
                socket: socket.to_owned(),
                source,
            })?,
            namespace: value,
            lease: None,
        })
    }

    pub async fn container(&self, id: &str) -> Result<Container, CallError> {
        let got: container_calls::GetResponse = self.call(container_calls::GET, id.to_owned()).await?;
        Ok(got.container.unwrap_or_default())
    }

    pub async fn create_container(&self, container: Container) -> Result<(), CallError> {
        let container = Some(container);
        let request = container_calls::CreateRequest { container };
        self.call(container_calls::CREATE, request).await
    }

    pub async fn delete_container(&self, id: &str) -> Result<(), CallError> {
        self.call(container_calls::DELETE, id.to_owned()).await
    }

    /// The containers of the connection's namespace.
    pub async fn containers(&self) -> Result<Vec<Container>, CallError> {
        self.list(Vec::new()).await
    }

    /// The containers with this label.
    pub async fn with_label(&self, name: &str, value: &str) -> Result<Vec<Container>, CallError> {
        self.list(vec![format!("labels.{name:?}=={value:?}")]).await
    }

    async fn list(&self, filters: Vec<String>) -> Result<Vec<Container>, CallError> {
        let request = container_calls::ListRequest { filters };
        let listed: container_calls::ListResponse = self.call(container_calls::LIST, request).await?;
        Ok(listed.containers)
    }

    /// Ids of the containers whose tasks run or are paused.
    pub async fn running(&self) -> Result<Vec<String>, CallError> {
        let listed: task_calls::ListResponse = self.call(task_calls::LIST, ()).await?;
        let running = listed
            .tasks
            .into_iter()
            .filter(|task| [status::RUNNING, status::PAUSED].contains(&task.status));
        Ok(running.map(|task| task.id).collect())
    }

    /// What has to be mounted for a container's root file system.
    pub async fn mounts(&self, container: &Container) -> Result<Vec<Mount>, CallError> {
        if container.snapshot_key.is_empty() {
            return Ok(Vec::new());
        }
        let request = SnapshotName {
            snapshotter: container.snapshotter.clone(),
            key: container.snapshot_key.clone(),
        };
        let got: MountsResponse = self.call(snapshot_calls::MOUNTS, request).await?;
        Ok(got.mounts)
    }

    /// Gives the pid of its init; 0 as long as there is none.
    pub async fn create(&self, task: CreateTask) -> Result<u32, CallError> {
        let created: task_calls::CreateResponse = self.call(task_calls::CREATE, task).await?;
        Ok(created.pid)
    }

    /// Gives the pid of its init.
    pub async fn start(&self, id: &str) -> Result<u32, CallError> {
        self.call(task_calls::START, id.to_owned()).await
    }

    /// Hands annotations to the shim.
    pub async fn annotate(&self, id: &str, annotations: HashMap<String, String>) -> Result<(), CallError> {
        let request = task_calls::UpdateRequest {
            container_id: id.to_owned(),
            // Always sent, and empty: a shim that looks for limits here finds none, and fails.
            resources: Some(Any::default()),
            annotations,
        };
        self.call(task_calls::UPDATE, request).await
    }

    pub async fn delete(&self, id: &str) -> Result<(), CallError> {
        self.call(task_calls::DELETE, id.to_owned()).await
    }

    /// The same connection, for another namespace.
    pub fn for_namespace(&self, namespace: &str) -> Result<Self, CallError> {
        Ok(Self {
            channel: self.channel.clone(),
            namespace: namespace_value(namespace)?,
            lease: None,
        })
    }

    async fn call<Q, A>(&self, call: &'static str, message: Q) -> Result<A, CallError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (mut grpc, path) = (self.ready(call).await?, PathAndQuery::from_static(call));
        let answer = grpc
            .unary(self.request(message), path, ProstCodec::default())
            .await;
        Ok(answer.map_err(failed(call))?.into_inner())
    }

    async fn stream<Q, A>(&self, call: &'static str, message: Q) -> Result<Streaming<A>, CallError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (mut grpc, path) = (self.ready(call).await?, PathAndQuery::from_static(call));
        let answer = grpc
            .server_streaming(self.request(message), path, ProstCodec::default())
            .await;
        Ok(answer.map_err(failed(call))?.into_inner())
    }

    /// A call to which messages go while it answers.
    async fn converse<Q, A>(
        &self,
        call: &'static str,
        messages: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<A>, CallError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (mut grpc, path) = (self.ready(call).await?, PathAndQuery::from_static(call));
        let answer = grpc
            .streaming(self.request(messages), path, ProstCodec::default())
            .await;
        Ok(answer.map_err(failed(call))?.into_inner())
    }

    async fn ready(&self, call: &'static str) -> Result<Grpc<Channel>, CallError> {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(content::MAX_ANSWER);
        let ready = grpc.ready().await;
        ready.map_err(|error| failed(call)(Status::unavailable(error.to_string())))?;
        Ok(grpc)
    }

    fn request<Q>(&self, message: Q) -> Request<Q> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        metadata.insert("containerd-namespace", self.namespace.clone());
        if let Some(lease) = &self.lease {
            metadata.insert("containerd-lease", lease.clone());
        }
        request
    }
}

fn namespace_value(namespace: &str) -> Result<AsciiMetadataValue, CallError> {
    namespace.parse().map_err(|source| CallError::Namespace {
        namespace: namespace.to_owned(),
        source,
    })
}

fn failed(call: &'static str) -> impl FnOnce(Status) -> CallError {
    move |status| CallError::Call {
        call: call.rsplit('.').next().unwrap_or(call),
        status: Box::new(status),
    }
}
