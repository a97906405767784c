//! Serves the metrics over HTTP. Nothing but `GET /metrics` has an answer, and no client costs more than a
//! connection for ten seconds.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::TEXT_FORMAT;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::containerd::block_on;
use crate::output::{line, note};

/// How many clients are served at once; others wait.
const CLIENTS: usize = 16;
/// How long a client may take.
const LIMIT: Duration = Duration::from_secs(10);
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

type Metrics = dyn Fn() -> Result<String> + Send + Sync;

/// Serves until SIGTERM. True: done.
pub(super) fn run(
    address: SocketAddr,
    metrics: impl Fn() -> Result<String> + Send + Sync + 'static,
) -> Result<bool> {
    block_on(async {
        let mut term = signal(SignalKind::terminate())?;
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("listen on {address}"))?;
        line!("serving http://{}/metrics", listener.local_addr()?);
        tokio::select! {
            _ = term.recv() => Ok(true),
            () = accept(listener, Arc::new(metrics)) => Ok(true),
        }
    })?
}

async fn accept(listener: TcpListener, metrics: Arc<Metrics>) {
    let clients = Arc::new(Semaphore::new(CLIENTS));
    loop {
        let Ok(place) = clients.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let metrics = metrics.clone();
                tokio::spawn(async move {
                    serve(stream, metrics).await;
                    drop(place);
                });
            }
            Err(error) => {
                note!("firn: cannot accept a connection: {error}");
                sleep(PAUSE).await;
            }
        }
    }
}

/// One answer for each connection. A client that goes or sends nonsense is no trouble of this node.
async fn serve(stream: TcpStream, metrics: Arc<Metrics>) {
    let answer = service_fn(move |request| {
        let metrics = metrics.clone();
        async move { Ok::<_, Infallible>(answer(&request, metrics).await) }
    });
    let mut http = http1::Builder::new();
    let http = http.timer(TokioTimer::new()).keep_alive(false);
    let _ = timeout(LIMIT, http.serve_connection(TokioIo::new(stream), answer)).await;
}

async fn answer(request: &Request<Incoming>, metrics: Arc<Metrics>) -> Response<String> {
    let refused = |status, text: &str| {
        let mut response = Response::new(text.to_owned());
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return refused(StatusCode::NOT_FOUND, "the metrics are under /metrics\n");
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return refused(StatusCode::METHOD_NOT_ALLOWED, "GET /metrics\n");
    }
    match tokio::task::spawn_blocking(move || metrics()).await {
        Ok(Ok(text)) => {
            let mut response = Response::new(text);
            let kind = HeaderValue::from_static(TEXT_FORMAT);
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        failed => {
            if let Ok(Err(error)) = failed {
                note!("firn: {error:#}");
            }
            refused(StatusCode::INTERNAL_SERVER_ERROR, "see the log of firn metrics\n")
        }
    }
}
