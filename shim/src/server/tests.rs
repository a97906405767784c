use std::os::unix::net::UnixListener;
use std::sync::Arc;

use async_trait::async_trait;
use containerd_shim_protos::api::{
    ConnectRequest, ConnectResponse, Empty, KillRequest, ShutdownRequest, WaitRequest, WaitResponse,
};
use containerd_shim_protos::shim_async::{Client, Task, TaskClient};
use protobuf::Message;
use tokio::task::JoinHandle;
use ttrpc::r#async::TtrpcContext;
use ttrpc::r#async::transport::Socket;

use super::*;

const SOON: Duration = Duration::from_secs(20);

/// A task service with four verbs.
struct Service {
    serving: CancellationToken,
}

#[async_trait]
impl Task for Service {
    async fn connect(&self, _: &TtrpcContext, _: ConnectRequest) -> ttrpc::Result<ConnectResponse> {
        Ok(ConnectResponse {
            shim_pid: 7,
            ..ConnectResponse::default()
        })
    }

    /// Is answered later than the shutdown that it causes.
    async fn kill(&self, _: &TtrpcContext, _: KillRequest) -> ttrpc::Result<Empty> {
        self.serving.cancel();
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok(Empty::default())
    }

    async fn wait(&self, _: &TtrpcContext, _: WaitRequest) -> ttrpc::Result<WaitResponse> {
        std::future::pending().await
    }

    async fn shutdown(&self, _: &TtrpcContext, _: ShutdownRequest) -> ttrpc::Result<Empty> {
        self.serving.cancel();
        Ok(Empty::default())
    }
}

struct Shim {
    _dir: tempfile::TempDir,
    path: PathBuf,
    serving: CancellationToken,
    served: JoinHandle<Result<(), ActionError>>,
}

impl Shim {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let serving = CancellationToken::default();
        let served = tokio::spawn({
            let serving = serving.clone();
            async move {
                let service = Arc::new(Service {
                    serving: serving.clone(),
                });
                let history = History::new(HistoryDir::default());
                serve(
                    listener,
                    service,
                    &serving,
                    &Publisher::new("", "default"),
                    &history,
                )
                .await
            }
        });
        Self {
            _dir: dir,
            path,
            serving,
            served,
        }
    }

    async fn client(&self) -> Client {
        Client::new(Socket::from(
            tokio::net::UnixStream::connect(&self.path).await.unwrap(),
        ))
    }

    async fn wait_for_end(&mut self) {
        tokio::time::timeout(SHUTDOWN_LIMIT, &mut self.served)
            .await
            .expect("the end in time")
            .unwrap()
            .unwrap();
    }
}

fn soon() -> ttrpc::context::Context {
    ttrpc::context::with_duration(SOON)
}

#[tokio::test]
async fn both_names_of_the_service_are_served() {
    let shim = Shim::start();
    let client = shim.client().await;
    for service in ["containerd.task.v2.Task", "containerd.task.v3.Task"] {
        let mut request = ttrpc::Request::new();
        request.service = service.into();
        request.method = "Connect".into();
        request.timeout_nano = i64::try_from(SOON.as_nanos()).unwrap();
        let response = client.request(request).await.unwrap();
        let response = ConnectResponse::parse_from_bytes(&response.payload).unwrap();
        assert_eq!(response.shim_pid, 7, "{service}");
    }
}

#[tokio::test]
async fn the_shutdown_call_is_answered_and_ends_the_shim() {
    let mut shim = Shim::start();
    let client = TaskClient::new(shim.client().await);
    // A Wait for something that never happens does not delay the shutdown.
    let stuck = TaskClient::new(shim.client().await);
    let stuck = tokio::spawn(async move { stuck.wait(soon(), &WaitRequest::default()).await });
    client.connect(soon(), &ConnectRequest::default()).await.unwrap();
    client
        .shutdown(soon(), &ShutdownRequest::default())
        .await
        .unwrap();
    shim.wait_for_end().await;
    assert!(!shim.path.exists(), "the socket is gone");
    tokio::time::timeout(SOON, stuck)
        .await
        .unwrap()
        .unwrap()
        .unwrap_err();
}

#[tokio::test]
async fn a_call_under_way_is_answered_before_the_end() {
    let mut shim = Shim::start();
    let client = TaskClient::new(shim.client().await);
    client.kill(soon(), &KillRequest::default()).await.unwrap();
    shim.wait_for_end().await;
}

#[tokio::test]
async fn the_socket_of_a_successor_is_kept() {
    let mut shim = Shim::start();
    TaskClient::new(shim.client().await)
        .connect(soon(), &ConnectRequest::default())
        .await
        .unwrap();
    fs::rename(&shim.path, shim.path.with_extension("old")).unwrap();
    let _successor = UnixListener::bind(&shim.path).unwrap();
    shim.serving.cancel();
    shim.wait_for_end().await;
    assert!(shim.path.exists());
}

#[tokio::test]
async fn connections_of_other_users_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    // The only user that may connect is another one than the test's.
    let other_user = nix::unistd::Uid::from_raw(nix::unistd::geteuid().as_raw() + 1);
    let listener = accept::listener(UnixListener::bind(&path).unwrap(), other_user).unwrap();
    let services = create_task(Arc::new(Service {
        serving: CancellationToken::default(),
    }));
    let mut server = Server::new().add_listener(listener).register_service(services);
    server.start().await.unwrap();
    let stream = tokio::net::UnixStream::connect(&path).await.unwrap();
    stream.readable().await.unwrap();
    assert_eq!(
        stream.try_read(&mut [0]).unwrap(),
        0,
        "the connection is still open"
    );
}

#[test]
fn a_closed_descriptor_is_no_listener() {
    let error = adopt(9999).unwrap_err();
    assert!(
        error.to_string().starts_with("no listener on descriptor 9999"),
        "{error}"
    );
}
