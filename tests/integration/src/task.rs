//! A shim's task service, called as containerd calls it.

mod exec;

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context, Result};
use containerd_shim_protos::api::{
    CheckpointTaskRequest, ConnectRequest, ConnectResponse, Empty, KillRequest, StateRequest, StateResponse,
    WaitRequest, WaitResponse,
};
use containerd_shim_protos::protobuf::MessageField;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::shim::oci::CheckpointOptions;
use protobuf::Message;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use ttrpc::asynchronous::Client;

use crate::{BUNDLES, GpuHost};

/// Names of the task service, by the version that the shim has reported to its daemon.
const SERVICES: [&str; 2] = ["containerd.task.v2.Task", "containerd.task.v3.Task"];

/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(100);

/// A connection to the shim of a container.
pub struct Task {
    client: Client,
    address: String,
    service: &'static str,
    id: String,
    // Last, so that the client's own tasks end before it.
    runtime: Runtime,
}

/// An answer that is on its way.
pub struct Pending<T>(JoinHandle<ttrpc::Result<T>>);

impl<T> Pending<T> {
    /// Whether it is there.
    pub fn is_there(&self) -> bool {
        self.0.is_finished()
    }
}

impl Task {
    /// Connects to the shim of a container as its daemon does, by what is written in its bundle.
    pub fn of(host: &GpuHost, id: &str) -> Result<Self> {
        let read = |name| host.node().read(format!("{BUNDLES}/{id}/{name}"));
        let bootstrap = read("bootstrap.json");
        let version = match &bootstrap {
            Ok(text) => serde_json::from_str::<Value>(text)?["version"].as_u64(),
            Err(_) => None,
        };
        let address = bootstrap
            .or_else(|_| read("address"))
            .with_context(|| format!("no address of the shim of {id}"))?;
        let path = address
            .split('"')
            .find_map(|part| part.strip_prefix("unix://"))
            .with_context(|| format!("no socket in {address:?}"))?;
        Self::connect(host, path, id, version.unwrap_or(2))
    }

