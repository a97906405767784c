//! `restore`: firn's for containers with GPUs and for images of firn, else runc's. Every image is compared
//! with the container's spec first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use firn_config::names;
use firn_oci::Spec;
use firn_process::cancel::CancellationToken;
use firn_process::reaper::Reaper;
use firn_transaction::create::{PrepareError, PreparedBundle, Request, prepare};
use firn_transaction::history::{self, HistoryDir, code_of};
use firn_transaction::journal::Operation;
use firn_transaction::restore::{self, FrontEnd, RestoreError};
use firn_transaction::{recording, recovery};

use crate::action::CallEnd;
use crate::checkpoint::{flags, refuse};
use crate::command_line::CommandLine;
use crate::container::{NAMESPACE, made, options};
use crate::error::{Failure, Trouble};
use crate::open::Open;
use crate::program::expect_configured;

/// Options of runc that a transaction cannot have.
const REFUSED: [&str; 4] = ["lazy-pages", "auto-dedup", "lsm-profile", "lsm-mount-context"];

/// runc's image directory if none is named.
const IMAGE: &str = "checkpoint";

/// Where runc writes init's pid if the client names no file.
const PID_FILE: &str = "init.pid";

pub async fn run(line: &CommandLine, reaper: &Reaper) -> Result<CallEnd, Failure> {
    let (id, bundle) = (line.id().unwrap_or_default(), line.bundle());
    let image = line.path("image-path");
    let image = image.unwrap_or_else(|| std::path::absolute(IMAGE).unwrap_or_else(|_| IMAGE.into()));
    let spec = Spec::load(&bundle).map_err(PrepareError::from)?;
    if !spec.requests_gpu() && !spec.has_other_gpus() && !image.join(names::MANIFEST).exists() {
        restore::admit(id, &spec, &bundle, &image, reaper).await?;
        return Ok(CallEnd::Pass);
    }
    refuse(line, id, &REFUSED)?;
    expect_configured().map_err(Trouble::Config)?;
    if !line.has("detach") && !line.has("d") {
        let (id, option) = (id.to_owned(), "detach");
        return Err(Trouble::Missing { id, option }.into());
    }
    let begun = Open::begin(line, id, &bundle).map_err(Trouble::Notes)?;
    let open = begun.ok_or_else(|| Trouble::Busy { id: id.to_owned() })?;
    let recording = recording::begin(Operation::Restore, id, NAMESPACE);
    let done = transact(line, id, &bundle, &image, reaper).await;
    let outcome = if done.is_ok() { "done" } else { "failed" };
    let code = done.as_ref().err().and_then(code_of);
    history::write(
        &HistoryDir::default(),
        recording.entry(outcome, code),
        recording.take_log(),
    )
    .await;
    open.end().map_err(Trouble::Notes)?;
    done.map(|()| CallEnd::Here)
}

async fn transact(
    line: &CommandLine,
    id: &str,
    bundle: &Path,
    image: &Path,
    reaper: &Reaper,
) -> Result<(), Failure> {
    recovery::recover(bundle).await;
    let cancel = CancellationToken::default();
    let prepared = prepare(Request {
        id,
        namespace: NAMESPACE,
        bundle,
        options: options(line, bundle)?,
        image: Some(image),
        reaper,
        images: &restore::NoImages,
        labels: Box::pin(async { BTreeMap::new() }),
        cancel: &cancel,
    });
    let PreparedBundle {
        options,
        traits,
        runc,
        restore,
        ..
    } = prepared.await?;
    let mut prepared = restore.expect("an image was named");
    let (given, image) = (flags(line), &mut prepared.flags);
    image.open_tcp |= given.open_tcp;
    image.external_unix_sockets |= given.external_unix_sockets;
    image.terminal |= given.terminal;
    image.file_locks |= given.file_locks;
    let container = made(id, bundle, runc, options, traits, None);
    let caller = Caller {
        pid_file: line
            .path("pid-file")
            .unwrap_or_else(|| container.bundle.join(PID_FILE)),
        console: line.path("console-socket"),
    };
    let restored = restore::run(&container, prepared, reaper, caller).await;
    Ok(restored.map_err(|failed| failed.error)?)
}

/// The caller of firn-runc, whose stdio the container gets.
struct Caller {
    pid_file: PathBuf,
    console: Option<PathBuf>,
}

impl FrontEnd for Caller {
    type Error = RestoreError;

    async fn open(&mut self) -> Result<(), RestoreError> {
        Ok(())
    }

    fn pid_file(&self) -> PathBuf {
        self.pid_file.clone()
    }

    fn console(&self) -> Option<PathBuf> {
        self.console.clone()
    }

    fn attach(&mut self, command: &mut Command) {
        command.stdin(Stdio::inherit());
    }

    async fn connect(&mut self) -> Result<(), RestoreError> {
        Ok(())
    }

    async fn close(&mut self) {}
}
