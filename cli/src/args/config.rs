//! The command line of `firn config`.

use std::path::PathBuf;

use clap::Subcommand;

/// Look at firn's configuration.
#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:\n  firn config check\n  firn config check new.toml --json")]
pub enum ConfigCommand {
    Check(ConfigCheckArgs),
}

/// Show all mistakes in a configuration file, with line and key, and what they prevent.
///
/// A mistake fails the operations that go by its key (`FIRN-CONFIG-INVALID`), and no start of a container.
/// Changes nothing; a file is in force as soon as it is written.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  firn config check\n  firn config check new.toml && cp new.toml \
                  /etc/firn/config.toml\n\n\
                  Exit status: 0 there is no mistake, 1 there is one, or the file cannot be read, 2 wrong \
                  usage."
)]
pub struct ConfigCheckArgs {
    /// The file. Default: $FIRN_CONFIG, or /etc/firn/config.toml.
    pub file: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}
