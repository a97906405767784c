//! `checkpoint`: firn's for containers with GPUs, else runc's.

use std::path::PathBuf;

use firn_image::manifest::DumpFlags;
use firn_process::reaper::Reaper;
use firn_transaction::checkpoint::{self, Overrides, Request};
use firn_transaction::container::InitState;
use firn_transaction::history::{self, HistoryDir, code_of};
use firn_transaction::image_dir::ImageDir;
use firn_transaction::journal::Operation;
use firn_transaction::recording;

use crate::action::CallEnd;
use crate::command_line::CommandLine;
use crate::container;
use crate::error::{Failure, Trouble};
use crate::open::Open;
use crate::program::expect_configured;

/// Options of runc that a transaction cannot have.
const REFUSED: [&str; 5] = ["pre-dump", "lazy-pages", "page-server", "status-fd", "auto-dedup"];

/// runc's image directory if none is named.
const IMAGE: &str = "checkpoint";

pub async fn run(line: &CommandLine, reaper: &Reaper) -> Result<CallEnd, Failure> {
    let id = line.id().unwrap_or_default();
    let state = container::state(line, id, reaper).await?;
    let Some(state) = state.filter(container::State::is_alive) else {
        return Ok(CallEnd::Pass);
    };
    let container = container::running(line, id, &state, reaper)?;
    if !container.traits.by_firn() && !container.traits.other_gpus {
        return Ok(CallEnd::Pass);
    }
    refuse(line, id, &REFUSED)?;
    expect_configured().map_err(Trouble::Config)?;
    let begun = Open::begin(line, id, &state.bundle).map_err(Trouble::Notes)?;
    let open = begun.ok_or_else(|| Trouble::Busy { id: id.to_owned() })?;
    let path = line.path("image-path");
    let path = path.unwrap_or_else(|| std::path::absolute(IMAGE).unwrap_or_else(|_| IMAGE.into()));
    let found = ImageDir::find(&path, !container.traits.by_firn()).await;
    let request = checkpoint::usable(&container, found, &path).map(|image| Request {
        image,
        work: line.path("work-path"),
        parent: line.values("parent-path").last().map(PathBuf::from),
        exit: !line.has("leave-running"),
        flags: flags(line),
        empty_namespaces: line.values("empty-ns").map(str::to_owned).collect(),
        meeting: None,
        layer: None,
        files_copied: false,
        inline: false,
        overrides: Overrides::default(),
    });
    let recording = recording::begin(Operation::Checkpoint, id, container::NAMESPACE);
    let done = match request {
        Ok(request) => checkpoint::run(&container, &request, reaper).await,
        Err(error) => Err(error),
    };
    let code = done.as_ref().err().and_then(code_of);
    let outcome = recording.outcome(&container, done.is_ok());
    history::write(
        &HistoryDir::default(),
        recording.entry(outcome, code),
        recording.take_log(),
    )
    .await;
    // The note of a suspended container leads the next call to its journal.
    if container.state() != InitState::Suspended {
        open.end().map_err(Trouble::Notes)?;
    }
    Ok(done.map(|()| CallEnd::Here)?)
}

/// The flags of CRIU that both commands have.
pub fn flags(line: &CommandLine) -> DumpFlags {
    DumpFlags {
        open_tcp: line.has("tcp-established"),
        external_unix_sockets: line.has("ext-unix-sk"),
        terminal: line.has("shell-job"),
        file_locks: true,
    }
}

/// Refuses options that firn's transactions do not have.
pub fn refuse(line: &CommandLine, id: &str, refused: &[&'static str]) -> Result<(), Trouble> {
    match refused.iter().find(|option| line.has(option)) {
        None => Ok(()),
        Some(option) => Err(Trouble::Option {
            id: id.to_owned(),
            option,
        }),
    }
}
