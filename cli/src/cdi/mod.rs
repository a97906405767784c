//! `firn cdi`: the node's CDI files.

mod driver;
mod generate;
mod list;

use anyhow::Result;

use crate::args::CdiCommand;

/// True: all is well.
pub fn run(command: &CdiCommand) -> Result<bool> {
    match command {
        CdiCommand::Generate(args) => generate::run(args),
        CdiCommand::List(args) => list::run(args),
    }
}
