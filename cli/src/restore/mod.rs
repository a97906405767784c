//! `firn restore`: restores a container from an image directory, such as one that the shim has rescued.
//!
//! containerd makes the task, as for `ctr tasks start`, and hands the directory to the shim, which restores
//! from it: ctr and nerdctl go on with the container afterwards. The container itself must still be known to
//! containerd.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use firn_image::manifest::ImageError;
use prost::Message;
use serde_json::json;

use crate::args::RestoreArgs;
use crate::containerd::{Any, CallError, Container, Containerd, CreateTask, block_on};
use crate::output::{self, line, note};
use crate::text;
use firn_host::{Problem, ProblemLine};

/// Options of runc's shims, which firn has too.
const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";

/// containerd's label of Kubernetes' containers.
const CRI_LABEL: &str = "io.cri-containerd.kind";

/// CRIU writes it at the end of a dump.
const LAST: &str = "inventory.img";

/// The fields of these options that a restore sets.
#[derive(Clone, PartialEq, Message)]
struct RestoreOptions {
    /// containerd hands it on, 1.7 for the stock shim alone.
    #[prost(string, tag = "10")]
    criu_image_path: String,
    /// The shim reads it: `firn_config::names::OPTION_RESTORE_DIR`.
    #[prost(string, tag = "15001")]
    restore_dir: String,
}

/// Why a container is not restored.
#[derive(Debug, thiserror::Error, Problem)]
pub enum RestoreError {
    #[error("containerd knows no container {id} in namespace {namespace}")]
    #[problem(
        "FIRN-NO-CONTAINER",
        "see `ctr containers list` and --namespace; make the container again with `ctr containers create`, \
         with the same image and options, and restore into that"
    )]
    NoContainer { id: String, namespace: String },
    #[error("container {id} still has a task")]
    #[problem(
        "FIRN-TASK-EXISTS",
        "delete it: `ctr tasks delete --force ID`; the image is not touched"
    )]
    HasTask { id: String },
    #[error("container {id} is one of Kubernetes', whose tasks the kubelet alone makes")]
    #[problem("FIRN-RESTORE-CLIENT", "let the kubelet restore it from a checkpoint image")]
    Kubernetes { id: String },
    #[error(
        "the runtime of container {id} has options of the type {type_url}, to which no image can be added"
    )]
    #[problem(
        "FIRN-RESTORE-CLIENT",
        "make the container with options of runc's shim, or with none"
    )]
    Options { id: String, type_url: String },
    #[error(
        "the shim of container {id} ({runtime}) does not restore: it would have started the container afresh"
    )]
    #[problem(
        "FIRN-RESTORE-CLIENT",
        "run it with io.containerd.firn.v2, and install the shim of this version"
    )]
    Afresh { id: String, runtime: String },
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    #[problem("FIRN-CONTAINERD", "see containerd's log; --address names its socket")]
    Call(#[from] CallError),
}

/// Restores the container.
pub fn run(args: &RestoreArgs) -> Result<bool> {
    let begun = Instant::now();
    match block_on(restore(args))? {
        Ok((dir, pid)) => {
            let took = begun.elapsed();
            if args.json {
                let (id, namespace, ms) = (&args.id, &args.containerd.namespace, took.as_millis());
                output::json(&json!({
                    "container": id, "namespace": namespace, "dir": dir, "pid": pid, "ms": ms,
                }))?;
            } else {
                line!(
                    "{} runs again, pid {pid}, after {:.1} s",
                    args.id,
                    took.as_secs_f64()
                );
            }
            Ok(true)
        }
        Err(error) => {
            let message = match error.downcast_ref::<RestoreError>() {
                Some(error) => shown(error),
                None => format!("{error:#}"),
            };
            match args.json {
                true => output::json(&json!({"failure": message}))?,
                false => note!("firn: {message}"),
            }
            Ok(false)
        }
    }
}

/// With its code and hint, unless the shim has given both.
fn shown(error: &RestoreError) -> String {
    match error {
        RestoreError::Call(call @ CallError::Call { .. }) if call.to_string().contains("FIRN-") => {
            call.to_string()
        }
        error => ProblemLine(error).to_string(),
    }
}

async fn restore(args: &RestoreArgs) -> Result<(PathBuf, u32)> {
    let dir = args.dir.canonicalize();
    let dir = dir.with_context(|| format!("cannot find {}", args.dir.display()))?;
    if !dir.join(LAST).is_file() {
        let name = LAST.to_owned();
        return Err(RestoreError::from(ImageError::Missing { dir, name }).into());
    }
    let log = args.log.as_deref().map(url).transpose()?.unwrap_or_default();
    let pid = by_containerd(args, &dir, &log).await?;
    Ok((dir, pid))
}

