//! What a container has written to its own root file system.

use std::path::{Path, PathBuf};
use std::process::Command;

use firn_config::{Config, Keys, find_program, names};
use firn_host::{Chain, Problem};
use firn_process::blocking::tidy;
use firn_process::reaper::Reaper;

use crate::container::Container;

/// A container whose files are not kept.
#[derive(Debug, thiserror::Error, Problem)]
pub enum LayerError {
    #[error("cannot keep the files of container {container} in {}: {why}", archive.display())]
    #[problem("FIRN-POD", "see that there is room; the container continues")]
    Keep {
        container: String,
        archive: PathBuf,
        why: String,
    },
    #[error("{} is there already", archive.display())]
    #[problem("FIRN-POD", "name another directory")]
    Taken { archive: PathBuf },
    #[error(transparent)]
    Config(#[from] firn_config::ConfigError),
    #[error(transparent)]
    Program(#[from] firn_config::ProgramError),
}

/// Refuses an archive that is there: it is not of this checkpoint.
pub async fn expect_none(archive: &Path) -> Result<(), LayerError> {
    let path = archive.to_owned();
    let exists = tidy("look for an archive", move || path.symlink_metadata().is_ok()).await;
    if exists {
        Err(LayerError::Taken {
            archive: archive.to_owned(),
        })
    } else {
        Ok(())
    }
}

/// Removes the archive of a checkpoint that has failed, if it was made.
pub async fn remove(archive: PathBuf) {
    tidy("remove an archive", move || drop(std::fs::remove_file(archive))).await;
}

/// Archives the files of a container that stands still.
pub async fn keep(container: &Container, archive: &Path, reaper: &Reaper) -> Result<(), LayerError> {
    let config = Config::load(Keys::CHECKPOINT)?;
    let mut command = Command::new(find_program(names::HOOK_PROGRAM, config.hook.path.as_deref())?);
    command.arg("keep-layer").arg(&container.bundle).arg(archive);
    let output = reaper.output(&mut command, config.deadlines.criu_dump).await;
    let kept = output.map_err(|error| Chain(&error).to_string());
    let kept = kept.and_then(|output| output.printed());
    kept.map(drop).map_err(|why| LayerError::Keep {
        container: container.id.clone(),
        archive: archive.to_owned(),
        why,
    })
}