    /// Connects to a shim's socket on the node, to call this version of its task service: 2 or 3.
    pub fn connect(host: &GpuHost, socket: &str, id: &str, version: u64) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let address = format!("unix://{}", host.node().path(socket).display());
        let client = runtime
            .block_on(Client::connect(&address))
            .with_context(|| format!("connect to {address}"))?;
        Ok(Self {
            client,
            address,
            service: SERVICES[usize::from(version == 3)],
            id: id.to_owned(),
            runtime,
        })
    }

    /// The same shim, to be asked for another container.
    pub fn with_id(self, id: &str) -> Self {
        Self {
            id: id.to_owned(),
            ..self
        }
    }

    /// Calls a method of the task service.
    pub fn call<Answer: Message>(&self, method: &str, request: &impl Message) -> ttrpc::Result<Answer> {
        self.call_of(self.service, method, request)
    }

    /// Calls a method of any service.
    pub fn call_of<Answer: Message>(
        &self,
        service: &str,
        method: &str,
        request: &impl Message,
    ) -> ttrpc::Result<Answer> {
        let call = call(service, method, request, LIMIT)?;
        self.runtime.block_on(answer(self.client.clone(), call))
    }

    /// Calls a method of the task service and continues before it has answered. The shim gets this time
    /// limit.
    pub fn begin<Answer: Message>(
        &self,
        method: &str,
        request: &impl Message,
        limit: Duration,
    ) -> ttrpc::Result<Pending<Answer>> {
        let call = call(self.service, method, request, limit)?;
        // A connection of its own: two threads that send on one may send in another order than they have
        // numbered.
        let client = self.runtime.block_on(Client::connect(&self.address))?;
        Ok(Pending(self.runtime.spawn(answer(client, call))))
    }

    /// As [`Task::begin`], and makes sure that the shim has taken the call before anything else is done.
    pub fn begin_known<Answer: Message>(
        &self,
        method: &str,
        request: &impl Message,
        limit: Duration,
    ) -> ttrpc::Result<Pending<Answer>> {
        let called = call(self.service, method, request, limit)?;
        // The shim takes the calls of a connection in their order: the answer to a second one shows that it
        // has the first.
        let second = call(self.service, "Connect", &ConnectRequest::new(), LIMIT)?;
        self.runtime.block_on(async {
            let client = Client::connect(&self.address).await?;
            let mut first = Box::pin(answer(client.clone(), called));
            // Sends it.
            let early = poll_fn(|context| Poll::Ready(first.as_mut().poll(context))).await;
            let pending = match early {
                Poll::Ready(answer) => self.runtime.spawn(std::future::ready(answer)),
                Poll::Pending => self.runtime.spawn(first),
            };
            let _known: ttrpc::Result<ConnectResponse> = answer(client, second).await;
            Ok(Pending(pending))
        })
    }

    /// Waits for an answer.
    pub fn end<Answer>(&self, pending: Pending<Answer>) -> ttrpc::Result<Answer> {
        self.runtime
            .block_on(pending.0)
            .unwrap_or_else(|error| Err(ttrpc::Error::Others(error.to_string())))
    }

    /// State of its init, or of an exec.
    pub fn state(&self, exec: &str) -> ttrpc::Result<StateResponse> {
        let mut request = StateRequest::new();
        request.id = self.id.clone();
        request.exec_id = exec.to_owned();
        self.call("State", &request)
    }

    /// Sends a signal to its init, to an exec, or to all processes.
    pub fn kill(&self, exec: &str, signal: u32, all: bool) -> ttrpc::Result<()> {
        let mut request = KillRequest::new();
        request.id = self.id.clone();
        request.exec_id = exec.to_owned();
        request.signal = signal;
        request.all = all;
        self.call::<Empty>("Kill", &request).map(drop)
    }

    /// Begins a checkpoint into this directory of the node, as a client asks for it that has not paused the
    /// container, or has.
    pub fn checkpoint(&self, image: &str, options: &CheckpointOptions) -> Result<Pending<Empty>> {
        let mut request = CheckpointTaskRequest::new();
        request.id = self.id.clone();
        request.path = image.to_owned();
        request.options = MessageField::some(any(options, "containerd.runc.v1.CheckpointOptions")?);
        Ok(self.begin("Checkpoint", &request, LIMIT)?)
    }

    /// Begins to wait for the end of its init, or of an exec; the shim knows of it.
    pub fn wait(&self, exec: &str) -> ttrpc::Result<Pending<WaitResponse>> {
        let mut request = WaitRequest::new();
        request.id = self.id.clone();
        request.exec_id = exec.to_owned();
        self.begin_known("Wait", &request, LIMIT)
    }
}

fn call(
    service: &str,
    method: &str,
    request: &impl Message,
    limit: Duration,
) -> ttrpc::Result<ttrpc::Request> {
    let mut call = ttrpc::Request::new();
    call.service = service.to_owned();
    call.method = method.to_owned();
    call.timeout_nano = i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX);
    call.payload = request.write_to_bytes().map_err(unreadable)?;
    Ok(call)
}

async fn answer<Answer: Message>(client: Client, call: ttrpc::Request) -> ttrpc::Result<Answer> {
    let response = client.request(call).await?;
    Answer::parse_from_bytes(&response.payload).map_err(unreadable)
}

fn unreadable(error: protobuf::Error) -> ttrpc::Error {
    ttrpc::Error::Others(error.to_string())
}

/// How a call went, as a client reads it: its gRPC code and message, without what differs from run to run.
pub fn describe<Answer>(answer: &ttrpc::Result<Answer>, shown: impl FnOnce(&Answer) -> String) -> String {
    match answer {
        Ok(answer) => shown(answer),
        Err(ttrpc::Error::RpcStatus(status)) => format!("{:?}: {}", status.code(), status.message()),
        Err(error) => format!("no answer: {error}"),
    }
}

/// A message as the bare type name that containerd uses and its encoding.
pub fn any(message: &impl Message, name: &str) -> Result<Any> {
    Ok(Any {
        type_url: name.to_owned(),
        value: message.write_to_bytes()?,
        ..Any::default()
    })
}
