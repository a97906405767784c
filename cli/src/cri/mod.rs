//! `firn cri-pods`: `CheckpointPod` and `RestorePod` of CRI in front of a containerd that has neither.

mod caller;
mod checkpoint;
mod error;
mod messages;
mod proxy;
mod record;
mod restore;

use std::collections::HashMap;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::RwLock;
use tokio::task::JoinSet;

use self::error::CriError;
use crate::args::cri::CriPodsArgs;
use crate::checkpoint::Interrupts;
use crate::containerd::{CallError, Containerd, block_on};
use crate::output::line;

/// containerd's namespace of pods.
const NAMESPACE: &str = "k8s.io";

/// How long calls may take to clean up when the program ends.
const END: Duration = Duration::from_secs(120);

/// What the calls need.
struct Adapter {
    /// containerd's socket.
    containerd: PathBuf,
    /// Directories below which checkpoints may be; none: everywhere.
    checkpoints: Vec<PathBuf>,
    /// Held by every call that has something to clean up.
    calls: Arc<RwLock<()>>,
}

pub fn run(args: &CriPodsArgs) -> Result<bool> {
    let checkpoints = args
        .checkpoints
        .iter()
        .map(|dir| fs::canonicalize(dir).with_context(|| format!("cannot use {}", dir.display())));
    let adapter = Adapter {
        containerd: args.containerd.address.clone(),
        checkpoints: checkpoints.collect::<Result<_>>()?,
        calls: Arc::default(),
    };
    block_on(serve(&args.listen, Arc::new(adapter)))??;
    Ok(true)
}

async fn serve(listen: &Path, adapter: Arc<Adapter>) -> Result<()> {
    let mut interrupts = Interrupts::new()?;
    if let Ok(containerd) = adapter.connect().await {
        restore::remove_stale(&containerd).await;
    }
    let listener = bind(listen)
        .await
        .with_context(|| format!("cannot listen on {}", listen.display()))?;
    line!("serving CRI at {}", listen.display());
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = interrupts.next() => break,
            accepted = listener.accept() => accepted,
            // Or they would pile up.
            Some(_ended) = connections.join_next() => continue,
        };
        let (stream, _) = accepted.context("cannot accept a connection")?;
        connections.spawn(proxy::connection(stream, adapter.clone()));
    }
    drop(listener);
    let removed = fs::remove_file(listen);
    // The callers are gone: their calls clean up.
    connections.shutdown().await;
    if tokio::time::timeout(END, adapter.calls.write()).await.is_err() {
        bail!("a checkpoint or restore does not end; see `firn status`");
    }
    removed.with_context(|| format!("cannot remove {}", listen.display()))
}

/// Listens on a socket that only root can use, from its first moment on.
async fn bind(listen: &Path) -> io::Result<UnixListener> {
    let parent = listen.parent().unwrap_or(Path::new("."));
    DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    if UnixStream::connect(listen).await.is_ok() {
        return Err(ErrorKind::AddrInUse.into());
    }
    let private = tempfile::Builder::new().prefix(".firn-cri-").tempdir_in(parent)?;
    let path = private.path().join("socket");
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    // Also over the socket of one that was killed.
    fs::rename(&path, listen)?;
    Ok(listener)
}

impl Adapter {
    async fn connect(&self) -> Result<Containerd, CallError> {
        Containerd::connect(&self.containerd, NAMESPACE).await
    }

    /// The directory that the caller names, if it is there and allowed.
    fn place(&self, what: &'static str, path: &str) -> Result<PathBuf, CriError> {
        if !path.starts_with('/') {
            let given = path.to_owned();
            return Err(CriError::Request { what, given });
        }
        let found = fs::canonicalize(path).map_err(|source| CriError::Directory {
            path: path.into(),
            source,
        })?;
        if self.checkpoints.is_empty() || self.checkpoints.iter().any(|dir| found.starts_with(dir)) {
            Ok(found)
        } else {
            Err(CriError::Place { path: found })
        }
    }
}

/// Refuses options: there are none.
fn expect_none(options: HashMap<String, String>) -> Result<(), CriError> {
    match options.into_keys().next() {
        None => Ok(()),
        Some(key) => Err(CriError::Option(key)),
    }
}
