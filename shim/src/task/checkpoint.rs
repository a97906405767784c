//! Checkpoint: the RPC around the transaction.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::options::checkpoint_options;
use containerd_shim_protos::api::{CheckpointTaskRequest, Empty};
use firn_image::manifest::DumpFlags;

use super::{Service, TaskError};
use firn_config::names;
use firn_transaction::checkpoint::{self, Overrides, Request};
use firn_transaction::container::{Action, Container};
use firn_transaction::image_dir::ImageDir;
use firn_transaction::journal::Operation;

pub(super) async fn checkpoint(
    service: &Arc<Service>,
    request: CheckpointTaskRequest,
) -> Result<Empty, TaskError> {
    let container = service.container(&request.id)?;
    // Order matters: a client that goes away while this waits takes its directory along.
    let path_of_image = Path::new(&request.path);
    let found = ImageDir::find(path_of_image, !container.traits.by_firn()).await;
    let _operation = container.operation.write().await;
    container.admit(Action::Checkpoint)?;
    let options = checkpoint_options(request.options.as_ref())?;
    let path = |text: &str| (!text.is_empty()).then(|| PathBuf::from(text));
    let inline = options.bulk == names::BULK_INLINE;
    let overrides = Overrides::of(&options.overrides)?;
    let request = Request {
        image: checkpoint::usable(&container, found, path_of_image)?,
        work: path(&options.work_path),
        parent: path(&options.parent_path),
        exit: options.exit,
        flags: DumpFlags {
            open_tcp: options.open_tcp || overrides.keeps_connections(),
            external_unix_sockets: options.external_unix_sockets,
            terminal: options.terminal,
            // A client that does not ask for them would have none: the kubelet asks for nothing.
            file_locks: true,
        },
        empty_namespaces: options.empty_namespaces,
        meeting: None,
        layer: None,
        // Only `Checkpoint` of a container in containerd's Go library asks for them, as `ctr containers
        // checkpoint` does, and firn itself. The first copies the files between its pause and the checkpoint.
        files_copied: options.file_locks && !options.files_follow,
        inline,
        overrides,
    };
    transact(service, &container, &request)
        .await
        .map(|()| Empty::default())
}

/// The transaction, and how it has ended for events. The caller holds the operation lock.
pub(super) async fn transact(
    service: &Arc<Service>,
    container: &Arc<Container>,
    request: &Request,
) -> Result<(), TaskError> {
    let transaction = service.begin(Operation::Checkpoint, &container.id);
    let result = checkpoint::run(container, request, &service.reaper).await;
    service.end(container, transaction, result.map_err(TaskError::from))
}
