//! Reading the configuration file, for operations and with all of its mistakes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use firn_host::Problem;

use crate::file::{Bulk, Config, JobHooks};
use crate::mistake::{Keys, Mistake, MistakeKind};
use crate::names;
use crate::section::{self, FileReport, Section, UnknownKeys};

/// A configuration file that cannot be used.
#[derive(Debug, thiserror::Error, Problem)]
pub enum ConfigError {
    /// The file is there and cannot be read.
    #[error("cannot read configuration {}", path.display())]
    #[problem(
        "FIRN-CONFIG-UNREADABLE",
        "make the file readable for root, or remove it to use the defaults"
    )]
    Read { path: PathBuf, source: io::Error },
    /// The file is not valid: syntax, an unknown key, or a value of the wrong shape.
    #[error("invalid configuration {}: {}", path.display(), listed(mistakes))]
    #[problem(
        "FIRN-CONFIG-INVALID",
        "correct these lines; `firn config check` shows all mistakes in firn's configuration"
    )]
    Invalid { path: PathBuf, mistakes: Vec<Mistake> },
}

fn listed(mistakes: &[Mistake]) -> String {
    let all: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
    all.join("; ")
}

/// The file as it was read.
#[derive(Debug)]
pub struct Reading {
    /// Its values; the defaults where it has none or wrong ones, and everywhere if it is not TOML.
    pub config: Config,
    pub mistakes: Vec<Mistake>,
    /// The line of each key that it has, as `restore.gpus`.
    pub lines: BTreeMap<String, usize>,
}

impl Reading {
    /// What the file means for an operation that goes by these keys.
    pub(crate) fn of_keys(self, path: &Path, keys: Keys) -> Result<Config, ConfigError> {
        let mistakes = self.mistakes.into_iter();
        let mistakes: Vec<Mistake> = mistakes.filter(|mistake| mistake.prevents(keys)).collect();
        if mistakes.is_empty() {
            Ok(self.config)
        } else {
            Err(ConfigError::Invalid {
                path: path.to_owned(),
                mistakes,
            })
        }
    }
}

impl Config {
    /// Where the configuration is: the value of `FIRN_CONFIG`, else `/etc/firn/config.toml`.
    pub fn path() -> PathBuf {
        match std::env::var_os(names::ENV_CONFIG) {
            Some(path) if !path.is_empty() => path.into(),
            _ => names::CONFIG_FILE.into(),
        }
    }

    /// Reads the node's configuration for an operation that goes by these keys. Mistakes elsewhere do not
    /// count. No file: the defaults.
    pub fn load(keys: Keys) -> Result<Self, ConfigError> {
        let path = Self::path();
        Self::read(&path)?.of_keys(&path, keys)
    }

    /// Reads the node's configuration for what a mistake must not prevent, as the start of a container or a
    /// rollback. A key with a mistake has its default, or the value that permits least.
    pub fn load_what_is_valid() -> (Self, Option<ConfigError>) {
        let path = Self::path();
        match Self::read(&path) {
            Err(error) => (Self::default(), Some(error)),
            Ok(Reading {
                mut config, mistakes, ..
            }) => {
                if mistakes.iter().any(|mistake| mistake.prevents(Keys::JOB_HOOKS)) {
                    config.checkpoint.hooks = JobHooks::Refuse;
                }
                let error = (!mistakes.is_empty()).then_some(ConfigError::Invalid { path, mistakes });
                (config, error)
            }
        }
    }

    /// Reads this file with all its mistakes. No file: the defaults.
    pub fn read(path: &Path) -> Result<Reading, ConfigError> {
        let mut config = Self::default();
        let FileReport { mut mistakes, lines } = read(path, &mut config, UnknownKeys::Refuse)?;
        if config.images.bulk == Bulk::Store && config.images.store.is_none() {
            mistakes.push(Mistake {
                line: lines.get(BULK).copied().unwrap_or_default(),
                key: BULK.to_owned(),
                kind: MistakeKind::Value,
                problem: "\"store\" needs the key store".to_owned(),
            });
            config.images.bulk = Bulk::Inline;
        }
        Ok(Reading {
            config,
            mistakes,
            lines,
        })
    }
}

const BULK: &str = "images.bulk";

/// Reads a file into a section that holds the defaults. No file: these stay.
pub(crate) fn read(
    path: &Path,
    section: &mut dyn Section,
    unknown: UnknownKeys,
) -> Result<FileReport, ConfigError> {
    let text = match std::fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(FileReport::default()),
        read => read.map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?,
    };
    Ok(section::read(&String::from_utf8_lossy(&text), section, unknown))
}
