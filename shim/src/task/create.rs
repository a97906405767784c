//! Create: rootfs, stdio and `runc create`; from a checkpoint only what a later Start needs.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firn_process::cancel::CancellationToken;
use firn_process::unmount::unmount_recursive;

use crate::options::{options_of_task, restore_dir};
use containerd_shim_protos::api::{CreateTaskRequest, CreateTaskResponse};
use containerd_shim_protos::events::task::{TaskCreate, TaskIO};
use protobuf::MessageField;

use super::state::pid_field;
use super::{Service, Slot, TaskError, Transaction, exit};
use crate::daemon::images::Images;
use crate::{daemon, mounts};
use firn_host::Chain;
use firn_transaction::container::{Container, Process, StdioPaths};
use firn_transaction::create as preparation;
use firn_transaction::history;
use firn_transaction::journal::Operation;
use firn_transaction::options::RuncOptions;
use firn_transaction::recovery;
use firn_transaction::runc;
use firn_transaction::stdio::{self, StdioConfig};
use firn_transaction::steps::{Follower, Step};

/// Others may enter and not list it: user namespaces need that.
const ROOTFS_MODE: u32 = 0o711;

/// Pid of the container's first process, in the bundle.
pub(crate) const INIT_PID: &str = "init.pid";

pub(super) async fn create(
    service: &Arc<Service>,
    request: CreateTaskRequest,
) -> Result<CreateTaskResponse, TaskError> {
    let cancel = reserve(service, &request.id)?;
    match build(service, &request, &cancel).await {
        Ok(container) if service.is_cancelled(&request.id) => {
            discard(&container).await;
            if !request.rootfs.is_empty() {
                unmount(&container.bundle.join("rootfs")).await;
            }
            service.containers().remove(&request.id);
            Err(TaskError::NoContainer)
        }
        Ok(container) => {
            service.publisher.publish(&event(&request, container.init.pid()));
            service
                .containers()
                .insert(request.id.clone(), Slot::Ready(container.clone()));
            exit::watch_oom(service, &container);
            if let Some(exit) = container.end_start() {
                exit::init_exited(service, &container, exit);
            }
            Ok(CreateTaskResponse {
                pid: pid_field(container.init.pid()),
                ..CreateTaskResponse::default()
            })
        }
        Err(error) => {
            service.containers().remove(&request.id);
            Err(error)
        }
    }
}

fn reserve(service: &Service, id: &str) -> Result<CancellationToken, TaskError> {
    let mut containers = service.containers();
    if containers.contains_key(id) {
        return Err(TaskError::ContainerExists { id: id.to_owned() });
    }
    let cancel = CancellationToken::default();
    containers.insert(id.to_owned(), Slot::Reserved(cancel.clone()));
    Ok(cancel)
}

async fn build(
    service: &Arc<Service>,
    request: &CreateTaskRequest,
    cancel: &CancellationToken,
) -> Result<Arc<Container>, TaskError> {
    let bundle = PathBuf::from(&request.bundle);
    let options = options_of_task(request.options.as_ref(), &bundle)?;
    options.save(&bundle)?;
    history::write_killed(service.history.place(), &bundle).await;
    recovery::recover(&bundle).await;
    let rootfs = bundle.join("rootfs");
    if !request.rootfs.is_empty() {
        let mut builder = std::fs::DirBuilder::new();
        let made = builder.recursive(true).mode(ROOTFS_MODE).create(&rootfs);
        made.map_err(|source| TaskError::File {
            what: "make the rootfs directory",
            source,
        })?;
        mounts::mount_all(&request.rootfs, &rootfs, &service.reaper).await?;
    }
    let built = build_mounted(service, request, &bundle, options, cancel).await;
    if built.is_err() && !request.rootfs.is_empty() {
        unmount(&rootfs).await;
    }
    built
}

async fn unmount(rootfs: &Path) {
    if let Err(error) = unmount_recursive(rootfs).await {
        log::warn!("cannot unmount {}: {}", rootfs.display(), Chain(&error));
    }
}