async fn by_containerd(args: &RestoreArgs, dir: &Path, log: &str) -> Result<u32, RestoreError> {
    let (id, namespace) = (args.id.clone(), args.containerd.namespace.clone());
    let containerd = Containerd::connect(&args.containerd.socket.address, &namespace).await?;
    let container = match containerd.container(&id).await {
        Err(error) if error.is_absent() => return Err(RestoreError::NoContainer { id, namespace }),
        container => container?,
    };
    if container.labels.contains_key(CRI_LABEL) {
        return Err(RestoreError::Kubernetes { id });
    }
    if containerd.has_task(&id).await? {
        return Err(RestoreError::HasTask { id });
    }
    let task = CreateTask {
        container_id: id.clone(),
        rootfs: containerd.mounts(&container).await?,
        stdout: log.to_owned(),
        stderr: log.to_owned(),
        terminal: has_terminal(&container),
        options: Some(options(&container, dir)?),
    };
    if !args.json {
        let size = text::bytes(size(dir));
        note!("restoring {id} from {} ({size})", dir.display());
    }
    // Order matters: who restores makes the processes in Start. What has some by now is not the container of
    // the image.
    let started = match containerd.create(task).await? {
        0 => containerd.start(&id).await.map_err(RestoreError::from),
        _ => Err(RestoreError::Afresh {
            id: id.clone(),
            runtime: container.runtime.unwrap_or_default().name,
        }),
    };
    if started.is_err()
        && let Err(error) = containerd.delete(&id).await
        && !error.is_absent()
    {
        note!("firn: the task of {id} is left: {error}");
    }
    started
}

/// The container's own options and the image: fields that follow in the encoding are merged.
fn options(container: &Container, dir: &Path) -> Result<Any, RestoreError> {
    let runtime = container.runtime.clone().unwrap_or_default();
    let mut options = runtime
        .options
        .filter(|options| !options.type_url.is_empty())
        .unwrap_or(Any {
            type_url: RUNC_OPTIONS.to_owned(),
            value: Vec::new(),
        });
    if options.type_url.rsplit('/').next() != Some(RUNC_OPTIONS) {
        return Err(RestoreError::Options {
            id: container.id.clone(),
            type_url: options.type_url,
        });
    }
    let dir = dir.to_string_lossy();
    let image = RestoreOptions {
        criu_image_path: dir.clone().into_owned(),
        restore_dir: dir.into_owned(),
    };
    options.value.extend(image.encode_to_vec());
    Ok(options)
}

fn has_terminal(container: &Container) -> bool {
    let spec = container
        .spec
        .as_ref()
        .map(|spec| serde_json::from_slice(&spec.value));
    let spec: serde_json::Value = spec.and_then(Result::ok).unwrap_or_default();
    spec["process"]["terminal"] == true
}

/// A log file as containerd names one; the shim makes it.
fn url(log: &Path) -> Result<String> {
    let path = std::path::absolute(log)?;
    Ok(format!("file://{}", path.display()))
}

fn size(dir: &Path) -> u64 {
    let files = fs::read_dir(dir).into_iter().flatten().flatten();
    files.filter_map(|file| Some(file.metadata().ok()?.len())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::containerd::Runtime;

    fn container(options: Option<Any>) -> Container {
        let name = "io.containerd.firn.v2".to_owned();
        Container {
            id: "job".to_owned(),
            runtime: Some(Runtime { name, options }),
            ..Container::default()
        }
    }

    /// As much of the options as the test needs, by the numbers of containerd's own message.
    #[derive(Clone, PartialEq, Message)]
    struct RuncOptions {
        #[prost(string, tag = "6")]
        binary_name: String,
        #[prost(bool, tag = "9")]
        systemd_cgroup: bool,
        #[prost(string, tag = "10")]
        criu_image_path: String,
    }

    /// How a string field with this number begins.
    fn protobuf_tag(number: u32) -> Vec<u8> {
        let mut tag = Vec::new();
        prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut tag);
        tag
    }

    #[test]
    fn the_image_is_added_to_the_containers_own_options() {
        let own = RuncOptions {
            binary_name: "/usr/bin/runc".to_owned(),
            systemd_cgroup: true,
            criu_image_path: String::new(),
        };
        let any = Any {
            type_url: format!("types.containerd.io/{RUNC_OPTIONS}"),
            value: own.encode_to_vec(),
        };
        let sent = options(&container(Some(any)), Path::new("/srv/image")).unwrap();
        let read = RuncOptions::decode(&*sent.value).unwrap();
        assert_eq!(read.criu_image_path, "/srv/image");
        let own_field = protobuf_tag(firn_config::names::OPTION_RESTORE_DIR);
        assert!(
            sent.value
                .windows(own_field.len())
                .any(|bytes| bytes == own_field)
        );
        assert!(read.systemd_cgroup && read.binary_name == "/usr/bin/runc");
        let alone = options(&container(None), Path::new("/srv/image")).unwrap();
        assert_eq!(alone.type_url, RUNC_OPTIONS);
        assert_eq!(
            RuncOptions::decode(&*alone.value).unwrap().criu_image_path,
            "/srv/image"
        );
        let other = Any {
            type_url: "runtimeoptions.v1.Options".to_owned(),
            value: Vec::new(),
        };
        let refused = options(&container(Some(other)), Path::new("/srv/image")).unwrap_err();
        assert_eq!(refused.code(), "FIRN-RESTORE-CLIENT");
    }

    #[test]
    fn refusals_of_the_shim_keep_their_code_and_hint() {
        let refused = |message: &str| {
            let status = Box::new(tonic::Status::unknown(message));
            shown(
                &CallError::Call {
                    call: "Tasks/Create",
                    status,
                }
                .into(),
            )
        };
        let message = refused("FIRN-GPU-COUNT: too few. hint: grant more");
        assert!(
            message.ends_with("FIRN-GPU-COUNT: too few. hint: grant more")
                && !message.contains("FIRN-CONTAINERD")
        );
        let message = refused("snapshot does not exist");
        assert!(
            message.starts_with("FIRN-CONTAINERD: ") && message.contains("hint: "),
            "{message}"
        );
    }
}
