//! A containerd that answers as a test has it.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use firn_containerd::Message;
use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::server::conn::http2::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixListener;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::Grpc;
use tonic::{Request as Call, Response as Answer, Status};
use tonic_prost::ProstCodec;

use crate::containerd::block_on;

/// The answer to a call.
pub type Reply = Box<dyn FnOnce(Request<Incoming>) -> BoxFuture<'static, Response<Body>> + Send>;

/// An answer, or a failure.
pub fn reply<A: Message + Default + Clone + 'static>(answer: Result<A, Status>) -> Reply {
    Box::new(move |request| {
        let answer = move |_: Call<()>| {
            let answer = answer.clone();
            async move { answer.map(Answer::new) }
        };
        Box::pin(async move {
            let mut codec = Grpc::new(ProstCodec::<A, ()>::default());
            codec.unary(tower::service_fn(answer), request).await
        })
    })
}

/// Serves until the test ends.
pub struct Fake {
    dir: tempfile::TempDir,
    calls: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    /// `answer` gets calls such as `Images/Delete`, and all that were made before.
    pub fn new(answer: impl Fn(&str, &[String]) -> Reply + Send + Sync + 'static) -> Self {
        let (dir, calls) = (tempfile::tempdir().unwrap(), Arc::<Mutex<Vec<String>>>::default());
        let fake = Self {
            dir,
            calls: calls.clone(),
        };
        let listener = std::os::unix::net::UnixListener::bind(fake.socket()).unwrap();
        listener.set_nonblocking(true).unwrap();
        let reply = move |request: &Request<Incoming>| {
            let path = request.uri().path();
            let call = path.rsplit_once('.').map_or(path, |(_, call)| call).to_owned();
            let mut calls = calls.lock().unwrap();
            let reply = answer(&call, &calls);
            calls.push(call);
            reply
        };
        std::thread::spawn(move || block_on(serve(listener, Arc::new(reply))));
        fake
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("containerd.sock")
    }

    /// How often a call was made.
    pub fn count(&self, call: &str) -> usize {
        let calls = self.calls.lock().unwrap();
        calls.iter().filter(|made| *made == call).count()
    }
}

async fn serve(
    listener: std::os::unix::net::UnixListener,
    reply: Arc<impl Fn(&Request<Incoming>) -> Reply + Send + Sync + 'static>,
) {
    let listener = UnixListener::from_std(listener).unwrap();
    while let Ok((client, _)) = listener.accept().await {
        let reply = reply.clone();
        let answer = service_fn(move |request| {
            let reply = reply(&request);
            async move { Ok::<_, Infallible>(reply(request).await) }
        });
        let served = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(client), answer);
        tokio::spawn(async move { drop(served.await) });
    }
}