async fn build_mounted(
    service: &Arc<Service>,
    request: &CreateTaskRequest,
    bundle: &Path,
    options: RuncOptions,
    cancel: &CancellationToken,
) -> Result<Arc<Container>, TaskError> {
    let named = restore_dir(request.options.as_ref())?;
    let checkpoint = match &*request.checkpoint {
        "" => named.as_deref(),
        unpacked => Some(Path::new(unpacked)),
    };
    let images = Images {
        address: &service.address,
        namespace: &service.namespace,
    };
    let transaction = checkpoint.map(|_| service.begin(Operation::Restore, &request.id));
    let prepared = preparation::prepare(preparation::Request {
        id: &request.id,
        namespace: &service.namespace,
        bundle,
        options,
        image: checkpoint,
        reaper: &service.reaper,
        labels: Box::pin(daemon::labels(&service.address, &service.namespace, &request.id)),
        images: &images,
        cancel,
    });
    let prepared = match prepared.await {
        Ok(prepared) => prepared,
        Err(error) => return Err(refused(service, transaction, error.into())),
    };
    for warning in &prepared.warnings {
        service.publisher.publish_warning(&request.id, warning);
    }
    if let Some(refusal) = prepared.fallback {
        let code = TaskError::from(refusal).of_firn();
        let transaction = service.begin(Operation::Restore, &request.id);
        service.end_as(true, transaction, "failed", Err(code));
    }
    let restores = prepared.restore.is_some();
    let stdio = StdioPaths {
        stdin: request.stdin.clone(),
        stdout: request.stdout.clone(),
        stderr: request.stderr.clone(),
        terminal: request.terminal,
    };
    let init = Process::new("", stdio, Vec::new());
    let container = Container::new(
        &request.id,
        bundle.to_owned(),
        prepared.runc,
        prepared.options,
        init,
        prepared.traits,
        prepared.restore,
    );
    follow(service, &container);
    let container = Arc::new(container);
    if !restores {
        // Order matters: the exit of an init that dies at once is published after Create.
        container.begin_start();
        run_create(service, &container).await?;
    }
    Ok(container)
}

/// A restore that is refused is in the history, too.
fn refused(service: &Service, transaction: Option<Transaction>, error: TaskError) -> TaskError {
    if let Some(transaction) = transaction {
        service.end_as(false, transaction, "failed", Err(error.of_firn()));
    }
    error
}

/// Publishes the steps of the container's transactions, if they are firn's own.
fn follow(service: &Service, container: &Container) {
    if container.traits.by_firn() {
        let (publisher, id) = (service.publisher.clone(), container.id.clone());
        let follow = move |operation: &str, step: Step<'_>| publisher.step(&id, operation, step);
        container.follower.get_or_init(|| Follower::new(follow));
    }
}

async fn run_create(service: &Arc<Service>, container: &Arc<Container>) -> Result<(), TaskError> {
    let mut stdio = open_stdio(service, container, &container.init).await?;
    let pid_file = container.bundle.join(INIT_PID);
    let console = stdio.console_socket().map(Path::to_owned);
    let expectation = service.exits.expect();
    let create = runc::Create {
        bundle: &container.bundle,
        pid_file: &pid_file,
        console_socket: console.as_deref(),
        no_pivot: container.options.no_pivot_root,
        no_new_keyring: container.options.no_new_keyring,
    };
    if let Err(source) = container
        .runc
        .create(create, |command| stdio.attach(command))
        .await
    {
        stdio.abort().await;
        return Err(TaskError::runtime("create")(source));
    }
    let started = async {
        container.init.set_copier(stdio.start().await?);
        let pid = runc::read_pid(&pid_file)?;
        container.init.set_pid(pid);
        Ok::<_, TaskError>(())
    };
    if let Err(error) = started.await {
        // The client gets an error, so there must be no container.
        discard(container).await;
        return Err(error);
    }
    exit::claim(service, expectation, container, &container.init);
    Ok(())
}

/// Ends a container that its client does not get.
async fn discard(container: &Container) {
    if let Err(error) = container.runc.ensure_deleted().await {
        log::warn!("cannot delete {}: {}", container.id, Chain(&error));
    }
}

/// Opens the stdio that `process` was asked to have.
pub(super) async fn open_stdio(
    service: &Service,
    container: &Container,
    process: &Process,
) -> Result<stdio::Prepared, TaskError> {
    let config = StdioConfig::parse(&stdio::Request {
        id: &container.id,
        namespace: &service.namespace,
        stdin: &process.stdio.stdin,
        stdout: &process.stdio.stdout,
        stderr: &process.stdio.stderr,
        terminal: process.stdio.terminal,
    })?;
    Ok(config.prepare(owner(container), &service.reaper).await?)
}

pub(super) fn owner(container: &Container) -> stdio::Owner {
    stdio::Owner {
        uid: container.options.io_uid,
        gid: container.options.io_gid,
    }
}

fn event(request: &CreateTaskRequest, pid: i32) -> TaskCreate {
    TaskCreate {
        container_id: request.id.clone(),
        bundle: request.bundle.clone(),
        rootfs: request.rootfs.clone(),
        io: MessageField::some(TaskIO {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
            ..TaskIO::default()
        }),
        checkpoint: request.checkpoint.clone(),
        pid: pid_field(pid),
        ..TaskCreate::default()
    }
}
