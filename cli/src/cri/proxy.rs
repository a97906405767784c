//! A connection of a client of CRI: all calls but two continue to containerd as they are, in both directions
//! and as streams.
//!
//! Each has a connection to containerd of its own, and ends with it: so a client sees a containerd that is
//! restarted as it would without this program.

use std::convert::Infallible;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder as ToContainerd, SendRequest};
use hyper::server::conn::http2::Builder as FromClient;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::Grpc;
use tonic::{Request as Call, Response as Answer, Status};
use tonic_prost::ProstCodec;

use super::caller::Caller;
use super::messages::{
    CHECKPOINT, CheckpointPodRequest, CheckpointPodResponse, RESTORE, RestorePodRequest, RestorePodResponse,
};
use super::{Adapter, checkpoint, restore};
use crate::output::note;

/// Errors of runtimes are long.
const MAX_HEADERS: u32 = 1 << 20;

/// As CRI's clients have it.
const MAX_MESSAGE: usize = 16 << 20;

/// How many bytes of each stream may be under way.
const WINDOW: u32 = 4 << 20;

/// Serves a client until it leaves or containerd ends.
pub async fn connection(client: UnixStream, adapter: Arc<Adapter>) {
    let containerd = match UnixStream::connect(&adapter.containerd).await {
        Ok(containerd) => containerd,
        Err(error) => return note!("firn: {}: {error}", adapter.containerd.display()),
    };
    let connected = ToContainerd::new(TokioExecutor::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_header_list_size(MAX_HEADERS)
        .handshake(TokioIo::new(containerd))
        .await;
    let (containerd, until_it_ends) = match connected {
        Ok(connected) => connected,
        Err(error) => return note!("firn: containerd does not speak HTTP/2: {error}"),
    };
    let answer = service_fn(move |request| answer(request, adapter.clone(), containerd.clone()));
    let served = FromClient::new(TokioExecutor::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .max_header_list_size(MAX_HEADERS)
        .max_concurrent_streams(None)
        .serve_connection(TokioIo::new(client), answer);
    // How it ended is for nobody: a client may also have been killed.
    tokio::select! {
        _left = served => {}
        _ended = until_it_ends => {}
    }
}

async fn answer(
    request: Request<Incoming>,
    adapter: Arc<Adapter>,
    mut containerd: SendRequest<Incoming>,
) -> Result<Response<Body>, Infallible> {
    Ok(match request.uri().path() {
        CHECKPOINT => {
            let call = move |call| checkpoint_pod(call, adapter.clone());
            let mut codec = Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_MESSAGE);
            codec.unary(tower::service_fn(call), request).await
        }
        RESTORE => {
            let call = move |call| restore_pod(call, adapter.clone());
            let mut codec = Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_MESSAGE);
            codec.unary(tower::service_fn(call), request).await
        }
        _ => match containerd.send_request(request).await {
            Ok(response) => response.map(Body::new),
            Err(error) => Status::unavailable(format!("containerd: {error}")).into_http(),
        },
    })
}

async fn checkpoint_pod(
    call: Call<CheckpointPodRequest>,
    adapter: Arc<Adapter>,
) -> Result<Answer<CheckpointPodResponse>, Status> {
    let (metadata, _, request) = call.into_parts();
    let done = Caller::serve(&metadata, |caller| async move {
        let _call = adapter.calls.read().await;
        checkpoint::checkpoint(&adapter, request, caller).await
    });
    logged("CheckpointPod", done.await).map(|()| Answer::new(CheckpointPodResponse {}))
}

async fn restore_pod(
    call: Call<RestorePodRequest>,
    adapter: Arc<Adapter>,
) -> Result<Answer<RestorePodResponse>, Status> {
    let (metadata, _, request) = call.into_parts();
    let done = Caller::serve(&metadata, |caller| async move {
        let _call = adapter.calls.read().await;
        restore::restore(&adapter, request, caller).await
    });
    logged("RestorePod", done.await).map(Answer::new)
}

fn logged<T>(call: &str, done: Result<T, Status>) -> Result<T, Status> {
    done.inspect_err(|status| note!("firn: {call}: {}", status.message()))
}
